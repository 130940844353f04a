"""
Combinations of features, drawn at random and chosen, train as plain PyTorch does. `python -m
evidence cross` has more.
"""

from pathlib import Path
from typing import Dict, List

import pytest
import torch
from filelock import FileLock

from evidence.studies.cross import judge
from tests.cross.case import Case, chosen, draw
from tests.cross.plain import Fault, train_plainly
from tests.cross.training import Finished, train_all
from tests.cross.verdict import differences

NUM_CASES = 30
CASES_AT_ONCE = 10


def _cases() -> List[Case]:
    """The first that are drawn, and the chosen: those with as many workers side by side."""
    return [
        case
        for cases in ([draw(index) for index in range(NUM_CASES)], chosen())
        for case in sorted(cases, key=lambda case: (case.entry, case.workers, case.index))
    ]


def _finished(directory: Path, part: int) -> Dict[int, Finished]:
    """Trains some of them, once a test session."""
    root = directory / "cross" / str(part)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock"):
        if not (root / "finished.pt").exists():
            finished = train_all(_cases()[part * CASES_AT_ONCE :][:CASES_AT_ONCE], root)
            plain = {index: tuple(one) for index, one in finished.items()}
            torch.save(plain, root / "finished.pt")
        plain = torch.load(root / "finished.pt", weights_only=False)
    return {index: Finished(*one) for index, one in plain.items()}


@pytest.mark.parametrize(
    "stage, number",
    [
        pytest.param(case.stage, number, id=f"{case.stage}-{case.index}")
        for number, case in enumerate(_cases())
    ],
)
def test_combinations_of_features_train_as_plain_pytorch_does(
    session_directory: Path, stage: int, number: int
):
    case = _cases()[number]
    assert case.stage == stage
    finished = _finished(session_directory, number // CASES_AT_ONCE)[case.index]
    problems = judge(case, finished, with_faults=False).problems
    assert not problems, (
        "\n".join([str(case), *problems])
        + f"\n`python -m evidence cross --only {case.index}` runs it again."
    )


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16", "fp16"])
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_the_tolerance_shows_a_micro_batch_that_is_lost_or_counts_twice(
    precision: str, factor: float
):
    case = Case(0, 0, precision=precision, workers=2, accumulation=3)
    expected = train_plainly(case)
    wrong = train_plainly(case, Fault(step=1, rank=1, micro_batch=0, factor=factor))
    assert max(differences(case, wrong.weights, expected).values()) > 2
