import math
from typing import Any, Dict, List, Mapping

from allennlp.training.metric_tracker import MetricTracker

from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime


class ValidationScores:
    """
    Scores of the checkpoints whose weights have been validated, by which the best are kept.

    # Parameters

    metrics : `List`, required.
        What the scores are made of. A run that is resumed with other metrics keeps no earlier ones.
    """

    def __init__(self, metrics: List[Any]) -> None:
        self._metrics = [list(metric) for metric in metrics]
        self._by_point: Dict[PointInTime, float] = {}

    @property
    def by_point(self) -> Mapping[PointInTime, float]:
        """Returns the scores, except NaN."""
        return self._by_point

    def record(self, point: PointInTime, tracker: MetricTracker) -> None:
        """Records that the latest validation was of the weights of a checkpoint."""
        # A callback may have set a tracker of AllenNLP's class, which doesn't tell.
        score = getattr(tracker, "latest_score", math.nan)
        if not math.isnan(score):
            self._by_point[point] = score

    def forget(self, point: PointInTime) -> None:
        """Forgets the score of a former checkpoint of this name, whose steps had another size."""
        self._by_point.pop(point, None)

    def state_dict(self) -> Dict[str, Any]:
        scores = [[*point, score] for point, score in self._by_point.items()]
        return {"metrics": self._metrics, "scores": scores}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        if state_dict["metrics"] == self._metrics:
            self._by_point = {PointInTime(*point): s for *point, s in state_dict["scores"]}
