"""Workarounds for faults of DeepSpeed 0.19.8 in parameters and gradients on NVMe."""

from contextlib import contextmanager
from typing import Any, Iterator, List, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, zero
from allennlp_deepspeed.engine import internals


@contextmanager
def keep_dtype_of_parameters() -> Iterator[None]:
    """
    Context manager in which parameters keep their type on NVMe.

    Works around DeepSpeed 0.19.8: on the CPU, files of fp32 parameters on NVMe are in bf16, so that
    the model computes with rounded weights. Gone when `deepspeed.zero.Init` on the CPU has the
    `dtype` that it is given.
    """
    set_dtype = internals.set_dtype_function()

    def set_given_dtype(init: Any, ds_config: Any, dtype: Any) -> None:
        set_dtype(init, ds_config, dtype)
        init.dtype = dtype or init.dtype

    with internals.replace_attributes(zero.Init, _set_dtype=set_given_dtype):
        yield


@contextmanager
def keep_misaligned_gradients(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which gradients stay in CPU memory that can't be read from NVMe.

    Works around DeepSpeed 0.19.8: the gradients of a sub-group are read from their files to their
    places in a buffer. Direct I/O needs aligned addresses, which the gradients after one of another
    size don't have, and it fails without an error: the optimizer steps with other values. Gone when
    the swapper keeps gradients at misaligned offsets.
    """
    swapper: Any = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        yield
        return
    adjust = internals.split_gradients_function(swapper)

    def keep(tensors: List[torch.Tensor], offsets: List[int]) -> Tuple[List[Any], List[int]]:
        for tensor, offset in zip(tensors, offsets):
            if offset % swapper.numel_alignment:
                tensor.swappable = False  # type: ignore[attr-defined]
        return adjust(tensors, offsets)

    with internals.replace_attributes(swapper, _adjust_for_misaligned_lengths=keep):
        yield
