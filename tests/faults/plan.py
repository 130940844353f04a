"""
Where runs are to be killed: drawn at random, with a seed, from the points that they pass.
"""

import re
from random import Random
from typing import Dict, Hashable, List, NamedTuple, Sequence

from tests.faults.points import Point
from tests.faults.trial import Kill, Reference

FILE_PHASES = ("save", "commit", "prune", "best_weights")
LOOP_PHASES = (
    "forward",
    "backward",
    "accumulation",
    "step",
    "after_step",
    "on_batch",
    "validation",
    "on_epoch",
    "finish",
    "archive",
)


class RecoveryPhase(NamedTuple):
    """Which ranks pass points of the phase while they recover, and at least how many each."""

    ranks: Sequence[int]
    num_points: int


RECOVERY_PHASES: Dict[str, RecoveryPhase] = {
    "clean_up": RecoveryPhase([0], 7),  # of the files of a checkpoint that was not committed
    "load": RecoveryPhase([0, 1], 2),  # of the files with states
    "catching_up": RecoveryPhase([0, 1], 2),
}


def draw(random: Random, reference: Reference, phase: str) -> List[Kill]:
    """One kill in the phase, or two if the phase is one of recovery."""
    kills_all = random.random() < 0.5
    if phase not in RECOVERY_PHASES:
        return [Kill(random.choice(reference.points_of(phase)), kills_all)]
    ranks, num_points = RECOVERY_PHASES[phase]
    point = Point(random.choice(ranks), phase, random.randrange(num_points))
    return [_before_a_commit(reference), Kill(point, kills_all)]


def _before_a_commit(reference: Reference) -> Kill:
    """
    Just before the rename that makes the fifth checkpoint one. Recovery has all its files to
    remove, and an epoch to catch up with.
    """
    renames = [p for p in reference.points_of("commit") if p.detail.startswith("rename ")]
    return Kill(renames[4], kills_all=True)


def draw_each_operation(random: Random, reference: Reference) -> List[Point]:
    """
    Each file operation of a save, a commit and a prune, once, each at a random one of the
    checkpoints.
    """
    alike: Dict[Hashable, List[Point]] = {}
    for phase in FILE_PHASES:
        for point in reference.points_of(phase):
            operation = re.sub(r"checkpoint_e\d+_b\d+", "checkpoint", point.detail)
            alike.setdefault((point.rank, phase, operation), []).append(point)
    return [random.choice(points) for points in alike.values()]
