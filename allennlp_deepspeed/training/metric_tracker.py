import json
from typing import Any, Dict, Iterable, List, Optional, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.metric_tracker import MetricTracker
from typing_extensions import override

from allennlp_deepspeed.config.key_validation import nearest
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.metrics.distributed_metrics import named_metrics


class UnknownMetricError(ConfigurationError):
    """Error of all ranks, if `validation_metric` has a name that isn't a metric's."""


class AgreedMetricTracker(MetricTracker):
    """
    A `MetricTracker` that uses the validation metrics of rank 0. The best epoch and the time to
    stop must be the same on all ranks, because they save and load weights together, and a model's
    metrics may be those of a rank's own shard of the data.

    # Parameters

    metric_name : `Union[str, List[str]]`, required.
    patience : `int`, optional (default = `None`)
    """

    def __init__(self, metric_name: Union[str, List[str]], patience: Optional[int] = None) -> None:
        super().__init__(metric_name, patience)
        self._metric_name = metric_name

    @property
    def names(self) -> List[str]:
        """Returns the names of the tracked metrics."""
        return [name for _, name in self.tracked_metrics]

    @override
    def combined_score(self, metrics: Dict[str, float]) -> float:
        """
        Returns the score of rank 0. Every rank must call it.

        # Raises

        `UnknownMetricError`
            On every rank, if rank 0 doesn't have one of the metrics.
        """
        score, problem = None, self.describe_missing(metrics)
        if problem is None:
            score = super().combined_score(metrics)
        score, problem = collectives.broadcast_object((score, problem))
        if problem is not None:
            raise UnknownMetricError(problem)
        return score  # type: ignore[return-value]

    def describe_missing(self, metrics: Iterable[str]) -> Optional[str]:
        """Describes which of the tracked metrics aren't among these, `None` if all are."""
        known = sorted(metrics)
        missing = [name for name in self.names if name not in known]
        if not missing:
            return None
        meant = _nearest(missing[0], known)
        advice = f' Did you mean "{meant}"?' if meant else ""
        return (
            f"'trainer.validation_metric' is {json.dumps(self._metric_name)}, but "
            f'"{missing[0]}" is not a metric of the validation.{advice} The metrics are '
            f"{', '.join(known)}."
        )

    @override
    def state_dict(self) -> Dict[str, Any]:
        return {**super().state_dict(), "tracked_metrics": list(map(list, self.tracked_metrics))}

    @override
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """
        Loads the state of a tracker. If that had other metrics, later epochs are compared with the
        score that its best epoch has now. Every rank must call it.
        """
        super().load_state_dict(state_dict)
        own = list(map(list, self.tracked_metrics))
        if state_dict.get("tracked_metrics", own) != own and self._best_so_far is not None:
            self._best_so_far = self.combined_score(self.best_epoch_metrics)
            self._epochs_with_no_improvement = 0


def has_unnamed_metric(model: torch.nn.Module) -> bool:
    """Returns whether one of the model's metrics has no names or no value before an update."""
    for metric in named_metrics(model).values():
        try:
            value = metric.get_metric(reset=False)
        except Exception:  # It is asked too early.
            return True
        if value is None or value == {}:
            return True
    return False


def _nearest(name: str, known: List[str]) -> Optional[str]:
    # AllenNLP's files have it with a prefix.
    name = name.removeprefix("validation_")
    containing = [each for each in known if name in each]
    return containing[0] if len(containing) == 1 else nearest(name, known)
