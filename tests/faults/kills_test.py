"""
Runs that are killed with SIGKILL at any point go on as if nothing had happened.

This is the quick form. `make soak` kills 200 times.
"""

from pathlib import Path
from random import Random

import pytest

from tests.faults.plan import draw
from tests.faults.trial import References, run_trial

# Between them every stage, every kind of phase, and the variants.
VARIANT_OF_STAGE = ("plain", "async", "offload", "patience")
PHASES_OF_STAGE = (
    ("save", "validation", "clean_up"),
    ("commit", "accumulation", "load"),
    ("prune", "on_batch", "catching_up"),
    ("best_weights", "step", "archive"),
)
# One of each stage.
LEFT_TO_SOAK = ("clean_up", "load", "catching_up", "step")


@pytest.mark.parametrize(
    "stage, phase",
    [
        pytest.param(
            stage, phase, marks=[pytest.mark.soak] if phase in LEFT_TO_SOAK else [], id=phase
        )
        for stage in range(4)
        for phase in PHASES_OF_STAGE[stage]
    ],
)
def test_a_killed_run_resumes_exactly(
    references: References, tmp_path: Path, stage: int, phase: str
):
    reference = references.run(stage, VARIANT_OF_STAGE[stage])
    random = Random(f"{stage} {phase}")
    kills = draw(random, reference, phase)
    # Not drawn as well, so that both kinds are among so few.
    kills[-1] = kills[-1]._replace(kills_all=stage % 2 == PHASES_OF_STAGE[stage].index(phase) % 2)
    run_trial(reference, kills, tmp_path).check()
