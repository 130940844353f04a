"""Keys of "zero_optimization" that are about how, and not what, make no difference to weights."""

from typing import Any, Dict, List

import pytest
import torch

from tests.integration.elementwise_test import Layers, batches
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side, trained
from tests.support.workers import run_workers

KEYS: Dict[int, List[Dict[str, Any]]] = {
    2: [
        {"use_multi_rank_bucket_allreduce": False},
        {"contiguous_gradients": False},
        {"allgather_bucket_size": 8, "reduce_bucket_size": 8},
    ],
    3: [
        {"stage3_allgather_sequential": True},
        {"stage3_use_all_reduce_for_fetch_params": True},
        {"stage3_model_persistence_threshold": 8, "stage3_param_persistence_threshold": 5},
        {"enable_sanity_checks": True, "log_trace_cache_warnings": True},
        {"memory_efficient_linear": False},
        {"contiguous_gradients": False, "sub_group_size": 8},
        {"stage3_max_live_parameters": 8, "stage3_max_reuse_distance": 8},
        {"stage3_prefetch_bucket_size": 8, "reduce_bucket_size": 40},
    ],
}


@pytest.mark.parametrize("stage", [2, 3])
def test_keys_about_how_make_no_difference_to_weights(stage: int) -> None:
    def train(rank: int) -> List[Dict[str, Any]]:
        return [
            Side(Layers, batches, None if zero is None else stage, world_size=2, zero=zero).on_rank(
                rank, trained
            )
            for zero in (None, *KEYS[stage])
        ]

    expected, *actual = [
        {name: torch.tensor(array) for name, array in weights.items()}
        for weights in run_workers(2, train)[0]
    ]
    for weights in actual:
        assert_same_weights(weights, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_is_not_larger_than_what_is_trained(stage: int) -> None:
    def bucket(trainer: Any) -> int:
        return trainer.engine.zero_reduce_bucket_size()

    def sizes(**keys: Any) -> List[int]:
        zero = {"stage": stage, **keys}
        frozen = {"no_grad": ["^layers.0"]}
        return [
            *Side(Layers, batches, stage, zero=zero).on_all_ranks(bucket),
            *Side(Layers, batches, stage, zero=zero, **frozen).on_all_ranks(bucket),
        ]

    model = Layers()
    trained = sum(
        p.numel() for name, p in model.named_parameters() if not name.startswith("layers.0")
    )
    assert sizes() == [sum(p.numel() for p in model.parameters()), trained]
    assert sizes(reduce_bucket_size=9) == [9, 9]
