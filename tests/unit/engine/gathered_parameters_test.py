"""Which parameters stay whole from one chunk to the next."""

from types import SimpleNamespace
from typing import Any, List

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from allennlp_deepspeed.engine.gathered_parameters import worth_keeping


def sharded(size: int, device: Any = None, is_small: bool = False) -> Any:
    """As DeepSpeed leaves a parameter at stage 3."""
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_numel = size
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
    parameter.ds_active_sub_modules = set()
    parameter.ds_persist = is_small
    parameter.ds_tensor = SimpleNamespace(final_location=device)
    return parameter


def engine_of(parameters: List[Any], live: int = 10**9) -> Any:
    offload = SimpleNamespace(_max_available_parameters_in_numel=live)
    return SimpleNamespace(
        module=SimpleNamespace(parameters=lambda: iter(parameters)),
        optimizer=SimpleNamespace(parameter_offload=offload),
    )


def kept(parameters: List[Any], most: int, live: int = 10**9) -> List[int]:
    engine = engine_of(parameters, live)
    return [parameter.ds_numel for parameter in worth_keeping(engine, most)]


def test_as_many_are_kept_as_fit() -> None:
    parameters = [sharded(size) for size in (100, 500, 50, 10)]
    assert kept(parameters, most=4 * 1000) == [100, 500, 50, 10]
    assert kept(parameters, most=4 * 160) == [100, 50, 10]
    assert kept(parameters, most=4 * 1000, live=120) == [100, 10]
    assert kept(parameters, most=0) == []


def test_those_are_left_that_are_whole_anyway_or_have_few_buffers() -> None:
    parameters = [
        sharded(100, is_small=True),
        sharded(50, OffloadDeviceEnum.cpu),
        # Each that is whole has one of `buffer_count` buffers, through which others are read.
        sharded(10, OffloadDeviceEnum.nvme),
    ]
    assert kept(parameters, most=10**6) == [50]
