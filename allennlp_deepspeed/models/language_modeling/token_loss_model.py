from typing import Any, ContextManager, Optional, Protocol, Union

import torch
from allennlp.models import Model

from allennlp_deepspeed.training_traits import TrainingTraits


class SequenceSharing(Protocol):
    """
    Interface for models whose sequences are shared by several ranks: each rank computes a part. All
    of these ranks have the same batch.
    """

    def shard(self, tensor: torch.Tensor, padding_value: float) -> torch.Tensor:
        """
        Returns this rank's part.

        # Parameters

        tensor : `torch.Tensor`
            Of shape (batch_size, length, ...).
        padding_value : `float`
            The padding that is appended if the length isn't a multiple of the number of ranks.

        # Returns

        `torch.Tensor`
            Of shape (batch_size, part_length, ...).
        """

    def forward_context(
        self, position_ids: torch.Tensor, is_packed: bool
    ) -> ContextManager[torch.Tensor]:
        """
        Context manager for the forward pass of the transformer.

        # Parameters

        position_ids : `torch.Tensor`
            Of shape (batch_size, length), of the full sequences.
        is_packed : `bool`
            Whether positions restart within sequences, where attention must not cross.

        # Returns

        `torch.Tensor`
            The positions of this rank's part, of shape (batch_size, part_length).
        """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Sums a tensor over the ranks that share sequences. All of them must call it. It isn't
        differentiable.
        """


class TokenLossModel(Model):
    """
    Base class of models whose loss is a mean over tokens. The "deepspeed" trainer weights the
    losses of a step by their numbers of tokens, so that the gradient is that of the mean over all
    tokens of the step, for any division into micro-batches and workers. The mean of means, which
    other trainers compute, weights tokens of batches with fewer tokens more.

    # Parameters

    As for `Model`.
    """

    training_traits = TrainingTraits(averages_loss_over_tokens=True)

    sequence_sharing: Optional[SequenceSharing] = None
    """
    Set by the trainer if ranks share sequences. `forward` then takes full sequences, but computes
    this rank's part, whose tokens `num_loss_tokens` counts. The loss is that of this part in
    training, and that of all parts in evaluation.
    """

    def num_loss_tokens(self, **inputs: Any) -> Union[int, torch.Tensor]:
        """
        Returns the number of tokens that the loss of `forward` is the mean over, given the same
        inputs. If there are none, the loss must be 0, not NaN. It is called before `forward`, with
        the batch on the data loader's device.

        # Returns

        `Union[int, torch.Tensor]`
            A number, or a scalar tensor.
        """
        raise NotImplementedError

    def num_loss_terms(self, **inputs: Any) -> Union[int, torch.Tensor]:
        """Returns the number of tokens, which the loss is a mean over."""
        return self.num_loss_tokens(**inputs)
