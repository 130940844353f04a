from functools import partial
from typing import Any, Iterator, List, Union

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import DataLoader, TensorDict
from typing_extensions import override

from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.sequence_groups import SequenceGroup, check_model
from allennlp_deepspeed.extensions.ulysses import UlyssesAttention
from allennlp_deepspeed.training.even_batches import EvenBatches
from allennlp_deepspeed.training.step_extension import StepContext, StepExtension


class SequenceParallelism(StepExtension):
    """
    Shares each sequence of a model's batches between neighbouring ranks. Gradients are reduced over
    all ranks as without it, and each loss is weighted by its tokens (`LossWeights`), so that
    neither ZeRO nor the engine needs to know the groups.

    # Parameters

    value : `int`, required.
        The number of ranks of a group.
    context : `StepContext`, required.
        Its data loaders with a reader must shard data between groups, not ranks.

    # Raises

    `ConfigurationError`
        If they don't, or if the model doesn't support it.
    """

    def __init__(self, value: int, context: StepContext) -> None:
        self.ranks_per_batch = self._size = value
        self._model = context.model
        # The checksum of all batches so far, on the data loader's device.
        self._checksum = torch.tensor(0)
        check_model(type(context.model))
        for data_loader in context.data_loaders:
            _check_reader(data_loader, value)
        self._attach(context.wrapped_model)

    @override
    def receive_micro_batches(self, micro_batches: List[TensorDict]) -> None:
        """Adds batches to the checksum without host synchronization."""
        for tensor in _tensors(micro_batches):
            self._checksum = self._checksum * 31 + _checksum(tensor)

    @override
    def check(self, device: torch.device) -> None:
        """
        Compares the batches of the ranks of each group. It synchronizes with the device. Every rank
        must call it.

        # Raises

        `RuntimeError`
            On every rank, if the ranks of a group had different batches.
        """
        checksums = collectives.all_gather_integers([int(self._checksum)], device)
        for first in range(0, len(checksums), self._size):
            group = checksums[first : first + self._size]
            if any(checksum != group[0] for checksum in group):
                raise RuntimeError(
                    f"Ranks {first} to {first + self._size - 1} share sequences, but read "
                    "different batches: the reader or the data loader depends on the process. "
                    "Remove such differences, for example a seed per process or an order by "
                    "hash()."
                )

    def _attach(self, wrapped_model: DeepSpeedWrappedModel) -> None:
        """
        Replaces the model's attention by attention over the parts of all ranks of the group, until
        the engine is destroyed.
        """
        model: Any = self._model
        group = SequenceGroup.create(self._size)
        attention = UlyssesAttention(model.transformer_to_share(), group)
        wrapped_model.call_before_destroy(attention.remove)
        model.sequence_sharing = attention
        wrapped_model.call_before_destroy(partial(setattr, model, "sequence_sharing", None))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 scalar that depends on the elements, their order and the shape."""
    if tensor.is_floating_point():
        tensor = tensor.double().view(torch.int64)
    places = torch.arange(1, tensor.numel() + 1, device=tensor.device)
    total = (tensor.flatten() * places).sum()
    return total + sum(31**i * size for i, size in enumerate(tensor.shape))


def _check_reader(data_loader: Union[DataLoader, EvenBatches, None], size: int) -> None:
    if isinstance(data_loader, EvenBatches):
        data_loader = data_loader.data_loader
    reader = getattr(data_loader, "reader", None)
    info = reader.get_distributed_info() if reader is not None else None
    if info is not None and info.world_size != dist.get_world_size() // size:
        raise ConfigurationError(
            f"'trainer.sequence_parallel_size' is {size}, but a reader divides the data among "
            f"{info.world_size} workers, although workers that share sequences must read the "
            "same: construct readers and data loaders within "
            f"`allennlp_deepspeed.reading_by_groups({size})`."
        )
