"""
Finds the largest chunk that fits into memory.
"""

import logging
from typing import Any, Callable, List, Optional, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters import free_memory
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.zero3.prefetch_traces import PrefetchTraces
from allennlp_deepspeed.training.restored_state import restored_state

logger = logging.getLogger(__name__)

Numbers = TypeVar("Numbers", int, List[int])

# A backward pass needs more memory than the saved tensors: gradients of activations, and temporary
# tensors of operations.
_SAFETY_FACTOR = 2


def find_chunk_size(
    name: str,
    encode: Callable[[int], Any],
    batch_size: int,
    wrapped_model: DeepSpeedWrappedModel,
    retains_outputs: bool = False,
    available_bytes: Optional[int] = None,
) -> int:
    """
    Finds the largest chunk whose activations fit into memory. It encodes increasing numbers of
    examples, doubling each time, and measures the memory of the graph, until the next number would
    not fit or all examples did. The result is interpolated from the memory of one additional
    example: a batch is padded to one length, so that all examples need the same. The state of the
    model and the random states stay the same. Every rank must call it, and all get the same result.

    # Parameters

    name : `str`, required.
        The name of the size, for the log.
    encode : `Callable[[int], Any]`, required.
        Runs the model on copies of this number of examples, or of all if there are fewer.
    batch_size : `int`, required.
        The number of this rank's examples.
    wrapped_model : `DeepSpeedWrappedModel`, required.
        The model, whose gradients need memory too.
    retains_outputs : `bool`, optional (default = `False`)
        Whether the outputs of all examples stay in memory instead of those of a chunk only.
    available_bytes : `int`, optional (default = `available_for_activations(wrapped_model)`)
        Bytes of free memory.

    # Returns

    `int`
        The number of examples of a chunk.
    """
    engine = wrapped_model.engine
    max_batch_size = _all_reduce_max(batch_size, engine)
    if available_bytes is None:
        available_bytes = available_for_activations(wrapped_model)
    size, (needed, result) = 1, _all_reduce_max(_activation_bytes(encode, 1, engine), engine)
    needed_by_one = needed
    if retains_outputs:
        available_bytes -= max_batch_size * result
    available_bytes = max(0, available_bytes)
    budget = available_bytes // _SAFETY_FACTOR
    # Bytes of one additional example. Some bytes are needed for any number of examples.
    slope = 0
    while size < max_batch_size and needed + size * slope <= budget:
        size *= 2
        before = needed
        needed, _ = _all_reduce_max(_activation_bytes(encode, size, engine), engine)
        slope = max(1, (needed - before) // (size // 2))
    fitting = size + (budget - needed) // slope if slope else size
    fitting = min(max_batch_size, max(1, fitting))
    if dist.get_rank() == 0:
        logger.info(
            "%s is %d from now on, of %d examples per rank: %d examples need %d bytes of "
            "activations. Besides two unsharded gradients and what %s still to allocate, %d bytes "
            "are free on every rank, and half of them may be used.",
            name,
            fitting,
            max_batch_size,
            size,
            needed,
            "the optimizer and callbacks are" if retains_outputs else "the optimizer is",
            available_bytes,
        )
        if needed_by_one > budget:
            logger.warning(
                "Not even one example fits into that memory: the next step may run out of memory."
            )
    return fitting


def available_for_activations(wrapped_model: DeepSpeedWrappedModel) -> int:
    """
    Returns the bytes of memory that remain after what has been used so far, two full gradients, and
    the optimizer states that don't exist yet. Every rank must call it before its first backward
    pass, because later the activations of earlier steps count as used. All ranks get the same
    number.
    """
    engine = wrapped_model.engine
    # Full gradients are in memory until they are reduced, and a second copy during the reduction.
    gradient = free_memory.full_gradient_bytes(
        (p for p in engine.module.parameters() if p.requires_grad), torch.float32
    )
    reserved = 2 * gradient + _all_reduce_max(_unallocated_state_bytes(wrapped_model), engine)
    return free_memory.min_free_bytes(engine.device) - reserved


def _unallocated_state_bytes(wrapped_model: DeepSpeedWrappedModel) -> int:
    """Returns the bytes of optimizer states on this device that the first step will allocate."""
    device, optimizer = wrapped_model.engine.device, wrapped_model.optimizer
    # Two values for each element, as for Adam, which has the largest states of PyTorch's.
    return sum(
        2 * shard.nbytes
        for shard in wrapped_model.shards.masters
        if shard.device.type == device.type and not optimizer.state.get(shard)
    )


def _activation_bytes(
    encode: Callable[[int], Any], size: int, engine: DeepSpeedEngine
) -> List[int]:
    """
    Returns the bytes that the forward pass saves for the backward pass, without parameters and
    including its outputs, and the bytes of the outputs alone.
    """
    parameters = list(engine.module.parameters())
    storages = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Checked for each tensor, because ZeRO-3 allocates the storage of parameters only while
        # they are in use.
        with access_allowed():
            is_parameter = any(storage._cdata == p.untyped_storage()._cdata for p in parameters)
        if not is_parameter:
            storages[storage._cdata] = storage
        # A result that its own node has saved unchanged would keep the graph alive forever.
        return tensor if tensor.is_leaf else tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    # Training passes have another order of modules, which DeepSpeed has to record at stage 3.
    with (
        restored_state(engine.module),
        PrefetchTraces(engine).use("without a backward pass"),
        hooks,
    ):
        results = encode(size)
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        count(tensor)
    output_sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return [sum(storage.nbytes() for storage in storages.values()), sum(output_sizes.values())]


def _all_reduce_max(value: Numbers, engine: DeepSpeedEngine) -> Numbers:
    return collectives.all_reduce_max(value, engine.device, torch.int64)
