from typing import Any, Dict, Optional, Tuple

from allennlp.training.callbacks import ConfidenceChecksCallback
from allennlp.training.scheduler import Scheduler
from allennlp.training.trainer import TrainerCheckpoint
from overrides import overrides

from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.trainer_protocol import TRAINING_STATE_VERSION, Part
from allennlp_deepspeed.engine import loss_scaling
from allennlp_deepspeed.storage.checkpoint_directory import PointInTime
from allennlp_deepspeed.storage.commit_record import CheckpointError
from allennlp_deepspeed.training.batch_groups import micro_batch_size
from allennlp_deepspeed.training.replay import Replay
from allennlp_deepspeed.training.reported_trainer import ReportedTrainer

# What a schedule of AllenNLP's has computed from "num_epochs" and the data.
_LENGTHS = ("total_steps", "num_epochs", "num_steps_per_epoch")

# Parts that only find out how to train, and may do so again.
_MAY_BE_NEW = {
    "gradient_synchronization",
    "reshard_after_micro_batch",
}


class ResumableTrainer(ReportedTrainer):
    """
    A trainer whose training can be saved and continued: what the checkpointer asks of it
    ([`Training`](../checkpoint/trainer_protocol.py)), and the best weights.
    """

    best_weights: BestWeights
    _replay: Replay

    def parts(self) -> Dict[str, Part]:
        """What continues from a checkpoint, by name, in the order in which it is loaded."""
        parts: Dict[str, Optional[Part]] = {
            "progress": self._progress,
            "metric_tracker": self._metric_tracker,
            "learning_rate_scheduler": self._learning_rate_scheduler,
            "momentum_scheduler": self._momentum_scheduler,
            "moving_average": self._moving_average,
            # Of autocast at stage 0, which DeepSpeed doesn't save.
            "gradient_scaler": loss_scaling.grad_scaler(self.engine),
            "best_weights": self.best_weights,
            "gradient_synchronization": self._gradients.schedule,
            "reshard_after_micro_batch": self._gradient_step.reshard_after_micro_batch,
            **self._extensions.parts(),
            "replay": self._replay,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @overrides
    def get_checkpoint_state(self) -> TrainerCheckpoint:
        """
        This rank's training state. The model and the optimizer aren't in it: the checkpointer has
        the engine save them.
        """
        states = {name: part.state_dict() for name, part in self.parts().items()}
        return TrainerCheckpoint(
            {},
            {
                "version": TRAINING_STATE_VERSION,
                "instances_per_step": self.instances_per_step(),
                "num_epochs": self._num_epochs,
                **states,
            },
        )

    @overrides
    def _maybe_restore_checkpoint(self) -> None:
        """
        Continues from the newest checkpoint, if there is one. To be called by every rank.

        Works around AllenNLP 2.10.1: a training that has stopped early trains one more epoch when
        it is continued. Gone when `_try_train` asks whether to stop before it trains.
        """
        self._ddp_wrapped_model.check_is_up()
        state = self._checkpointer.load_checkpoint(self) if self._checkpointer else None
        if state is None:
            self._ddp_wrapped_model.check_optimizer_states()
            return
        self._weight_watch.snapshot()
        parts = self.parts()
        lacking = [name for name in parts if name not in state.trainer_state]
        if set(lacking) - _MAY_BE_NEW - set(self._extensions.parts()):
            raise CheckpointError(
                f"The checkpoint has nothing of 'trainer.{lacking[0]}', which the training was "
                "begun without: leave it out, or start anew with another serialization directory."
            )
        num_epochs = state.trainer_state.get("num_epochs", self._num_epochs)
        for name, part in parts.items():
            if name in state.trainer_state:
                length = _length(part) if num_epochs != self._num_epochs else {}
                part.load_state_dict(state.trainer_state[name])
                for attribute, value in length.items():
                    setattr(part, attribute, value)
        if self.best_weights.exist:
            self._best_model_filename = self.best_weights.path
        start = self._progress.start
        if start.steps == 0 and self._metric_tracker.should_stop_early():
            # It had stopped here.
            self._num_epochs = start.epochs

    @overrides
    def _try_train(self) -> Tuple[Dict[str, Any], int]:
        """
        Works around AllenNLP 2.10.1: the layers that are called are gathered in a list for the
        first step of the first epoch, and in a training that continues after it forever. Gone when
        the callback "confidence_checks" removes its hooks there.
        """
        if self._progress.start > PointInTime(0, 0):
            for callback in self._callbacks:
                if isinstance(callback, ConfidenceChecksCallback) and self._primary:
                    callback._verification.destroy_hooks()
        return super()._try_train()

    def instances_per_step(self) -> int:
        """Of all ranks. Micro-batches without a fixed size count as one."""
        size = micro_batch_size(self.data_loader) or 1
        num_readers = self._extensions.num_readers
        return size * self._num_gradient_accumulation_steps * num_readers

    def _is_step_to_save(self) -> bool:
        return self._checkpointer is not None and self._checkpointer.is_step_to_save(
            *self._progress.point
        )

    def save_best_weights(self) -> None:
        """
        Saves the best weights if the epoch that has just ended was the best and they haven't been
        saved. To be called by every rank, before a checkpoint is saved.

        Works around AllenNLP 2.10.1: the best weights are saved after the checkpoint that says
        which epoch was the best, which must not exist without them. Gone when `_try_train` saves
        them before.
        """
        epochs, steps = self._progress.point
        validates = self._progress.should_validate_this_epoch
        if steps > 0 or epochs == 0 or not (validates and self._metric_tracker.is_best_so_far()):
            return
        if self._moving_average is None:
            self._save_model_state(self.best_weights.path)
            return
        self._moving_average.assign_average_value()
        try:
            self._save_model_state(self.best_weights.path)
        finally:
            self._moving_average.restore()

    @overrides
    def _save_model_state(self, path: str) -> None:
        """
        Saves the best weights, as one file with the whole model in fp32 instead of the shard that
        AllenNLP's `path` is meant for. To be called by every rank.
        """
        self._best_model_filename = self.best_weights.path
        if self.best_weights.saved_after != self._progress.epochs_completed:
            self._weight_watch.raise_if_changed()
            self.best_weights.save(self._progress.epochs_completed)

    @overrides
    def _load_model_state(self, path: str) -> None:
        """To be called by every rank. Rank 0 reads the file."""
        self.best_weights.load()
        self._weight_watch.snapshot()

    @overrides
    def _finalize_best_model_state(self) -> None:
        """Nothing is left to do: `_save_model_state` has already written one file."""


def _length(part: Part) -> Dict[str, Any]:
    """
    Of a schedule that is as long as the training: one that is trained for more epochs than it was
    begun with has the schedule of these, and not that of the former, which has come to its end.
    """
    if not isinstance(part, Scheduler):
        return {}
    return {name: value for name, value in vars(part).items() if name in _LENGTHS}
