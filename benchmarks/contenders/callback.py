from typing import Any, Dict, List

from allennlp.training.callbacks import TrainerCallback
from overrides import overrides

from benchmarks.stopwatch import Stopwatch


class RecordSteps(TrainerCallback):
    """Tells a `Stopwatch` of each optimizer step of one of AllenNLP's trainers."""

    def __init__(self, serialization_dir: str, stopwatch: Stopwatch) -> None:
        super().__init__(serialization_dir)
        self._stopwatch = stopwatch

    @overrides
    def on_batch(
        self,
        trainer,
        batch_inputs: List[Any],
        batch_outputs: List[Dict[str, Any]],
        *args: Any,
        is_training: bool = True,
        **kwargs: Any,
    ) -> None:
        for outputs in batch_outputs:
            self._stopwatch.record(outputs["loss"])
