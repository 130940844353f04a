"""
Contenders against each other: each pair is timed in turn, while all others wait.
"""

from contextlib import ExitStack
from functools import partial
from typing import Dict, List, NamedTuple, Sequence, Tuple

from evidence.harness.contender import Contender, Job
from evidence.harness.process_tree import ProcessTree, Unavailable, Worker
from evidence.harness.stopwatch import Elapsed, Outcome, Plan
from evidence.harness.workload import Workload

Pair = Tuple[str, str]


class Comparison(NamedTuple):
    """
    # Parameters

    outcomes : `Dict[str, List[Outcome]]`
        For each contender that of each rank.
    timings : `Dict[Pair, List[Tuple[Elapsed, Elapsed]]]`
        What two contenders took for their segments. One that is alone is paired with itself.
    skipped : `Dict[str, str]`
        Why a contender didn't take part.
    """

    outcomes: Dict[str, List[Outcome]]
    timings: Dict[Pair, List[Tuple[Elapsed, Elapsed]]]
    skipped: Dict[str, str]


def compare(
    contenders: Dict[str, Contender],
    pairs: Sequence[Pair],
    workload: Workload,
    plan: Plan,
    world_size: int,
    time_limit: float,
) -> Comparison:
    """
    # Parameters

    contenders : `Dict[str, Contender]`
    pairs : `Sequence[Pair]`
        Those who are compared, if both can run here.
    workload : `Workload`
    plan : `Plan`
        Of one pair. A contender that is in several makes the segments of all of them.
    world_size : `int`
    time_limit : `float`
        In seconds, for all of it.
    """
    reasons = {name: contender.unavailable_reason() for name, contender in contenders.items()}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    here = {name: contender for name, contender in contenders.items() if name not in skipped}
    pairs = [pair for pair in pairs if set(pair) <= here.keys()]
    trees: Dict[str, ProcessTree] = {}
    with ExitStack() as stack:
        for name, contender in here.items():
            contender.preload()
            num_pairs = sum(name in pair for pair in pairs)
            tree = ProcessTree(
                f"{name} ({workload})",
                partial(_train, contender, workload),
                plan._replace(num_segments=plan.num_segments * max(1, num_pairs)),
                world_size,
                time_limit,
            )
            trees[name] = stack.enter_context(tree)
        for name, tree in list(trees.items()):
            try:
                tree.wait_until_warm()
            except Unavailable as reason:
                skipped[name] = str(reason)
                del trees[name]
        pairs = [pair for pair in pairs if set(pair) <= trees.keys()]
        timings: Dict[Pair, List[Tuple[Elapsed, Elapsed]]] = {
            pair: [] for pair in pairs or [(name, name) for name in trees]
        }
        for i in range(plan.num_segments):
            for (one, other), of_pair in timings.items():
                of_pair.append(_time(trees[one], trees[other], one_first=i % 2 == 0))
        # Without the others of its pairs one has nothing to show.
        compared = {name for pair in timings for name in pair}
        outcomes = {name: tree.finish() for name, tree in trees.items() if name in compared}
    return Comparison(outcomes, timings, skipped)


def _time(one: ProcessTree, other: ProcessTree, one_first: bool) -> Tuple[Elapsed, Elapsed]:
    """What each takes for a segment, in the order of the arguments."""
    if one is other:
        elapsed = one.time_segment()
        return elapsed, elapsed
    if one_first:
        return one.time_segment(), other.time_segment()
    elapsed = other.time_segment()
    return one.time_segment(), elapsed


def _train(contender: Contender, workload: Workload, worker: Worker) -> None:
    """What each worker of a contender does."""
    workload = contender.own_workload(workload)
    data_loader = workload.build_data_loader(worker)
    stopwatch = worker.start_stopwatch(workload.losses_in_step)
    contender.train(Job(workload, worker, data_loader, stopwatch))
