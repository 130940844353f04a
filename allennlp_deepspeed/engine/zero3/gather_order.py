"""The order of writes to the shards of ZeRO stage 3 and of gathers, which run in a stream apart."""

from contextlib import contextmanager
from typing import Any, Iterator, List

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, get_accelerator, zero
from allennlp_deepspeed.engine import internals

# The streams in which the engines of this process gather parameters.
_streams: List[Any] = []


def wait_for_writes() -> None:
    """
    Makes the gathers that follow wait for what has been written in the current stream. The host
    doesn't wait.
    """
    writer = get_accelerator().current_stream()
    for stream in _streams:
        if stream != writer:
            stream.wait_stream(writer)


@contextmanager
def gather_after_writes(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which a forward pass gathers parameters only when their shards have been
    written: by the optimizer step, a moving average, a checkpoint or a callback. As in PyTorch's
    FSDP2, the stream of the gathers waits once when a forward pass starts.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        An engine at stage 3, on a device with streams.

    Works around DeepSpeed 0.19.8: the stream in which stage 3 gathers parameters doesn't wait for
    the stream in which the optimizer step, or `GatheredParameters` with a `modifier_rank`, has
    written their shards. If no parameter is persistent, a forward pass may compute with stale or
    half-written weights. DeepSpeed's throughput timer hides this, because it synchronizes the host
    in each pass. Gone when the stream waits without the timer.
    """
    offload: Any = engine.optimizer.parameter_offload
    stream = internals.gather_stream(offload)
    start_module = offload.pre_sub_module_forward_function
    num_outside = internals.num_modules_in_forward()

    def wait_and_start(module: torch.nn.Module) -> None:
        # A callback may call another module than the model. A backward pass, which may recompute
        # modules, has waited in its forward pass.
        is_first = module is engine.module or internals.num_modules_in_forward() <= num_outside
        if is_first and torch._C._current_graph_task_id() == -1:
            wait_for_writes()
        start_module(module)

    _streams.append(stream)
    try:
        with internals.replace_attributes(offload, pre_sub_module_forward_function=wait_and_start):
            yield
    finally:
        _streams.remove(stream)


@contextmanager
def wait_after_changes() -> Iterator[None]:
    """
    Context manager in which gathers also wait for `GatheredParameters` with a `modifier_rank`,
    which may be in a forward pass. It affects the full process.
    """
    partition = internals.partition_function()

    def partition_and_wait(init: zero.Init, *args: Any, **kwargs: Any) -> None:
        partition(init, *args, **kwargs)
        if kwargs.get("has_been_updated"):
            wait_for_writes()

    with internals.replace_attributes(zero.Init, _partition=partition_and_wait):
        yield
