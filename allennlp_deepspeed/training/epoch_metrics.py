from typing import Any, Dict

from allennlp.training.callbacks import TrainerCallback
from overrides import overrides


class EpochMetricsCallback(TrainerCallback):
    """
    Remembers the metrics of the last epoch, which AllenNLP's trainer has in a local variable: they
    are part of what training returns at its end. Not registered: each `DeepSpeedTrainer` has one.
    """

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self.metrics: Dict[str, Any] = {}

    @overrides
    def on_epoch(self, trainer, metrics: Dict[str, Any], *args, **kwargs) -> None:
        self.metrics = dict(metrics)

    @overrides
    def state_dict(self) -> Dict[str, Any]:
        return {"metrics": self.metrics}

    @overrides
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.metrics = state_dict["metrics"]
