"""
200 trainings that are killed at random moments, and others whose disk is full at each file
operation, resume to the weights and metrics of a run without a fault, bit for bit.
"""

import argparse
import logging
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Dict, List, NamedTuple

from evidence import report
from tests.faults.plan import FILE_PHASES, LOOP_PHASES, RECOVERY_PHASES, draw, draw_each_operation
from tests.faults.trial import Kill, Outcome, Reference, References, run_trial

TIME = "25 minutes"

logger = logging.getLogger(__name__)

PHASES = (*FILE_PHASES, *LOOP_PHASES, *RECOVERY_PHASES)
VARIANTS_OF_STAGE = (
    ("plain", "async", "patience", "validations"),
    ("plain", "async", "offload"),
    ("plain", "async", "offload", "validations"),
    ("plain", "async", "offload", "patience"),
)
# The stage at which a run is killed before each file operation of a checkpoint, and another one has
# a full disk there.
STAGE_OF_EACH_OPERATION = 2


ONLY = "numbers of trials, from 0 on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs beside one another")


class Trial(NamedTuple):
    stage: int
    variant: str
    kills: List[Kill]


def plan(references: Dict[Any, Reference], num_kills: int, seed: int) -> List[Trial]:
    """
    Each file operation once at one stage, and then all phases in turn, at all stages and in all
    variants, until there are as many kills as asked for. After these, full disks.
    """
    random = Random(seed)
    stage = STAGE_OF_EACH_OPERATION
    each_operation = draw_each_operation(random, references[stage, "plain"])
    full_disks = [Trial(stage, "plain", [Kill(at, error="ENOSPC")]) for at in each_operation]
    trials = [Trial(stage, "plain", [Kill(at, random.random() < 0.5)]) for at in each_operation]
    missing = num_kills - len(trials)
    while missing > 0:
        i = len(trials)
        # The number of phases isn't a multiple of 4, so that all of them meet all stages.
        stage, phase = i % 4, PHASES[i % len(PHASES)]
        variant = random.choice(VARIANTS_OF_STAGE[stage])
        kills = draw(random, references[stage, variant], phase)
        if len(kills) <= missing:
            missing -= len(kills)
            trials.append(Trial(stage, variant, kills))
        else:
            trials.append(Trial(stage, variant, draw(random, references[stage, variant], "commit")))
            missing -= 1
    return trials + full_disks


def run(arguments: argparse.Namespace) -> bool:
    start = time.time()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    references = References(root / "references")
    experiments = [(stage, variant) for stage in range(4) for variant in VARIANTS_OF_STAGE[stage]]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        finished = pool.map(lambda experiment: references.run(*experiment), experiments)
        by_experiment = dict(zip(experiments, finished))
        trials = plan(by_experiment, arguments.kills, arguments.seed)
        chosen = list(map(int, arguments.only)) or range(len(trials))
        logger.info("%d of %d runs in %s", len(chosen), len(trials), root)

        def execute(i: int) -> Outcome:
            stage, variant, kills = trials[i]
            directory = root / f"trial_{i}"
            directory.mkdir()
            outcome = run_trial(by_experiment[stage, variant], kills, directory)
            logger.info(
                "%d: stage %d, %s, %s: %s",
                i,
                stage,
                variant,
                ", then ".join(map(str, kills)),
                "; ".join(outcome.problems) or "resumed exactly",
            )
            if outcome.is_good:
                shutil.rmtree(directory)
            return outcome

        outcomes = list(pool.map(execute, chosen))
    summary = summarize([trials[i] for i in chosen], outcomes, arguments.seed, time.time() - start)
    arguments.page.write(summary, markdown(summary))
    is_good = all(outcome.is_good for outcome in outcomes)
    if is_good:
        shutil.rmtree(root)
    return is_good


def summarize(
    trials: List[Trial], outcomes: List[Outcome], seed: int, seconds: float
) -> Dict[str, Any]:
    kills = [(trial, kill) for trial in trials for kill in trial.kills if kill.error is None]
    return {
        **report.heading(2),
        "kills": len(kills),
        "full_disks": sum(kill.error is not None for trial in trials for kill in trial.kills),
        "runs": len(trials),
        "resumed_exactly": sum(
            not outcome.differences and not outcome.failures for outcome in outcomes
        ),
        "hangs": sum(outcome.hangs > 0 for outcome in outcomes),
        "checkpoints_lost": sum(bool(outcome.lost) for outcome in outcomes),
        "kills_of": {
            "one process": sum(not kill.kills_all for _, kill in kills),
            "all processes": sum(kill.kills_all for _, kill in kills),
        },
        "kills_in_phase": {
            phase: [
                sum(kill.at.phase == phase and trial.stage == stage for trial, kill in kills)
                for stage in range(4)
            ]
            for phase in PHASES
        },
        "runs_of_variant": dict(Counter(trial.variant for trial in trials)),
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "trials": [
            {
                "stage": trial.stage,
                "variant": trial.variant,
                "kills": list(map(str, trial.kills)),
                "problems": outcome.problems,
            }
            for trial, outcome in zip(trials, outcomes, strict=True)
        ],
    }


def markdown(summary: Dict[str, Any]) -> str:
    kills_of, runs_of = summary["kills_of"], summary["runs_of_variant"]
    rows = [
        [phase.replace("_", " "), *map(str, counts)]
        for phase, counts in summary["kills_in_phase"].items()
    ]
    blocks = [
        f"{summary['kills']} kills with SIGKILL and {summary['full_disks']} full disks in "
        f"{summary['runs']} runs of `allennlp train` on two workers. {summary['resumed_exactly']} "
        "of these resumed to the weights and metrics of a run without a fault, bit for bit; "
        f"{summary['hangs']} hung, or left a process behind; {summary['checkpoints_lost']} had at "
        "any time no checkpoint, after one had been committed, or a damaged one.",
        "Killed: "
        + ", ".join(f"{who} {count} times" for who, count in kills_of.items())
        + ". Runs: "
        + ", ".join(f"{variant} {count}" for variant, count in runs_of.items())
        + ".",
        f"At stage {STAGE_OF_EACH_OPERATION}, a run was killed before each file operation of a "
        "save, a commit and a prune, and another one had a full disk from there on.",
        report.table(["Killed in", *(f"stage {stage}" for stage in range(4))], rows),
        f"{report.describe(summary)} Seed {summary['seed']}; {summary['minutes']} minutes. "
        "`python -m evidence soak` runs it again.",
    ]
    problems = [
        f"- stage {t['stage']}, {t['variant']}, {', then '.join(t['kills'])}: "
        f"{'; '.join(t['problems'])}"
        for t in summary["trials"]
        if t["problems"]
    ]
    if problems:
        blocks += ["## Problems", "\n".join(problems)]
    return report.document("Soak test of recovery", *blocks)
