"""
Has DeepSpeed reduce gradients and gather weights within nodes and then between them, by
[`HierarchicalCollectives`](../processes/hierarchical_collectives.py).
"""

import functools
import importlib
import logging
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any, Callable, Iterator, List, NamedTuple, Optional
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from allennlp_deepspeed.engine.shard_exchange import ShardExchange, is_of_all
from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.processes.hierarchical_collectives import HierarchicalCollectives

logger = logging.getLogger(__name__)

# Bytes. What is smaller costs calls and not bytes.
_SMALLEST = 4096
# Bytes of a few numbers, which each rank sends to each in one trip.
_FEW = 64

# Of the engines that are up and have one.
_in_use: List[HierarchicalCollectives] = []
_patches = ExitStack()


class Communication(NamedTuple):
    """
    # Parameters

    goes_by_nodes : `bool`
        Whether it is hierarchical.
    shard_exchange : `ShardExchange`, optional (default = `None`)
        What sums gradients, if it is, at stages 1 and 2.
    """

    goes_by_nodes: bool
    shard_exchange: Optional[ShardExchange] = None


@contextmanager
def hierarchical_communication(
    engine: DeepSpeedEngine, within: Optional[int]
) -> Iterator[Communication]:
    """
    Within it DeepSpeed's large collectives over all ranks are hierarchical, and on CPUs a few
    numbers are reduced in one trip. To be entered by every rank. Gives what it has come to.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    within : `Optional[int]`, required.
        How many neighbouring ranks reduce first. With one, ranks exchange what each has to sum, and
        all-reduces and gatherings stay as they are. `None` for the collectives as they are.
    """
    # Those who have started the workers of one node may count otherwise than those of another.
    sizes = agreement.of_all(within) if dist.get_world_size() > 1 else [None]
    if len(set(sizes)) > 1:
        logger.warning(
            "Gradients are reduced over all workers at once: nodes have different numbers of "
            "workers, by rank %s.",
            sizes,
        )
    if within is None or len(set(sizes)) > 1:
        yield Communication(goes_by_nodes=False)
        return
    if within > 1:
        logger.info(
            "Gradients are reduced within %d workers and then between %d nodes ('reduce_within').",
            within,
            dist.get_world_size() // within,
        )
    collectives = HierarchicalCollectives(within)
    _use(collectives)
    try:
        if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
            exchange = ShardExchange(engine.optimizer, collectives, _SMALLEST)
            with exchange.in_use():
                yield Communication(True, exchange)
        else:
            yield Communication(True)
    finally:
        _in_use.remove(collectives)
        if not _in_use:
            _patches.close()


def _use(collectives: HierarchicalCollectives) -> None:
    if not _in_use:
        # As an attribute of `deepspeed.comm`, `torch` is PyTorch.
        backend: Any = importlib.import_module("deepspeed.comm.torch").TorchBackend
        for hierarchical in (_all_reduce, _reduce_scatter_tensor, _all_gather_into_tensor):
            name = hierarchical.__name__.lstrip("_")
            method = partialmethod(hierarchical, getattr(backend, name))
            _patches.enter_context(mock.patch.object(backend, name, method))
    _in_use.append(collectives)


# These take the place of methods of DeepSpeed's backend, with the same arguments after the method
# itself.


def _all_reduce(
    backend: Any,
    flat: Callable,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    if not async_op and _is_few(group, tensor) and (_is_sum(op) or _is_max(op)):
        # Such as the norm of a gradient, for which an optimizer waits.
        everyones = agreement.everyones_at_once(tensor).unbind()
        # One after the other, which gives the same on processors of all kinds.
        tensor.copy_(functools.reduce(torch.add if _is_sum(op) else torch.maximum, everyones))
        return None
    if async_op or not (_has_neighbours() and _is_sum(op) and _is_large(group, tensor)):
        return flat(backend, tensor, op=op, group=group, async_op=async_op)
    _in_use[-1].all_reduce(tensor)
    return None


def _reduce_scatter_tensor(
    backend: Any,
    flat: Callable,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    if async_op or not (_is_sum(op) and _is_large(group, input_tensor, output_tensor)):
        return flat(backend, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
    sizes = [output_tensor.numel()] * dist.get_world_size()
    own = _in_use[-1].reduce_scatter(input_tensor.view(-1), sizes)
    output_tensor.copy_(own.view_as(output_tensor))
    return None


def _all_gather_into_tensor(
    backend: Any,
    flat: Callable,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    if not _is_large(group, output_tensor, input_tensor):
        return flat(backend, output_tensor, input_tensor, group=group, async_op=async_op)
    # Also without neighbours by the connections that gradients have just crossed. Those of another
    # group have been idle since the step before, and TCP starts slowly after that.
    gathering = _in_use[-1].all_gather(output_tensor, input_tensor)
    return gathering if async_op else gathering.wait()


def _has_neighbours() -> bool:
    """Whether there are several ranks on a node. Others have nobody to share a crossing with."""
    return _in_use[-1].node_size > 1


def _is_sum(op: Any) -> bool:
    return op in (ReduceOp.SUM, dist.ReduceOp.SUM)


def _is_max(op: Any) -> bool:
    return op in (ReduceOp.MAX, dist.ReduceOp.MAX)


def _is_few(group: Any, tensor: torch.Tensor) -> bool:
    """Whether a collective is over all ranks, and takes the time of its trips."""
    return tensor.device.type == "cpu" and tensor.nbytes <= _FEW and is_of_all(group)


def _is_large(group: Any, tensor: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a collective is over all ranks, and worth more calls."""
    return (
        tensor.nbytes >= _SMALLEST
        and all(t.is_contiguous() for t in (tensor, *others))
        and is_of_all(group)
    )
