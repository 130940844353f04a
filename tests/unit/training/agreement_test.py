"""What the ranks tell each other, and what must not change."""

from copy import deepcopy
from threading import Lock
from typing import Any, List

import torch

from allennlp_deepspeed.training.agreement import AFTER_STEPS, RECORD, SAME, Agreement
from allennlp_deepspeed.training.metric_tracker import AgreedMetricTracker
from tests.support.communication import CommunicationCounter
from tests.support.workers import run_workers


def test_values_of_all_ranks_are_combined_in_one_collective() -> None:
    def work(rank: int) -> Any:
        exchange = Agreement(lambda: torch.device("cpu")).exchange
        with CommunicationCounter() as counter:
            agreed = exchange(
                steps_since_nan=rank, num_batches=rank - 5, signal=0, changes=rank == 1
            )
            calls = sum(each.calls for each in counter.read().values())
        return agreed, calls, exchange(score=(rank, None))["score"]

    expected = {"steps_since_nan": 1, "num_batches": -5, "signal": 0, "changes": True}
    assert run_workers(2, work) == [(expected, 1, [(0, None), (1, None)])] * 2


def test_a_checksum_of_32_bits_is_compared() -> None:
    def work(rank: int) -> List[bool]:
        exchange = Agreement(lambda: torch.device("cpu")).exchange
        checksums = (2**32 - 1, 2**32 - 1 - rank)
        return [exchange(used_parameters=each)["used_parameters"] for each in checksums]

    assert RECORD["used_parameters"] is SAME
    assert run_workers(2, work) == [[True, False]] * 2


def test_owners_take_in_the_order_of_the_record() -> None:
    taken: List[str] = []
    agreement = Agreement(lambda: torch.device("cpu"))
    for name in AFTER_STEPS:
        agreement.own(name, lambda: 0, lambda agreed, name=name: taken.append(name))
    agreement.exchange(*AFTER_STEPS)
    assert tuple(taken) == AFTER_STEPS
    assert taken[:2] == ["steps_since_nan", "non_finite_gradients"]  # the cause of the others


def test_a_copied_metric_tracker_agrees_with_the_same_ranks() -> None:
    def work(rank: int) -> Any:
        agreement = Agreement(lambda: torch.device("cpu"))
        agreement.own("signal", Lock().locked, lambda agreed: None)  # can't be copied
        tracker = AgreedMetricTracker("+accuracy", None, agreement.exchange)
        copied = deepcopy(tracker)
        copied.add_metrics({"accuracy": 0.5 + rank})
        return [each.state_dict()["best_so_far"] for each in (tracker, copied)]

    assert run_workers(2, work) == [[None, 0.5]] * 2
