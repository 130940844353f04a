from typing import Dict

from allennlp.training.metric_tracker import MetricTracker
from typing_extensions import override

from allennlp_deepspeed.engine import collectives


class AgreedMetricTracker(MetricTracker):
    """
    A `MetricTracker` that uses the validation metrics of rank 0. The best epoch and the time to
    stop must be the same on all ranks, because they save and load weights together, and a model's
    metrics may be those of a rank's own shard of the data.
    """

    @override
    def combined_score(self, metrics: Dict[str, float]) -> float:
        """Returns the score of rank 0. Every rank must call it."""
        return collectives.broadcast_object(super().combined_score(metrics))
