"""
Finds the largest chunk that fits into memory.
"""

import logging
from typing import Any, Callable, List, Optional, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import agreement
from allennlp_deepspeed.engine.gathered_parameters import Passes
from allennlp_deepspeed.engine.released_parameters import access_allowed
from allennlp_deepspeed.engine.shards import Shards
from allennlp_deepspeed.training import gradient_memory

logger = logging.getLogger(__name__)

Numbers = TypeVar("Numbers", int, List[int])

# A backward pass needs more than what the forward pass has saved for it: gradients of activations,
# and what is only there inside an operation.
_SAFETY = 2


def find_chunk_size(
    what: str,
    encode: Callable[[int], Any],
    batch_size: int,
    engine: DeepSpeedEngine,
    keeps_results: bool = False,
    left: Optional[int] = None,
) -> int:
    """
    Encodes more and more examples, twice as many each time, and measures what the graph holds,
    until the next would not fit, or all did. What fits in between follows from what one example
    more has cost: a batch is padded to one length, so that all cost the same. To be called by every
    rank; all get the same.

    # Parameters

    what : `str`, required.
        Whose size it is, for the log.
    encode : `Callable[[int], Any]`, required.
        Runs the model on so many examples, or on all if there are fewer.
    batch_size : `int`, required.
        This rank's examples.
    engine : `DeepSpeedEngine`, required.
        Whose gradients need memory too.
    keeps_results : `bool`, optional (default = `False`)
        Whether the results of all examples stay in memory, and not only those of a chunk.
    left : `int`, optional (default = what `left_for_activations` gives now)
        Bytes.

    # Returns

    `int`
        A number of examples.
    """
    most = _highest(batch_size, engine)
    if left is None:
        left = left_for_activations(engine)
    size, (needed, result) = 1, _highest(_bytes_of(encode, 1, engine), engine)
    needed_by_one = needed
    if keeps_results:
        left -= most * result
    left = max(0, left)
    budget = left // _SAFETY
    # Bytes of one example more. Some are needed for any number.
    slope = 0
    while size < most and needed + size * slope <= budget:
        size *= 2
        before, (needed, _) = needed, _highest(_bytes_of(encode, size, engine), engine)
        slope = max(1, (needed - before) // (size // 2))
    fitting = size + (budget - needed) // slope if slope else size
    fitting = min(most, max(1, fitting))
    if dist.get_rank() == 0:
        logger.info(
            "%s is %d from here on, of %d examples on a rank: %d of them take %d bytes of "
            "activations. Beside two whole gradients and what %s still to keep %d bytes are left "
            "on every rank, of which half may be used.",
            what,
            fitting,
            most,
            size,
            needed,
            "the optimizer and callbacks are" if keeps_results else "the optimizer is",
            left,
        )
        if needed_by_one > budget:
            logger.warning("Not even one example fits into that: the next step may fail.")
    return fitting


def left_for_activations(engine: DeepSpeedEngine) -> int:
    """
    Bytes of memory beside what has been used so far, two whole gradients, and what the optimizer is
    still to make. To be called by every rank before its first backward pass, because later the
    activations of the steps before count as used; all get the same.
    """
    # Held whole until they are reduced, and once more while they are.
    gradient = gradient_memory.of_whole_gradient(
        (p for p in engine.module.parameters() if p.requires_grad), torch.float32
    )
    taken = 2 * gradient + _highest(_states_to_come(engine), engine)
    return gradient_memory.least_left_free(engine.device) - taken


def _states_to_come(engine: DeepSpeedEngine) -> int:
    """
    Bytes of what the optimizer keeps for each element that it steps here, where it will only make
    it in the first step: as much as Adam, of those that come with PyTorch the one with the most.
    """
    optimizer = engine.basic_optimizer
    return sum(
        2 * shard.nbytes
        for shard in Shards(engine).masters
        if shard.device.type == engine.device.type and not optimizer.state.get(shard)
    )


def _bytes_of(encode: Callable[[int], Any], size: int, engine: DeepSpeedEngine) -> List[int]:
    """
    Saved by the forward pass for the backward pass, besides parameters, and of its results, with
    these; and of its results alone.
    """
    parameters = list(engine.module.parameters())
    storages = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Asked each time, because ZeRO-3 gives parameters their storage only while they are used.
        with access_allowed():
            is_parameter = any(storage._cdata == p.untyped_storage()._cdata for p in parameters)
        if not is_parameter:
            storages[storage._cdata] = storage
        # A result that its own node has saved as it is would keep the graph alive for ever.
        return tensor if tensor.is_leaf else tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    # The passes that train follow another order, which DeepSpeed is to record at stage 3.
    with Passes(engine).of("without a backward pass"), hooks:
        results = encode(size)
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        count(tensor)
    of_results = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return [sum(storage.nbytes() for storage in storages.values()), sum(of_results.values())]


def _highest(value: Numbers, engine: DeepSpeedEngine) -> Numbers:
    return agreement.highest(value, engine.device, torch.int64)
