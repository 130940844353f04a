"""
Reducing within two of four workers first makes no difference to weights, and only sums of two go to
the other two. Nor does it where each worker is by itself.
"""

import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed.engine.process_environment import process_environment
from allennlp_deepspeed.processes.hierarchical_collectives import node_groups
from allennlp_deepspeed.reports.communication import CommunicationCounter
from tests.integration.unused_parameters_test import TwoHeads, batches_of
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import CPU, Side, numbers
from tests.support.workers import run_workers

SIZE = 64  # of 18 kB, less than 4 of which are reduced as they are


class Case(NamedTuple):
    name: str
    stages: str = "0123"
    zero: Dict[str, Any] = {}
    deepspeed_config: Dict[str, Any] = {}
    arguments: Dict[str, Any] = {}
    heads: str = "0000"
    tolerance: float = 1e-6


THREE = {"num_gradient_accumulation_steps": 3, "gradient_synchronization": "boundary"}
BY_MICRO_BATCH = {**THREE, "gradient_synchronization": "micro_batch"}
CASES = [
    Case("plain"),
    Case("unused and clipped", arguments={**THREE, "grad_norm": 0.05}, heads="000111010101"),
    Case("micro-batch", "23", arguments=BY_MICRO_BATCH, heads="000" * 3),
    Case("offload", "123", zero={"offload_optimizer": {"device": "cpu"}}),
    Case("small buckets", "123", zero={"reduce_bucket_size": 1500}),
    Case("overlap", "12", zero={"overlap_comm": True}),
    Case("all-reduce", "2", zero={"reduce_scatter": False}),
    Case("within two", "3", arguments={"shard_within": 2}),
    Case("sequential", "3", zero={"stage3_allgather_sequential": True}),
    Case("persistent", "3", zero={"stage3_param_persistence_threshold": 10_000}),
    Case("average", arguments=THREE, heads="000" * 3),
    Case("bf16", deepspeed_config={"bf16": {"enabled": True}}, tolerance=1e-2),
    Case("fp16", deepspeed_config={"fp16": {"enabled": True}}, tolerance=1e-2),
    Case(
        "bf16, reduced in fp32",
        "12",
        deepspeed_config={
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        arguments=THREE,
        heads="000" * 3,
    ),
]
QUICK = [
    (0, "unused and clipped"),
    (1, "plain"),
    (2, "unused and clipped"),
    (2, "offload"),
    (2, "bf16, reduced in fp32"),
    (3, "within two"),
]


class ReadsGradients(TrainerCallback):
    """For which gradients are averaged after each backward pass."""

    def on_backward(self, *args: Any, **kwargs: Any) -> bool:
        return False


def trained(case: Case, stage: int, rank: int, reduce_within: Optional[int]) -> Any:
    """
    In a process group of all workers. Weights, bytes of collectives by name, and the names of those
    between nodes.
    """
    side = Side(
        lambda: TwoHeads(SIZE),
        lambda rank: batches_of(case.heads, 4, SIZE)[rank],
        stage,
        world_size=4,
        zero=case.zero,
        deepspeed_config=case.deepspeed_config,
        callbacks=lambda: [ReadsGradients("")] if case.name == "average" else [],
        num_epochs=1,
        reduce_within=reduce_within,
        **case.arguments,
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = side.construct(rank, Path(directory))
        between_nodes = set()
        with trainer.session():
            if reduce_within is not None:
                for lane in node_groups(reduce_within).lanes:
                    lane.register_pre_hook(
                        0, lambda args: between_nodes.add(args.name.name.lower())
                    )
            with CommunicationCounter() as counter:
                trainer.train()
            traffic = {name: count.bytes for name, count in counter.read().items()}
            return numbers(trainer), traffic, between_nodes


def stages_and_cases(quick: List[Tuple[int, str]]) -> List[Any]:
    """All, of which only some are no part of the soak tests."""
    return [
        pytest.param(
            int(stage),
            case,
            id=f"{stage}-{case.name}",
            marks=[] if (int(stage), case.name) in quick else [pytest.mark.soak],
        )
        for case in CASES
        for stage in case.stages
    ]


@pytest.mark.parametrize("stage, case", stages_and_cases(QUICK))
def test_weights_are_those_without_and_large_tensors_go_by_way_of_two(
    stage: int, case: Case
) -> None:
    def train(rank: int) -> List[Any]:
        with process_environment(CPU, rank):
            return [trained(case, stage, rank, reduce_within) for reduce_within in (2, None)]

    (actual, traffic, _), (expected, traffic_without, _) = run_workers(4, train)[0]
    assert_same_weights(tensors(actual), tensors(expected), tolerance=case.tolerance)
    assert 8 * among_all(traffic) < among_all(traffic_without)


@pytest.mark.parametrize(
    "stage, case",
    stages_and_cases([(1, "offload"), (2, "plain"), (2, "unused and clipped"), (3, "plain")]),
)
def test_workers_by_themselves_are_sent_only_what_each_has_to_sum(stage: int, case: Case) -> None:
    def train(rank: int) -> List[Any]:
        with process_environment(CPU, rank):
            return [trained(case, stage, rank, reduce_within) for reduce_within in (1, None)]

    (actual, traffic, between_nodes), (expected, traffic_without, _) = run_workers(4, train)[0]
    assert_same_weights(tensors(actual), tensors(expected), tolerance=case.tolerance)
    if case.name not in ("plain", "offload") or stage == 0:
        return
    # What is gathered goes by the connections of the exchange, which are not idle then.
    assert {"alltoall", "allgather"} == {name.strip("_").split("_")[0] for name in between_nodes}
    # Takes the place of what gloo sends as much for as for the sums of all.
    whole = "all_reduce" if stage < 3 else "reduce_scatter"
    assert traffic_without[whole] - traffic.get(whole, 0) > 0.9 * traffic["all_to_all"] > 0
    assert traffic.keys() - {"all_to_all", whole} == traffic_without.keys() - {whole}


def tensors(arrays: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}


def among_all(traffic: Dict[str, int]) -> int:
    return sum(num_bytes for name, num_bytes in traffic.items() if not name.endswith("_2_ranks"))
