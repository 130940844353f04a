"""Groups of micro-batches that all ranks train on together, and their transfer to the device."""

import logging
import math
from collections import deque
from types import NoneType
from typing import Any, Iterator, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import lazy_groups_of
from allennlp.data.data_loaders import (
    DataLoader,
    MultiProcessDataLoader,
    SimpleDataLoader,
    TensorDict,
)
from allennlp.data.samplers import BucketBatchSampler

from allennlp_deepspeed.config.settings import fixed_size
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import DATA, phase
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.training.agreement import Exchange

logger = logging.getLogger(__name__)

_NO_DATA = (
    "A worker has no batch of training data: use fewer workers, smaller batches, or more "
    "instances in 'train_data_path'."
)


class BatchGroup(NamedTuple):
    """
    The micro-batches of one optimizer step.

    `num_accumulation_steps` is the number of micro-batches that divides this rank's losses. It is
    larger than `len(micro_batches)` if another rank has run out of data: AllenNLP then drops the
    rest of the group without changing the divisor, and so do we.

    `num_dummy_batches` is the number of dummy batches at the end. They have no weight and only let
    this rank take part in collectives.
    """

    micro_batches: List[TensorDict]
    num_accumulation_steps: int
    num_dummy_batches: int = 0


class BatchGroups:
    """
    Iterates over the `BatchGroup`s of one epoch, the same number with the same number of
    micro-batches on every rank. As in AllenNLP, the epoch ends on all ranks before the first
    micro-batch that some rank lacks.

    If every rank has a loader whose length is exact (`has_exact_length`), the ranks agree once, at
    the beginning, and each reads all of its data, because loaders with `batches_per_epoch` preserve
    their position when they are asked for one more batch than there is. For other loaders, whose
    length may be an estimate, they agree once for each group. The length of the data loader is read
    once, by the constructor, because samplers with noise draw random numbers for it, as often as in
    AllenNLP. Every rank must construct it for each epoch and iterate over it.

    # Parameters

    data_loader : `DataLoader`, required.
    num_gradient_accumulation_steps : `int`, required.
        The number of micro-batches of a group.
    exchange : `Exchange`, required.
    warns : `bool`, optional (default = `True`)
        Whether batches that this rank drops are logged as a warning, and not at level INFO.
    """

    def __init__(
        self,
        data_loader: DataLoader,
        num_gradient_accumulation_steps: int,
        exchange: Exchange,
        warns: bool = True,
    ) -> None:
        self._data_loader = data_loader
        self._full_size = num_gradient_accumulation_steps
        self._exchange = exchange
        self._num_batches = _length(data_loader)
        # The number of every rank's batches, if all lengths are exact.
        self._common_length = -1
        length = self._num_batches if has_exact_length(data_loader) else None
        if length is not None:
            self._common_length = length
        if dist.get_world_size() > 1:
            self._common_length = self._agree(self._common_length)
        self._level = logging.WARNING if warns else logging.INFO
        self.has_dropped = False
        """Whether this rank has dropped batches that other ranks lack."""

    def __iter__(self) -> Iterator[BatchGroup]:
        groups = lazy_groups_of(self._data_loader, self._full_size)
        if dist.get_world_size() == 1:
            yield from self._single_worker_groups(groups)
            return
        if self._common_length == 0:
            raise ConfigurationError(_NO_DATA)
        if self._common_length < 0:
            yield from self._unknown_length_groups(groups)
        else:
            yield from self._known_length_groups(groups, self._common_length)

    @property
    def exact_length(self) -> Optional[int]:
        """Returns the number of groups if all ranks know it, else `None`."""
        return None if self._common_length < 0 else math.ceil(self._common_length / self._full_size)

    @property
    def expected_length(self) -> Optional[int]:
        """
        Returns the number of groups, or that of this rank's data if the ranks don't know each
        other's. `None` if that isn't known either.
        """
        if self._common_length >= 0:
            return self.exact_length
        return None if self._num_batches is None else math.ceil(self._num_batches / self._full_size)

    def _single_worker_groups(self, groups: Iterator[List[TensorDict]]) -> Iterator[BatchGroup]:
        is_empty = True
        while batches := _next_group(groups):
            is_empty = False
            yield BatchGroup(batches, len(batches))
        if is_empty:
            raise ConfigurationError(
                "The data loader has no batch of training data: add instances to 'train_data_path'."
            )

    def _known_length_groups(
        self, groups: Iterator[List[TensorDict]], length: int
    ) -> Iterator[BatchGroup]:
        remaining = length
        while remaining > 0:
            batches = _next_group(groups)
            common_size = min(self._full_size, remaining)
            remaining -= common_size
            yield BatchGroup(batches[:common_size], len(batches))
        surplus = len(batches) - common_size + sum(map(len, groups))
        if surplus > 0:
            self._log_dropped("1 batch" if surplus == 1 else f"{surplus} batches")

    def _unknown_length_groups(self, groups: Iterator[List[TensorDict]]) -> Iterator[BatchGroup]:
        common_size: Optional[int] = None
        # A short group is the last one on every rank, because every rank knows that it was short.
        while common_size in (None, self._full_size):
            batches = _next_group(groups)
            is_first = common_size is None
            common_size = self._agree(len(batches))
            if is_first and common_size == 0:
                raise ConfigurationError(_NO_DATA)
            if common_size < len(batches):
                self._log_dropped("batches")
            if common_size > 0:
                yield BatchGroup(batches[:common_size], len(batches))
        if self._num_batches is not None:
            # As above, for loaders that preserve their position.
            deque(groups, maxlen=0)

    def _agree(self, num_batches: int) -> int:
        return self._exchange(num_batches=num_batches)["num_batches"]

    def _log_dropped(self, what: str) -> None:
        self.has_dropped = True
        logger.log(
            self._level,
            "Rank %d drops %s at the end of each epoch, because another rank has fewer batches."
            "\n  To train on all instances, make their number divisible by world size × batch "
            "size.",
            dist.get_rank(),
            what,
        )


def _next_group(groups: Iterator[List[TensorDict]]) -> List[TensorDict]:
    """Returns the next group, empty at the end."""
    with phase(DATA):
        return next(groups, [])


def to_device(value: Any, device: torch.device) -> Any:
    """
    Moves all tensors of a structure to the device, as AllenNLP's `move_to_device` does, but without
    synchronizing with a GPU: the next batches are prepared and copied while it still computes with
    the previous one.

    # Parameters

    value : `Any`, required.
        Tensors in dictionaries and lists, which are changed in place, and tuples. All other values
        are returned unchanged.
    device : `torch.device`, required.
    """
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        if device.type == "cuda" and value.device.type == "cpu":
            # Only copies from pinned memory overlap with the host's work. PyTorch retains that
            # memory until the copy is done.
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = to_device(item, device)
        return value
    if isinstance(value, list):
        value[:] = [to_device(item, device) for item in value]
        return value
    if isinstance(value, tuple):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def num_batches(data_loader: DataLoader) -> Optional[int]:
    """
    Returns the number of micro-batches of rank 0's epoch, or `None` if it isn't known. Schedules
    use it, so that they are the same on all ranks. Every rank must call it.
    """
    return collectives.broadcast_object(_length(data_loader))


def micro_batch_size(data_loader: DataLoader) -> Optional[int]:
    """Returns the number of instances of a batch, or `None` if the data loader has no fixed one."""
    sampler: Any = getattr(data_loader, "batch_sampler", None)
    # One of PyTorch's has it as an attribute of its loader, which is `None` for a user's.
    if hasattr(sampler, "get_batch_size"):
        return fixed_size(sampler.get_batch_size())
    return fixed_size(getattr(data_loader, "batch_size", None))


def repeats_batches(data_loader: DataLoader) -> bool:
    """
    Returns whether an epoch that is read again with the same random states has the same batches.
    The processes of AllenNLP's loader seed Python's generator when they start, and several pass on
    their batches in any order.
    """
    return not any(getattr(data_loader, name, 0) for name in ("num_workers", "_num_workers"))


def has_exact_length(data_loader: DataLoader) -> bool:
    """
    Returns whether an epoch has exactly `len()` batches, which only AllenNLP's own classes
    guarantee. The length of a user's loader, a user's sampler or a subclass may be an estimate. So
    is that of "max_tokens_sampler", whose batches differ between epochs, and of "multitask" with
    `instances_per_epoch`, which has fewer.
    """
    if type(data_loader) not in (MultiProcessDataLoader, SimpleDataLoader):
        return False
    if getattr(data_loader, "batches_per_epoch", None) is not None:
        return True
    return type(getattr(data_loader, "batch_sampler", None)) in (NoneType, BucketBatchSampler)


def _length(data_loader: DataLoader) -> Optional[int]:
    try:
        return len(data_loader)
    except TypeError:
        return None
