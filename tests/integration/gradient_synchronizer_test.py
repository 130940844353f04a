"""In which backward passes gradients are reduced, and which calls in between are refused."""

from contextlib import nullcontext
from typing import Any, Callable
from unittest import mock

import pytest
import torch

from allennlp_deepspeed.engine.gradient_synchronizer import GradientSynchronizer
from allennlp_deepspeed.engine.parameters.free_memory import MemoryChoices
from allennlp_deepspeed.engine.parameters.shards import Shards
from allennlp_deepspeed.engine.process.process_environment import process_environment
from tests.support.side_by_side import CPU
from tests.support.workers import run_workers
from tests.upstream.engine import engine_of, linear


class Training:
    """One weight at stage 2, in one process."""

    def __init__(self, config: Any = None, **arguments: Any) -> None:
        self.engine = engine_of(linear(), 2, **(config or {}))
        choices = MemoryChoices(CPU, num_micro_batches=2)
        self.synchronizer = GradientSynchronizer(Shards(self.engine), choices, **arguments)
        self.synchronizer.start_step()

    def backward(self) -> None:
        weight = self.engine.module.weight
        self.engine.backward(self.engine(torch.ones(1, 1, dtype=weight.dtype)).float().sum())

    def enter_no_sync(self) -> None:
        with self.synchronizer.no_sync():
            pass


def in_worker(function: Callable[[], Any]) -> None:
    def work(rank: int) -> None:
        with process_environment(CPU, rank):
            function()

    run_workers(1, work)


APART = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    "reduces, passes_before, arguments",
    [
        pytest.param(True, 0, {}, id="alone"),
        pytest.param(True, 2, {}, id="after deferred ones on their parameters"),
        pytest.param(False, 2, {"config": APART}, id="after deferred ones elsewhere"),
        pytest.param(True, 0, {"config": APART}, id="alone in another type"),
        pytest.param(True, 1, {"config": APART, "mode": "micro_batch"}, id="after reduced ones"),
        pytest.param(False, 0, {"several_passes": True}, id="of a callback"),
    ],
)
def test_a_pass_of_the_last_micro_batch_reduces(
    reduces: bool, passes_before: int, arguments: Any
) -> None:
    def train() -> None:
        training = Training(**{"mode": "step", **arguments})
        if passes_before:
            with training.synchronizer.micro_batch(is_last=False):
                for _ in range(passes_before):
                    training.backward()
        with (
            pytest.raises(RuntimeError, match="second backward") if reduces else nullcontext(),
            training.synchronizer.micro_batch(is_last=True),
        ):
            training.backward()
            training.backward()

    in_worker(train)


def test_passes_reduce_after_those_in_no_sync() -> None:
    def train() -> None:
        training = Training(mode="step")
        with training.synchronizer.micro_batch(is_last=True):
            with training.synchronizer.no_sync():
                training.backward()
                training.backward()
            training.backward()
            with pytest.raises(RuntimeError, match="second backward"):
                training.backward()

    in_worker(train)


@pytest.mark.parametrize("is_last", [True, False])
def test_nothing_begins_in_a_micro_batch(is_last: bool) -> None:
    def train() -> None:
        training = Training(mode="step")
        synchronizer = training.synchronizer
        with synchronizer.micro_batch(is_last):
            training.backward()
            with pytest.raises(RuntimeError, match="next step"):
                synchronizer.start_step()
            with (
                pytest.raises(RuntimeError, match="another micro-batch"),
                synchronizer.micro_batch(is_last),
            ):
                pass
        synchronizer.start_step()

    in_worker(train)


def test_no_pass_begins_while_the_rest_is_reduced() -> None:
    def train() -> None:
        training = Training()
        name = "overlapping_partition_gradients_reduce_epilogue"
        with (
            mock.patch.object(training.engine.optimizer, name, training.enter_no_sync),
            pytest.raises(RuntimeError, match="from the phase REST to DEFER"),
            training.synchronizer.micro_batch(is_last=True),
        ):
            training.backward()

    in_worker(train)


def test_a_step_may_begin_after_a_micro_batch_that_failed() -> None:
    def train() -> None:
        training = Training()
        with pytest.raises(ZeroDivisionError), training.synchronizer.micro_batch(is_last=True):
            raise ZeroDivisionError
        training.synchronizer.start_step()
        with training.synchronizer.micro_batch(is_last=True):
            training.backward()
        training.synchronizer.zero_grad()

    in_worker(train)


def test_gradients_are_cleared_until_a_micro_batch_has_reduced_some() -> None:
    def train() -> None:
        training = Training(mode="micro_batch")
        training.synchronizer.zero_grad()
        with training.synchronizer.micro_batch(is_last=False):
            training.backward()
        with pytest.raises(RuntimeError, match="zero_grad"):
            training.synchronizer.zero_grad()
        with training.synchronizer.micro_batch(is_last=True):
            training.backward()
        training.synchronizer.zero_grad()

    in_worker(train)
