from typing import Any, ContextManager, Optional, Protocol, Union

import torch
from allennlp.models import Model


class SequenceSharing(Protocol):
    """
    What a model needs of whoever has several workers share each sequence, of which each computes a
    part. All of them have the same batch.
    """

    def part(self, tensor: torch.Tensor, padding_value: float) -> torch.Tensor:
        """
        This worker's part.

        # Parameters

        tensor : `torch.Tensor`
            Of shape (batch_size, length, ...).
        padding_value : `float`
            What is appended where the length can't be divided by the number of workers.

        # Returns

        `torch.Tensor`
            Of shape (batch_size, part_length, ...).
        """

    def attending(
        self, position_ids: torch.Tensor, is_packed: bool
    ) -> ContextManager[torch.Tensor]:
        """
        Within it the transformer is to go forward.

        # Parameters

        position_ids : `torch.Tensor`
            Of shape (batch_size, length), of whole sequences.
        is_packed : `bool`
            Whether positions begin anew within sequences, where attention isn't to cross.

        # Returns

        `torch.Tensor`
            The positions of this worker's part, of shape (batch_size, part_length).
        """

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        The sum of what each of the workers has. To be called by all of them. Not differentiable.
        """


class TokenLossModel(Model):
    """
    A model whose loss is a mean over tokens, of which batches have different numbers. The
    "deepspeed" trainer weighs the losses of a step by these numbers, so that its gradient is that
    of the mean over all tokens of the step, however they are divided into micro-batches and
    workers. The mean of means, which every other trainer takes, counts a token more the fewer there
    are beside it.

    # Parameters

    As for `Model`.
    """

    averages_loss_over_tokens = True
    """Whether the trainer weighs losses by `num_loss_tokens`."""

    sequence_sharing: Optional[SequenceSharing] = None
    """
    Set by the trainer where workers share sequences. Then `forward` takes whole sequences as ever,
    but computes a part, of whose tokens `num_loss_tokens` is, and in training the loss, too;
    otherwise the loss is that of all parts together.
    """

    def num_loss_tokens(self, **inputs: Any) -> Union[int, torch.Tensor]:
        """
        The number of tokens of which `forward` of the same inputs gives the mean loss. Where there
        are none, the loss is to be 0, not NaN. Called before `forward`, with the batch where the
        data loader has left it.

        # Returns

        `Union[int, torch.Tensor]`
            A number, or a tensor without dimensions.
        """
        raise NotImplementedError

    def num_loss_terms(self, **inputs: Any) -> Union[int, torch.Tensor]:
        """Tokens are what the loss is a mean over."""
        return self.num_loss_tokens(**inputs)
