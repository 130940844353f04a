from typing import Dict

from allennlp.training.metric_tracker import MetricTracker
from overrides import overrides

from allennlp_deepspeed.engine import agreement


class AgreedMetricTracker(MetricTracker):
    """
    A `MetricTracker` for which the validation metrics of rank 0 count. Which epoch is the best and
    when training stops has to be the same on all ranks, because they save and load weights
    together, and a model's metrics may be those of a rank's own share of the data.
    """

    @overrides
    def combined_score(self, metrics: Dict[str, float]) -> float:
        """To be called by every rank."""
        return agreement.of_rank_0(super().combined_score(metrics))
