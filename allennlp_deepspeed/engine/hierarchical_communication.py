"""
Has DeepSpeed reduce gradients and gather weights within nodes and then between them, by
[`HierarchicalCollectives`](../processes/hierarchical_collectives.py).
"""

import importlib
import logging
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any, Callable, FrozenSet, Iterator, List, Optional, Sequence, Union
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.processes.hierarchical_collectives import HierarchicalCollectives

logger = logging.getLogger(__name__)

# Bytes. What is smaller costs calls and not bytes.
_SMALLEST = 4096

# Of the engines that are up and have one.
_in_use: List[HierarchicalCollectives] = []
_patches = ExitStack()


@contextmanager
def hierarchical_communication(engine: DeepSpeedEngine, within: Optional[int]) -> Iterator[None]:
    """
    Within it DeepSpeed's large collectives over all ranks are hierarchical. To be entered by every
    rank.

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
        yield
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
        with _scattered(engine.optimizer, collectives):
            yield
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
    if not _has_neighbours():
        # By the connections that gradients have just crossed. Those of another group have been
        # idle since the step before, and TCP starts slowly after that.
        across = _in_use[-1].across
        return flat(backend, output_tensor, input_tensor, group=across, async_op=async_op)
    gathering = _in_use[-1].all_gather(output_tensor, input_tensor)
    return gathering if async_op else gathering.wait()


def _has_neighbours() -> bool:
    """Whether there are several ranks on a node. Others have nobody to share a crossing with."""
    return _in_use[-1].node_size > 1


def _is_sum(op: Any) -> bool:
    return op in (ReduceOp.SUM, dist.ReduceOp.SUM)


def _is_large(group: Any, tensor: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a collective is over all ranks, and worth more calls."""
    return (
        tensor.nbytes >= _SMALLEST
        and all(t.is_contiguous() for t in (tensor, *others))
        and _is_of_all(group)
    )


def _is_of_all(group: Any) -> bool:
    return group is None or dist.get_world_size(group) == dist.get_world_size()


@contextmanager
def _scattered(optimizer: Any, collectives: HierarchicalCollectives) -> Iterator[None]:
    """
    Within it the ranks that shard an optimizer at stages 1 and 2 get the sums of their own shards.
    By itself DeepSpeed has all of them get those of all.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        yield
        return
    all_reduce_and_copy = optimizer.allreduce_and_copy_with_multiple_ranks

    def reduce_scatter_and_copy(
        bucket: List[torch.Tensor],
        communication_data_type: torch.dtype,
        log: Any = None,
        divide: bool = True,
        process_group: Any = None,
        bucket_ranks: Sequence[Union[int, FrozenSet[int]]] = (),
        output_bucket: Any = None,
    ) -> None:
        """
        Takes slices of gradients, and for each the ranks that step it: one, or several where Muon
        steps a matrix that is on more than one.
        """
        owners = [rank for ranks in bucket_ranks for rank in _owners(ranks)]
        is_large = sum(gradient.nbytes for gradient in bucket) >= _SMALLEST
        has_one_owner_each = len(owners) == len(bucket)
        if divide or not (has_one_owner_each and is_large and _is_of_all(process_group)):
            all_reduce_and_copy(
                bucket,
                communication_data_type,
                log=log,
                divide=divide,
                process_group=process_group,
                bucket_ranks=bucket_ranks,
                output_bucket=output_bucket,
            )
            return
        by_owner: List[List[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
        for owner, gradient in zip(owners, bucket):
            by_owner[owner].append(gradient.view(-1))
        sizes = [sum(gradient.numel() for gradient in gradients) for gradients in by_owner]
        flat = torch.cat([gradient for gradients in by_owner for gradient in gradients])
        sums = collectives.reduce_scatter(flat.to(communication_data_type), sizes)
        own = [i for i, owner in enumerate(owners) if owner == dist.get_rank()]
        for i, of_slice in zip(own, sums.split([bucket[i].numel() for i in own])):
            reduced = of_slice.view_as(bucket[i])
            output = None if output_bucket is None else output_bucket[i]
            # May be more precise than the slice.
            optimizer._add_to_grad_partition_buffer(output, reduced)
            bucket[i].copy_(reduced)
            if optimizer.overlap_comm and not get_accelerator().resolves_data_dependency():
                bucket[i].record_stream(optimizer.reduction_stream)

    with mock.patch.object(
        optimizer, "allreduce_and_copy_with_multiple_ranks", reduce_scatter_and_copy
    ):
        yield


def _owners(ranks: Union[int, FrozenSet[int]]) -> FrozenSet[int]:
    return frozenset((ranks,)) if isinstance(ranks, int) else ranks
