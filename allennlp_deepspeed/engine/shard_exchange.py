from contextlib import contextmanager
from typing import Any, FrozenSet, Iterable, Iterator, List, Sequence, Tuple, Union
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from allennlp_deepspeed.processes.hierarchical_collectives import HierarchicalCollectives, Sums

PIECE_BYTES = 2**20
"""
Of gradients that are sent early: the sooner the first is full, the sooner a connection comes up to
speed.
"""


class ShardExchange:
    """
    Has the ranks that shard an optimizer at ZeRO stages 1 and 2 get the sums of their own shards'
    gradients. By itself DeepSpeed has all of them get those of all.

    DeepSpeed sums the gradients of a bucket when that is full, and waits for it. Where
    `starts_early`, `start` sends each gradient as soon as it is known, and DeepSpeed finds the sums
    when it comes to ask for them. To be constructed by every rank.

    # Parameters

    optimizer : `DeepSpeedZeroOptimizer`, required.
    collectives : `HierarchicalCollectives`, required.
    smallest : `int`, required.
        Bytes of a bucket. DeepSpeed sums smaller ones itself, unless they were started early.

    # Attributes

    starts_early : `bool`
        Whether `start` may be called: not on GPUs, where DeepSpeed's own `overlap_comm` does it,
        nor where it sums otherwise.
    """

    def __init__(
        self,
        optimizer: DeepSpeedZeroOptimizer,
        collectives: HierarchicalCollectives,
        smallest: int,
    ) -> None:
        self._optimizer: Any = optimizer
        self._collectives = collectives
        self._smallest = smallest
        self._all_reduce_and_copy = optimizer.allreduce_and_copy_with_multiple_ranks
        self.starts_early = self._sums_in_order()
        self._sums = Sums(collectives)
        # Slices, each with the rank that steps it, which wait until they are enough for a piece.
        self._waiting: List[Tuple[int, torch.Tensor]] = []
        self._waiting_elements = 0
        # Elements, of all ranks, which DeepSpeed is still to ask for.
        self._started = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it DeepSpeed's optimizer sums so. To be entered by every rank."""
        name = "allreduce_and_copy_with_multiple_ranks"
        with mock.patch.object(self._optimizer, name, self._exchange_and_copy):
            yield

    @torch.no_grad()
    def start(self, parameter: torch.nn.Parameter, group_index: int) -> None:
        """
        Starts to sum a gradient that DeepSpeed is going to be given. To be called by every rank, in
        the order in which DeepSpeed is given them.

        # Parameters

        parameter : `torch.nn.Parameter`, required.
            Whose gradient doesn't change any more.
        group_index : `int`, required.
            Of its group in DeepSpeed's optimizer.
        """
        # As DeepSpeed, which waits for the last tile of a module that computes a sequence in tiles.
        if parameter.numel() == 0 or not getattr(parameter, "ds_grad_is_ready", True):
            return
        gradient = self._optimizer.get_gradient_for_reduction(parameter).reshape(-1)
        self._started += gradient.numel()
        most = max(1, PIECE_BYTES // self._communication_dtype().itemsize)
        first_new = len(self._waiting)
        for owner, start, end in self._slices(parameter, group_index):
            while start < end:
                size = min(end - start, most - self._waiting_elements)
                self._waiting.append((owner, gradient[start : start + size]))
                self._waiting_elements += size
                start += size
                if self._waiting_elements == most:
                    self.send_waiting()
                    first_new = 0
        # A gradient that is too large for its bucket DeepSpeed divides where it is, before it asks.
        self._waiting[first_new:] = [
            (owner, elements.clone()) for owner, elements in self._waiting[first_new:]
        ]

    @property
    def is_idle(self) -> bool:
        """Whether DeepSpeed has asked for all sums that were started."""
        return self._started == 0

    def _sums_in_order(self) -> bool:
        """Whether DeepSpeed asks for all sums here, in the order in which it is given gradients."""
        optimizer = self._optimizer
        parameters = [p for group in optimizer.bit16_groups for p in group]
        return (
            get_accelerator().resolves_data_dependency()
            and optimizer.reduce_scatter
            and optimizer.use_multi_rank_bucket_allreduce
            and optimizer.contiguous_gradients
            and optimizer.gradient_average
            and not optimizer.zenflow
            and not optimizer.has_moe_layers
            and not any(getattr(p, "use_muon", False) for p in parameters)
            and dist.get_world_size(optimizer.dp_process_group) == dist.get_world_size()
            and len({optimizer.get_param_comm_dtype(p) for p in parameters}) == 1
        )

    def _slices(
        self, parameter: torch.nn.Parameter, group_index: int
    ) -> List[Tuple[int, int, int]]:
        """The rank that steps each slice, where it begins and where it ends."""
        optimizer = self._optimizer
        param_id = optimizer.get_param_id(parameter)
        offsets = optimizer.grad_start_offset[group_index]
        starts = sorted(
            (offsets[owner][param_id], owner)
            for owner in optimizer.param_to_partition_ids[group_index][param_id]
        )
        ends = [start for start, _ in starts[1:]] + [parameter.numel()]
        return [(owner, start, end) for (start, owner), end in zip(starts, ends)]

    def send_waiting(self) -> None:
        """Sends what is too little for a piece. To be called by every rank at the same place."""
        if not self._waiting:
            return
        optimizer = self._optimizer
        flat, sizes = _by_owner(self._waiting)
        self._waiting, self._waiting_elements = [], 0
        # As DeepSpeed does it in its bucket, in the same precisions.
        flat = flat.to(optimizer._gradient_reduction_buffer_dtype())
        flat.div_(dist.get_world_size() / float(optimizer.sequence_parallel_size))
        self._sums.add(flat.to(self._communication_dtype()).split(sizes))

    def _communication_dtype(self) -> torch.dtype:
        optimizer = self._optimizer
        return optimizer.get_param_comm_dtype(optimizer.bit16_groups[0][0])

    def _exchange_and_copy(
        self,
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
        own = [i for i, owner in enumerate(owners) if owner == dist.get_rank()]
        if self._started > 0:
            sums = self._take_started(bucket, own, communication_data_type)
        elif not divide and self._can_exchange(bucket, owners, process_group):
            sums = self._exchange(bucket, owners, communication_data_type)
        else:
            self._all_reduce_and_copy(
                bucket,
                communication_data_type,
                log=log,
                divide=divide,
                process_group=process_group,
                bucket_ranks=bucket_ranks,
                output_bucket=output_bucket,
            )
            return
        optimizer = self._optimizer
        for i, of_slice in zip(own, sums.split([bucket[i].numel() for i in own])):
            reduced = of_slice.view_as(bucket[i])
            output = None if output_bucket is None else output_bucket[i]
            # May be more precise than the slice.
            optimizer._add_to_grad_partition_buffer(output, reduced)
            bucket[i].copy_(reduced)
            if optimizer.overlap_comm and not get_accelerator().resolves_data_dependency():
                bucket[i].record_stream(optimizer.reduction_stream)

    def _can_exchange(
        self, bucket: List[torch.Tensor], owners: List[int], process_group: Any
    ) -> bool:
        """Whether each slice has one owner, of all ranks, and there is enough of them."""
        return (
            len(owners) == len(bucket)
            and sum(gradient.nbytes for gradient in bucket) >= self._smallest
            and is_of_all(process_group)
        )

    def _exchange(
        self, bucket: List[torch.Tensor], owners: List[int], dtype: torch.dtype
    ) -> torch.Tensor:
        flat, sizes = _by_owner((owner, slice_.view(-1)) for owner, slice_ in zip(owners, bucket))
        return self._collectives.reduce_scatter(flat.to(dtype), sizes)

    def _take_started(
        self, bucket: List[torch.Tensor], own: List[int], dtype: torch.dtype
    ) -> torch.Tensor:
        self._started -= sum(gradient.numel() for gradient in bucket)
        # Also where this rank has nothing of the bucket.
        self.send_waiting()
        size = sum(bucket[i].numel() for i in own)
        sums = torch.empty(size, dtype=dtype, device=bucket[0].device)
        self._sums.take(sums)
        return sums


def is_of_all(group: Any) -> bool:
    """Whether a group, or the default one for `None`, has all ranks."""
    return group is None or dist.get_world_size(group) == dist.get_world_size()


def _owners(ranks: Union[int, FrozenSet[int]]) -> FrozenSet[int]:
    return frozenset((ranks,)) if isinstance(ranks, int) else ranks


def _by_owner(slices: Iterable[Tuple[int, torch.Tensor]]) -> Tuple[torch.Tensor, List[int]]:
    """Elements in the order of the ranks that step them, and how many each of these has."""
    by_owner: List[List[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
    for owner, elements in slices:
        by_owner[owner].append(elements)
    sizes = [sum(elements.numel() for elements in of_owner) for of_owner in by_owner]
    return torch.cat([elements for of_owner in by_owner for elements in of_owner]), sizes
