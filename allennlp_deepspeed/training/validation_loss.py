from typing import Any, Dict, Optional, Tuple, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import DataLoader, TensorDict
from allennlp.models import Model
from allennlp.training import util as training_util

from allennlp_deepspeed.training.loss_terms import averages_over_tokens, num_loss_terms

_WEIGHT_KEY = "num_loss_tokens"


class ValidationLoss:
    """
    Computes the validation loss of a `TokenLossModel` as the mean over all tokens of all ranks, as
    in training, instead of AllenNLP's mean over batches. So it doesn't depend on the division of
    instances into batches and ranks. The validation loss of other models is AllenNLP's.

    Each of the ranks that share sequences has the loss of the full sequences, and weights it by the
    tokens of its part, so that together they weight it by all tokens.

    # Parameters

    model : `Model`, required.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.start()

    def start(self) -> None:
        """
        Resets the sums. Must be called before each validation, also before one that is restarted.
        """
        self._total = 0.0
        self._num_tokens = 0
        self._num_tokens_of_batch = 0
        # Batches with and without a loss.
        self._num_batches = 0

    def count_tokens(self, batch: TensorDict) -> None:
        """
        Counts the tokens of a batch. Must be called before the forward pass, which may change the
        batch.
        """
        self._num_batches += 1
        if averages_over_tokens(self._model):
            self._num_tokens_of_batch = int(num_loss_terms(self._model, batch))

    def add(self, outputs: Dict[str, torch.Tensor]) -> None:
        """
        Adds the loss of a batch after its forward pass. A batch without a loss isn't counted. It
        synchronizes with the device, as AllenNLP does for each batch.
        """
        if averages_over_tokens(self._model) and outputs.get("loss") is not None:
            self._total += outputs["loss"].item() * self._num_tokens_of_batch
            self._num_tokens += self._num_tokens_of_batch

    def weight_by_tokens(
        self, validated: Tuple[float, Optional[float], int]
    ) -> Tuple[float, Optional[float], int]:
        """
        Returns the sums that AllenNLP divides, by tokens instead of batches.

        # Parameters

        validated : `Tuple[float, Optional[float], int]`
            AllenNLP's sums on this rank: losses, penalties, and the number of batches that will
            divide their sums over all ranks.

        # Returns

        `Tuple[float, Optional[float], int]`
            The same sums, weighted by tokens.

        # Raises

        `ConfigurationError`
            If there was no batch, for which AllenNLP would return a loss of 0.
        """
        if self._num_batches == 0:
            raise ConfigurationError(
                "There was no validation batch, because a worker has no instance of "
                "'validation_data_path': add instances, use fewer workers, or remove the key."
            )
        if not averages_over_tokens(self._model):
            return validated
        _, penalty, num_batches = validated
        if penalty is not None:
            penalty *= self._num_tokens / max(num_batches, 1)
        return self._total, penalty, self._num_tokens


def evaluate(
    model: Model,
    data_loader: DataLoader,
    cuda_device: Union[int, torch.device],
    batch_weight_key: str,
) -> Dict[str, Any]:
    """
    Runs AllenNLP's `evaluate`, with the loss of a `TokenLossModel` as in `ValidationLoss` unless
    `batch_weight_key` is set. Every rank that shares sequences must call it, with the same data.

    # Parameters

    As for AllenNLP's.
    """
    evaluated: Any = model
    if averages_over_tokens(model) and not batch_weight_key:
        evaluated, batch_weight_key = _WithNumTokens(model), _WEIGHT_KEY
    return training_util.evaluate(
        evaluated, data_loader, cuda_device=cuda_device, batch_weight_key=batch_weight_key
    )


class _WithNumTokens:
    """Wrapper of a model for evaluation, which adds the number of tokens to its outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.eval = model.eval
        self.get_metrics = model.get_metrics

    def __call__(self, **batch: Any) -> Dict[str, Any]:
        num_tokens = torch.as_tensor(num_loss_terms(self._model, batch))
        if self._model.sequence_sharing is not None:
            num_tokens = self._model.sequence_sharing.all_reduce(num_tokens)
        # AllenNLP divides by the sum of weights after each batch: it must not be 0.
        return {**self._model(**batch), _WEIGHT_KEY: num_tokens.double().clamp(min=1e-9)}
