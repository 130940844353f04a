import json
import math
from typing import Any, Dict, Iterable, List, Optional, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.metric_tracker import MetricTracker
from typing_extensions import override

from allennlp_deepspeed.config.key_validation import nearest
from allennlp_deepspeed.metrics.distributed_metrics import named_metrics
from allennlp_deepspeed.training.agreement import Exchange


class UnknownMetricError(ConfigurationError):
    """Error of all ranks, if `validation_metric` has a name that isn't a metric's."""


class AgreedMetricTracker(MetricTracker):
    """
    A `MetricTracker` that uses the validation metrics of rank 0. The best epoch and the time to
    stop must be the same on all ranks, because they save and load weights together, and a model's
    metrics may be those of a rank's own shard of the data.

    # Parameters

    metric_name : `Union[str, List[str]]`, required.
    patience : `int`, required.
        `None` if training doesn't stop early.
    exchange : `Exchange`, required.
    """

    def __init__(
        self, metric_name: Union[str, List[str]], patience: Optional[int], exchange: Exchange
    ) -> None:
        super().__init__(metric_name, patience)
        self._exchange = exchange
        self._metric_name = metric_name
        self.latest_score = math.nan
        """The score of the latest validation, NaN if it can't be compared with the others."""
        self.is_repeated = False
        """Whether the current validation is of weights that have been validated before."""

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
        score, problem = self._exchange(score=(score, problem))["score"][0]
        if problem is not None:
            raise UnknownMetricError(problem)
        assert score is not None
        self.latest_score = score
        return score

    @override
    def add_metrics(self, metrics: Dict[str, float]) -> None:
        """
        Counts a validation. Where the length of an epoch is unknown, one within the epoch may be
        after its last step, and is repeated at its end.
        """
        if not self.is_repeated:
            super().add_metrics(metrics)

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
        return {
            **super().state_dict(),
            "tracked_metrics": list(map(list, self.tracked_metrics)),
        }

    @override
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """
        Loads the state of a tracker. If that had other metrics, later epochs are compared with the
        score that its best epoch has now. Every rank must call it.
        """
        super().load_state_dict(state_dict)
        own = list(map(list, self.tracked_metrics))
        # A callback may have set a tracker of AllenNLP's class.
        if state_dict.get("tracked_metrics", own) != own and self._best_so_far is not None:
            self._best_so_far = self.combined_score(self.best_epoch_metrics)
            self._epochs_with_no_improvement = 0
            self.latest_score = math.nan


class FirstMetrics(Dict[str, Any]):
    """
    Metrics of the last epoch before the checkpoint, with which AllenNLP's loop begins: it reads the
    `best_epoch_metrics` of the tracker once, and adds a prefix to their names.

    Works around AllenNLP 2.10.1: a resumed run begins with the metrics of the best epoch alone, and
    with a `best_epoch` that counts validations instead of epochs. Until the next validation its
    files have no metrics of the last one, and a completed run returns none. Gone when AllenNLP's
    checkpoints have the metrics of the last epoch.

    # Parameters

    metrics : `Dict[str, Any]`, required.
    tracker : `AgreedMetricTracker`, required.
    """

    def __init__(self, metrics: Dict[str, Any], tracker: AgreedMetricTracker) -> None:
        super().__init__({WithoutPrefix(name): value for name, value in metrics.items()})
        self._tracker, self._of_best_epoch = tracker, tracker.best_epoch_metrics

    @override
    def items(self) -> Any:
        self._tracker.best_epoch_metrics = self._of_best_epoch
        return super().items()


def metrics_of_best(epoch: int, validated: Dict[str, float]) -> Dict[str, Any]:
    """Returns what AllenNLP's loop adds to its metrics after the best validation so far."""
    best = {f"best_validation_{name}": value for name, value in validated.items()}
    return {"best_epoch": epoch, **best}


class WithoutPrefix(str):
    """A name that a prefix isn't added to."""

    def __radd__(self, prefix: str) -> str:
        return str(self)


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
