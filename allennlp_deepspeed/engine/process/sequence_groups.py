"""
Groups of neighbouring ranks that share each sequence: all ranks of a group read the same data, and
each computes its part of every sequence.
"""

from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Type
from unittest import mock

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data.dataset_readers import dataset_reader
from allennlp.models import Model

from allennlp_deepspeed.training_traits import traits_of


def check_model(model: Type[Model]) -> None:
    """
    Checks that a model class supports sequence parallelism.

    # Raises

    `ConfigurationError`
        If its attention doesn't cover the parts of all ranks, or if its loss isn't a mean over
        tokens, whose numbers weight the parts.
    """
    traits = traits_of(model)
    if not (traits.shares_sequences and traits.averages_loss_over_tokens):
        raise ConfigurationError(
            f"'trainer.sequence_parallel_size' is above 1, but the model is a {model.__name__}: "
            'only "causal_lm" supports sequence parallelism. Models that mask attention don\'t, '
            "because the mask would be dropped. Remove the key."
        )


class SequenceGroup(NamedTuple):
    """
    Ranks that share a sequence with this rank.

    # Parameters

    process_group : `ProcessGroup`, required.
    size : `int`, required.
        The number of ranks.
    rank : `int`, required.
        The rank of this worker in the group.
    """

    process_group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def create(cls, size: int) -> "SequenceGroup":
        """
        Creates groups of `size` neighbouring ranks. Every rank must call it.

        # Parameters

        size : `int`, required.
            The number of ranks of a group. It divides the world size.
        """
        process_group, _ = dist.new_subgroups(group_size=size)
        return cls(process_group, size, dist.get_rank() % size)

    def shard(self, tensor: torch.Tensor, padding_value: float) -> torch.Tensor:
        """
        Returns this rank's part of each sequence.

        # Parameters

        tensor : `torch.Tensor`, required.
            Of shape (batch_size, length, ...), the same on all ranks of the group.
        padding_value : `float`, required.
            The padding that is appended if the length isn't a multiple of the number of ranks.

        # Returns

        `torch.Tensor`
            Of shape (batch_size, ceil(length / size), ...).
        """
        missing = -tensor.size(1) % self.size
        if missing:
            padding = tensor.new_full((tensor.size(0), missing, *tensor.shape[2:]), padding_value)
            tensor = torch.cat([tensor, padding], dim=1)
        return tensor.chunk(self.size, dim=1)[self.rank]


class _GroupsAsRanks:
    """Proxy of `torch.distributed` with a rank for each group of neighbours."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_rank(self) -> int:
        return dist.get_rank() // self.size

    def get_world_size(self) -> int:
        return dist.get_world_size() // self.size

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def read_by_groups(size: int) -> None:
    """
    Makes AllenNLP's readers of this process, from now on, shard data between groups of `size`
    neighbouring ranks instead of single ranks.
    """
    dataset_reader.dist = _GroupsAsRanks(size)  # type: ignore[assignment]


@contextmanager
def reading_by_groups(size: int) -> Iterator[None]:
    """
    Context manager for `read_by_groups`. Readers must be constructed, and data read, within it.
    """
    with mock.patch.object(dataset_reader, "dist", _GroupsAsRanks(size)):
        yield
