"""
Records the steps of either of AllenNLP's trainers. Included in a command by its name.
"""

from typing import Any, Dict, List

from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from evidence.real.recorder import Recorder


@TrainerCallback.register("record_real_steps")
class RecordRealSteps(TrainerCallback):
    """Sends what a `Recorder` measures."""

    reads_metrics = False
    changes_weights = False

    @override
    def on_start(self, trainer, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary, **kwargs)
        self._recorder = Recorder(self._save)

    @override
    def on_batch(
        self,
        trainer,
        batch_inputs: List[Any],
        batch_outputs: List[Dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        for outputs in batch_outputs:
            self._recorder.loss(outputs["loss"])
        self._recorder.step()

    def _save(self) -> None:
        checkpointer = self.trainer._checkpointer
        checkpointer.save_checkpoint(self.trainer)
        if hasattr(checkpointer, "finish"):
            checkpointer.finish()
