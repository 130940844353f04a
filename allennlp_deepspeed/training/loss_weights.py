from typing import List, Optional

import torch
import torch.distributed as dist
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model

from allennlp_deepspeed.training import loss_terms


class LossWeights:
    """
    Multiplies the losses of a step by weights, so that the mean over micro-batches and ranks is the
    mean over the instances or tokens of all of them. The losses of a `TokenLossModel` are always
    weighted, those of other models if micro-batches are parts of a global batch.

    # Parameters

    model : `Model`, required.
    device : `torch.device`, required.
        The device that the process group communicates on.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._counts_tokens = loss_terms.averages_over_tokens(model)
        self._is_nan_without_terms = loss_terms.is_nan_without_terms(model)
        # The total of all ranks since the last call of `pop_num_tokens`, on the device.
        self._num_tokens: Optional[torch.Tensor] = None

    def compute(
        self,
        micro_batches: List[TensorDict],
        num_accumulation_steps: int,
        num_dummy_batches: int = 0,
    ) -> List[torch.Tensor]:
        """
        Returns the weights of micro-batches. It runs one all-reduce of 8 bytes without host
        synchronization. Every rank must call it.

        # Parameters

        micro_batches : `List[TensorDict]`, required.
            Those of the step on this rank.
        num_accumulation_steps : `int`, required.
            The number of micro-batches that will divide the losses.
        num_dummy_batches : `int`, optional (default = `0`)
            The number of dummy batches at the end, which only let this rank take part in
            collectives. Their weight is 0.

        # Returns

        `List[torch.Tensor]`
            For each micro-batch a factor, an fp32 scalar.
        """
        numbers = [loss_terms.num_loss_terms(self._model, batch) for batch in micro_batches]
        # float64 is exact for integers, and has the fractions of sums of class weights.
        own = torch.stack([torch.as_tensor(number, dtype=torch.float64) for number in numbers])
        own[len(own) - num_dummy_batches :] = 0
        own = own.to(self._device, non_blocking=True)
        total = own.sum()
        dist.all_reduce(total)
        if self._counts_tokens:
            self._num_tokens = total if self._num_tokens is None else self._num_tokens + total
        # Backward divides by the size of the group, and the reduction by the world size.
        divisions = num_accumulation_steps * dist.get_world_size()
        weights = (own * divisions / torch.where(total > 0, total, 1)).float()
        # Without any terms, losses are 0, but a regularizer's penalty still counts once.
        return list(torch.where(total > 0, weights, torch.ones_like(weights)).unbind())

    def apply(self, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """
        Multiplies a loss by its weight.

        # Parameters

        loss : `torch.Tensor`, required.
            The loss of a micro-batch.
        weight : `torch.Tensor`, required.
            The factor that `compute` has returned for it.

        # Returns

        `torch.Tensor`
            The product, from which every rank can run backward, even if the weight is 0.
        """
        if self._is_nan_without_terms:
            loss = torch.where(weight > 0, loss, 0.0)
        return loss * weight

    def pop_num_tokens(self) -> Optional[int]:
        """
        Returns the number of tokens with a loss on all ranks since the last call, or `None` for a
        model that isn't a `TokenLossModel`. It synchronizes with the device.
        """
        num_tokens, self._num_tokens = self._num_tokens, None
        return None if num_tokens is None else int(num_tokens)
