from typing import Dict, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.metrics import Metric
from overrides import overrides

from allennlp_deepspeed.engine.agreement import world_size
from allennlp_deepspeed.language_modeling.chunked_cross_entropy import TokenLosses


@Metric.register("token_metrics")
class TokenMetrics(Metric):
    """
    Perplexity and the accuracy of next tokens, of all tokens alike, however they are divided into
    batches and workers. Counted on the device, which is waited for when the metrics are asked for.

    Registered as a `Metric` with name "token_metrics".
    """

    def __init__(self) -> None:
        # The sum of losses, the numbers of correct tokens and of all, and that of batches. In
        # float64, numbers of tokens are whole up to 9e15.
        self._totals: Optional[torch.Tensor] = None

    @overrides(check_signature=False)
    def __call__(self, losses: TokenLosses) -> None:
        values = [value.detach().double() for value in losses]
        totals = torch.stack([*values, torch.ones_like(values[0])])
        self._totals = totals if self._totals is None else self._totals + totals

    @overrides(check_signature=False)
    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        """
        # Returns

        `Dict[str, float]`
            "perplexity" and "token_accuracy", empty if there was no token. With `reset` it is over
            all ranks, and to be called by all of them.

        # Raises

        `ConfigurationError`
            With `reset`, if there were batches, but no token that was to be predicted.
        """
        totals = self._totals
        if reset:
            self.reset()
            if world_size() > 1:
                if totals is None:
                    totals = torch.zeros(4, dtype=torch.float64, device=_device())
                dist.all_reduce(totals)
        if totals is None:
            return {}
        total, num_correct, num_targets, num_batches = totals.tolist()
        if num_targets == 0:
            if reset and num_batches > 0:
                raise ConfigurationError(
                    "There was no token to predict in any batch, so that nothing was learnt or "
                    "measured: see whether 'max_length' of the reader cuts all responses off, or "
                    'write "loss_on": "all".'
                )
            return {}
        return {
            # Of a tensor, which is infinite where `math` would fail.
            "perplexity": torch.tensor(total / num_targets, dtype=torch.float64).exp().item(),
            "token_accuracy": num_correct / num_targets,
        }

    @overrides
    def reset(self) -> None:
        self._totals = None


def _device() -> torch.device:
    """One that the process group communicates from."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
