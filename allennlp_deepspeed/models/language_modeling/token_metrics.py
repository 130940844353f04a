from typing import Dict, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.metrics import Metric
from typing_extensions import override

from allennlp_deepspeed.engine.process.collectives import world_size
from allennlp_deepspeed.models.language_modeling.chunked_cross_entropy import TokenLosses


@Metric.register("token_metrics")
class TokenMetrics(Metric):
    """
    Perplexity and next-token accuracy. Each token has the same weight for any division into batches
    and workers. They are counted on the device, without host synchronization before `get_metric`.

    Registered as a `Metric` with name "token_metrics".
    """

    def __init__(self) -> None:
        # The sum of losses, and the numbers of correct tokens, of all tokens and of batches. In
        # float64, integers up to 9e15 are exact.
        self._totals: Optional[torch.Tensor] = None

    @override
    def __call__(self, losses: TokenLosses) -> None:  # type: ignore[override]
        values = [value.detach().double() for value in losses]
        totals = torch.stack([*values, torch.ones_like(values[0])])
        self._totals = totals if self._totals is None else self._totals + totals

    @override
    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        """
        Returns the metrics since the last reset, synchronizing with the device.

        # Returns

        `Dict[str, float]`
            "perplexity" and "token_accuracy", empty if there was no token. With `reset` they are
            reduced over all ranks, and every rank must call it.

        # Raises

        `ConfigurationError`
            With `reset`, if there were batches, but no token with a loss.
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
                    "No batch had a token with a loss: check whether 'dataset_reader.max_length' "
                    'cuts off all responses, or write "loss_on": "all".'
                )
            return {}
        return {
            # A tensor's `exp` returns infinity where that of `math` raises.
            "perplexity": torch.tensor(total / num_targets, dtype=torch.float64).exp().item(),
            "token_accuracy": num_correct / num_targets,
        }

    @override
    def reset(self) -> None:
        self._totals = None


def _device() -> torch.device:
    """Returns a device that the process group communicates from."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
