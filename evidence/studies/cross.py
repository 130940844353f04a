"""
200 combinations of features, drawn at random, train to the weights of plain PyTorch, or are refused
by name.

`--only 17` trains one of them and says all of it.
"""

import argparse
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch

from evidence import report
from tests.cross.case import SEED, Case, case_of, draw
from tests.cross.plain import Fault, train_plainly
from tests.cross.training import Finished, train_all
from tests.cross.verdict import differences, expected_refusal, problems

TIME = "15 minutes"

logger = logging.getLogger(__name__)

CASES_AT_ONCE = 10

ONLY = "numbers of cases"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="trainings beside one another")


class Judgement(NamedTuple):
    """
    # Parameters

    case : `Case`
    problems : `List[str]`
    is_refused : `bool`
    difference : `float`
        The largest of a tensor, in multiples of what is allowed; `None` if it was not trained.
    difference_of_fault : `float`
        The same of a plain loop that loses the gradient of one micro-batch, or counts it twice: the
        larger of the two, because clipping can hide one of them.
    seconds : `float`
    """

    case: Case
    problems: List[str]
    is_refused: bool
    difference: Optional[float]
    difference_of_fault: Optional[float]
    seconds: float


def judge(case: Case, finished: Finished, with_faults: bool = True) -> Judgement:
    """Compares a case with the plain loop, and that with faults."""
    if expected_refusal(case) or finished.refusal or finished.failure:
        found = problems(case, finished, None)
        return Judgement(case, found, finished.refusal is not None, None, None, finished.seconds)
    expected = train_plainly(case)
    found = problems(case, finished, expected)
    assert finished.weights is not None
    difference = max(differences(case, finished.weights, expected).values())
    of_fault = None
    if with_faults:
        of_fault = max(
            max(differences(case, train_plainly(case, fault).weights, expected).values())
            for fault in _faults(case)
        )
        if of_fault < 1.2:
            found.append(f"The tolerance hides a fault, which makes only {of_fault:.2g} of it.")
    return Judgement(case, found, False, difference, of_fault, finished.seconds)


def _faults(case: Case) -> List[Fault]:
    # In the first epoch, because it may be the best.
    step = case.num_steps // 2
    rank = 0 if case.contrastive else case.workers - 1
    return [Fault(step, rank, 0, factor) for factor in (0.0, 2.0)]


def run(arguments: argparse.Namespace) -> bool:
    start = time.time()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="cross-"))
    cases = [case_of(int(index), arguments.seed) for index in arguments.only]
    cases = cases or [draw(index, arguments.seed) for index in range(arguments.cases)]
    # Cases that are trained alike go together.
    cases.sort(key=lambda case: (case.entry, case.workers))
    parts = [cases[i : i + CASES_AT_ONCE] for i in range(0, len(cases), CASES_AT_ONCE)]

    # In processes, because each forks its workers: they would inherit the locks of PyTorch that
    # other threads hold.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        judgements = [j for part in pool.map(partial(_judge_all, root=root), parts) for j in part]
    judgements.sort(key=lambda judgement: judgement.case.index)
    is_good = not any(judgement.problems for judgement in judgements)
    summary = summarize(judgements, arguments.seed, time.time() - start)
    arguments.page.write(summary, markdown(summary))
    if is_good:
        shutil.rmtree(root)
    else:
        logger.info("Files of the cases with problems are in %s", root)
    return is_good


def _judge_all(cases: List[Case], root: Path) -> List[Judgement]:
    finished = train_all(cases, root)
    judgements = [judge(case, finished[case.index]) for case in cases]
    for judgement in judgements:
        logger.info("%s", _line(judgement))
        if not judgement.problems:
            shutil.rmtree(root / str(judgement.case.index), ignore_errors=True)
    return judgements


def _line(judgement: Judgement) -> str:
    outcome = "; ".join(judgement.problems) or ("refused" if judgement.is_refused else "the same")
    if judgement.difference is not None:
        outcome += f" ({judgement.difference:.2g}"
        if judgement.difference_of_fault is not None:
            outcome += f", with a fault {judgement.difference_of_fault:.2g}"
        outcome += ")"
    return f"{judgement.case}: {outcome}"


def summarize(judgements: List[Judgement], seed: int, seconds: float) -> Dict[str, Any]:
    good = [judgement for judgement in judgements if not judgement.problems]
    return {
        **report.heading(max(judgement.case.workers for judgement in judgements)),
        "cases": len(judgements),
        "the_same": sum(not judgement.is_refused for judgement in good),
        "refused": sum(judgement.is_refused for judgement in good),
        "problems": len(judgements) - len(good),
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "judgements": [
            {
                **asdict(judgement.case),
                "is_refused": judgement.is_refused,
                "difference": judgement.difference,
                "difference_of_fault": judgement.difference_of_fault,
                "problems": [p.strip().splitlines()[-1][:300] for p in judgement.problems],
            }
            for judgement in judgements
        ],
    }


# What the table of the outcome has a row for: a key of a case, and what it is called.
ROWS = {
    "precision": "precision",
    "optimizer": "optimizer",
    "workers": "workers",
    "accumulation": "micro-batches in a step",
    "synchronization": "gradient_synchronization",
    "clipping": "clipping",
    "offload": "offload",
    "heads": "heads",
    "parts": "with",
    "dropout": "dropout",
    "regularizer": "regularizer",
    "scheduler": "schedule",
    "moving_average": "moving average",
    "activation_checkpointing": "activation checkpointing",
    "contrastive": "contrastive",
    "chunk_size": "grad_cache",
    "uneven": "uneven data",
    "overlap_comm": "overlap_comm",
    "small_buckets": "small buckets",
    "find_unused_parameters": "find_unused_parameters",
    "validation": "validation",
    "interrupted_after": "recovery after epoch and step",
    "entry": "entry",
}


def markdown(summary: Dict[str, Any]) -> str:
    rows = [
        [f"{name}: {value}", *counts]
        for key, name in ROWS.items()
        for value, counts in _counts(summary["judgements"], key).items()
    ]
    blocks = [
        f"{summary['cases']} combinations, drawn with seed {summary['seed']}, each trained beside "
        "a plain PyTorch loop on the same data: the weights after training, the loss of each step "
        f"on each worker, norms and validation losses. {summary['the_same']} were the same, "
        f"{summary['refused']} were refused by the name of the key, as they are to be, and "
        f"{summary['problems']} had problems.",
        "The same means: of the change that training makes to a tensor, the difference is at most "
        "1e-5 in fp32, 0.5% in fp16, 3% in bf16 and under autocast, besides the rounding of the "
        "weights themselves. "
        f"The largest was {_largest(summary)}. A plain loop that "
        "loses the gradient of one micro-batch of all, or counts it twice, makes at least "
        f"{_smallest_fault(summary):.1f} times what is allowed, in each of these cases.",
        "Trained, with each feature, and refused in parentheses:",
        report.table(["", *(f"stage {stage}" for stage in range(4))], rows),
        f"{report.describe(summary, with_workers=False)} {summary['minutes']} minutes. "
        "`python -m evidence cross` runs it again, with `--only 17` one of them.",
    ]
    bad = [judgement for judgement in summary["judgements"] if judgement["problems"]]
    if bad:
        names = Case.__dataclass_fields__
        cases = [Case(**{name: judgement[name] for name in names}) for judgement in bad]
        lines = [f"- {case}: {each['problems'][0]}" for case, each in zip(cases, bad)]
        blocks += ["## Problems", "\n".join(lines)]
    return report.document("Combinations of features", *blocks)


def _counts(judgements: List[Dict[str, Any]], key: str) -> Dict[str, List[str]]:
    """For each value of the feature, how many cases there are at each stage."""
    trained: Dict[str, Counter] = {}
    refused: Dict[str, Counter] = {}
    for judgement in judgements:
        value = judgement[key]
        for single in value if key == "parts" else [value]:
            if single in (None, False, 0.0) and single != 0:
                continue
            if key in ("dropout", "regularizer") and not single:
                continue
            counters = refused if judgement["is_refused"] else trained
            counters.setdefault(str(single), Counter())[judgement["stage"]] += 1
    return {
        value: [
            f"{trained.get(value, Counter())[stage]}"
            + (f" ({refused[value][stage]})" if value in refused and refused[value][stage] else "")
            for stage in range(4)
        ]
        for value in sorted({*trained, *refused})
    }


def _largest(summary: Dict[str, Any]) -> str:
    largest: Dict[str, float] = {}
    for judgement in summary["judgements"]:
        if judgement["difference"] is not None and not judgement["problems"]:
            precision = judgement["precision"]
            largest[precision] = max(largest.get(precision, 0), judgement["difference"])
    return ", ".join(f"{value:.2f} of that in {key}" for key, value in sorted(largest.items()))


def _smallest_fault(summary: Dict[str, Any]) -> float:
    values = [judgement["difference_of_fault"] for judgement in summary["judgements"]]
    return min((value for value in values if value is not None), default=float("nan"))
