"""
Runs that are killed with SIGKILL at any point go on as if nothing had happened.

This is the quick form. `python -m evidence soak` kills 200 times.
"""

from pathlib import Path
from random import Random

import pytest

from tests.faults.plan import draw
from tests.faults.trial import References, run_trial


@pytest.mark.parametrize(
    "stage, variant, phase, kills_all",
    [
        (0, "validations", "validation", False),
        (2, "async", "commit", True),
        (2, "async", "archive", True),
        (3, "offload", "prune", False),
    ],
)
def test_a_killed_run_resumes_exactly(
    references: References, tmp_path: Path, stage: int, variant: str, phase: str, kills_all: bool
):
    reference = references.run(stage, variant)
    random = Random(f"{stage} {phase}")
    kills = draw(random, reference, phase)
    kills[-1] = kills[-1]._replace(kills_all=kills_all)
    run_trial(reference, kills, tmp_path).check()
