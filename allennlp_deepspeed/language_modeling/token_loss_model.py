from typing import Any, Union

import torch
from allennlp.models import Model


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
