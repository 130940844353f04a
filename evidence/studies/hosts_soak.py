"""
Trainings on two hosts that fail in 40 ways end everywhere in time, and continue exactly.

Needs root and iproute2.
"""

import argparse
import itertools
import logging
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Dict, List

from evidence import report
from tests.hosts.trial import (
    GO_ON,
    KINDS,
    RENDEZVOUS_TIMEOUT,
    SECONDS_TO_END,
    TIMEOUT,
    Outcome,
    Trial,
    draw,
    experiment,
    run_trial,
)
from tests.support.experiment import Experiments, Result
from tests.support.hosts import missing_right, on_one_host

TIME = "12 minutes"

logger = logging.getLogger(__name__)

ONLY = "numbers of trials, from 0 on"

STAGES = (0, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=40, help="trainings, with a fault each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trainings beside one another")


def plan(num_faults: int, seed: int) -> List[Trial]:
    """Every kind of fault at both stages with both kinds of directory, and then again."""
    generator = Random(seed)
    settings = itertools.product(STAGES, (False, True), KINDS)
    return [
        Trial(
            stage,
            is_shared,
            saves_in_background=generator.random() < 0.5,
            # Which node comes first, there is no checkpoint for `--recover` to begin with.
            has_flag=generator.random() < 0.5 and not kind.startswith("come"),
            fault=draw(generator, kind),
        )
        for stage, is_shared, kind in itertools.islice(itertools.cycle(settings), num_faults)
    ]


def run(arguments: argparse.Namespace) -> bool:
    reason = missing_right()
    if reason is not None:
        sys.exit(f"There can be no hosts here: {reason}")
    start = time.time()
    root = Path(tempfile.mkdtemp(prefix="hosts-soak-"))
    experiments = Experiments(root / "references")
    expected: Dict[int, Result] = {
        stage: experiments.run(on_one_host(experiment(stage))) for stage in STAGES
    }
    trials = plan(arguments.faults, arguments.seed)
    logger.info("%d trainings in %s", len(trials), root)

    def execute(i: int) -> Outcome:
        directory = root / f"trial_{i}"
        directory.mkdir()
        outcome = run_trial(trials[i], expected[trials[i].stage], directory)
        seconds = ", ".join(f"{seconds:.1f} s" for seconds in outcome.seconds)
        what = "\n".join(outcome.problems) or "as it should be"
        logger.info("%d: %s: %s; %s", i, trials[i], seconds, what)
        if not outcome.problems:
            shutil.rmtree(directory)
        return outcome

    chosen = list(map(int, arguments.only)) or range(len(trials))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(execute, chosen))
    summary = summarize([trials[i] for i in chosen], outcomes, arguments.seed, time.time() - start)
    arguments.page.write(summary, markdown(summary))
    is_good = not any(outcome.problems for outcome in outcomes)
    if is_good:
        shutil.rmtree(root)
    return is_good


def summarize(
    trials: List[Trial], outcomes: List[Outcome], seed: int, seconds: float
) -> Dict[str, Any]:
    return {
        **report.heading(4),
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "trials": [
            {
                "stage": trial.stage,
                "is_shared": trial.is_shared,
                "kind": trial.fault.kind,
                "trial": str(trial),
                "seconds": [round(seconds, 1) for seconds in outcome.seconds],
                "limits": outcome.limits,
                "problems": outcome.problems,
            }
            for trial, outcome in zip(trials, outcomes, strict=True)
        ],
    }


def markdown(summary: Dict[str, Any]) -> str:
    trials = summary["trials"]
    good = sum(not trial["problems"] for trial in trials)
    in_kinds = {kind: [t for t in trials if t["kind"] == kind] for kind in KINDS}
    rows = []
    for kind, of_kind in in_kinds.items():
        if not of_kind:
            continue
        row = [kind]
        for stage, is_shared in itertools.product(STAGES, (False, True)):
            alike = [t for t in of_kind if (t["stage"], t["is_shared"]) == (stage, is_shared)]
            cells = ["goes on" if kind in GO_ON else _seconds(t) for t in alike]
            row.append("; ".join(cells))
        limits = sorted({limit for trial in of_kind for limit in trial["limits"]})
        row.append(", ".join(f"{limit:g}" for limit in limits))
        rows.append(row)
    columns = [
        f"stage {stage}, {'shared' if is_shared else 'own'}"
        for stage, is_shared in itertools.product(STAGES, (False, True))
    ]
    blocks = [
        f"{len(trials)} trainings on two hosts of two workers, of which each has a fault at a "
        f"moment drawn at random. {good} of them ended everywhere in time or went on, as they "
        "should, had no committed checkpoint that wasn't whole, and came, continued where they had "
        "ended, to the weights and metrics of one host of four workers without a fault, bit for "
        "bit.",
        f"`distributed.timeout` is {TIMEOUT} s and `rendezvous_timeout` {RENDEZVOUS_TIMEOUT} s. "
        "What is in the table are the seconds from the fault until no process of the training was "
        "left, by ZeRO stage and kind of serialization directory. The limit is the one of the two "
        f"that counts, which at the start is the latter, and {SECONDS_TO_END} s in which those "
        "that are left print their stacks, leave or are ended. A host that is frozen is told to go "
        "on when the other has ended (the second number); one that comes too late finds nobody.",
        report.table(["Fault", *columns, "limit"], rows),
        f"{report.describe(summary)} Seed {summary['seed']}; {summary['minutes']} "
        "minutes. `python -m evidence hosts_soak` runs it again.",
    ]
    problems = [trial for trial in trials if trial["problems"]]
    if problems:
        blocks.append("## Problems")
        first_lines = [
            f"- {t['trial']}: {'; '.join(p.partition(chr(10))[0] for p in t['problems'])}"
            for t in problems
        ]
        blocks.append("\n".join(first_lines))
    return report.document("Soak test of several hosts", *blocks)


def _seconds(trial: Dict[str, Any]) -> str:
    return ", ".join(f"{seconds:.1f}" for seconds in trial["seconds"])
