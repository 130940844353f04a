import copy
from typing import TYPE_CHECKING, Any, Dict, Optional

from allennlp_deepspeed.checkpoint.module_states import (
    changed_states,
    fingerprints,
    load_module_states,
    module_states,
)
from allennlp_deepspeed.checkpoint.training import TRAINING_STATE_VERSION
from allennlp_deepspeed.processes.random_states import (
    RandomHistory,
    random_states,
    set_random_states,
)
from allennlp_deepspeed.storage.checkpoint_directory import PointInTime
from allennlp_deepspeed.training.running_loss import RunningLoss
from allennlp_deepspeed.training.validation_history import ValidationHistory

if TYPE_CHECKING:
    from allennlp_deepspeed.training.trainer import DeepSpeedTrainer


class Resumption:
    """
    Brings a worker back to where it was at a checkpoint, so exactly that it goes on as if it had
    never stopped. The epochs before are read again but not trained, as in AllenNLP, because readers
    and data loaders may have a state. What AllenNLP leaves out is in here: the random states, now
    and at the start of each epoch, so that the data comes in the same order again; the place in the
    validation data; the losses and metrics that the epoch has added up; what else of the model
    training has changed; and what callbacks have decided about the epoch.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    """

    def __init__(self, trainer: "DeepSpeedTrainer") -> None:
        self._trainer = trainer
        self._running_loss: Optional[RunningLoss] = None
        self._epoch_starts = RandomHistory()
        self._validations = ValidationHistory(trainer)
        self._fingerprints_before: Optional[Dict[str, Any]] = None
        self._before_validation: Optional[Dict[str, Any]] = None
        # What `load_state_dict` was given, until its point in time is reached.
        self._pending: Optional[Dict[str, Any]] = None
        # The same, if the checkpoint was saved in a validation, until that begins again.
        self._interrupted_validation: Optional[Dict[str, Any]] = None

    def start_training(self) -> None:
        """To be called once callbacks have prepared the model, and before anything is trained."""
        if self._fingerprints_before is None:
            self._fingerprints_before = fingerprints(module_states(self._trainer.model))

    def start_epoch(self, running_loss: RunningLoss) -> None:
        """To be called before the data of the epoch are asked for."""
        self._running_loss = running_loss
        self._before_validation = None
        self.restore_if_reached()
        epoch = self._trainer._epochs_completed
        if epoch < len(self._epoch_starts):
            set_random_states(self._epoch_starts[epoch])
        else:
            self._epoch_starts.append(random_states())

    def start_validation(self) -> None:
        """To be called before the data of the validation are asked for."""
        self._validations.start()

    def restore_if_reached(self) -> None:
        """
        To be called after each step that is skipped, before the data of the next are asked for.
        """
        trainer = self._trainer
        here = PointInTime(trainer._epochs_completed, trainer._batches_in_epoch_completed)
        there = PointInTime(
            trainer._start_after_epochs_completed, trainer._start_after_batches_in_epoch_completed
        )
        if here == there:
            self._restore()

    def finish_steps(self) -> None:
        """To be called when all steps of the epoch are done or skipped."""
        trainer = self._trainer
        if trainer._epochs_completed == trainer._start_after_epochs_completed:
            # With another number of workers it may have fewer steps than were to be skipped.
            self._restore()

    def _restore(self) -> None:
        if self._pending is None:
            return
        trainer, state = self._trainer, self._pending
        self._pending = None
        if "train_metrics" in state:
            self._interrupted_validation = state
        set_random_states(state["random_states"])
        load_module_states(trainer.model, state["modules"])
        trainer._total_batches_completed = state["total_batches_completed"]
        trainer._should_validate_this_epoch = state["should_validate_this_epoch"]
        if self._running_loss is not None and state["running_loss"] is not None:
            # It will be divided by the number of steps, which may be another now.
            ratio = trainer._batches_in_epoch_completed / state["steps_of_running_loss"]
            self._running_loss.load_state_dict(
                {name: loss * ratio for name, loss in state["running_loss"].items()}
            )

    def finish_epoch(self, metrics: Dict[str, float]) -> Dict[str, float]:
        """
        To be called after `finish_steps`.

        # Parameters

        metrics : `Dict[str, float]`, required.
            Of the epoch's training.

        # Returns

        `Dict[str, float]`
            The same, unless the checkpoint was saved in the validation after this epoch: then those
            from before it.
        """
        trainer = self._trainer
        if trainer._epochs_completed < trainer._start_after_epochs_completed:
            self._validations.read_again()
            return metrics
        if self._interrupted_validation is not None:
            metrics = self._interrupted_validation["train_metrics"]
            # Asking for data that are at their end may have changed them.
            set_random_states(self._interrupted_validation["random_states"])
            self._interrupted_validation = None
        if trainer._checkpointer is None or not trainer._checkpointer.save_on_preemption:
            return metrics
        self._before_validation = {
            "random_states": random_states(),
            "modules": self._module_states(),
            "train_metrics": metrics,
            "callbacks": copy.deepcopy([c.state_dict() for c in trainer._callbacks]),
        }
        return metrics

    def state_dict(self, in_validation: bool) -> Dict[str, Any]:
        """
        # Parameters

        in_validation : `bool`, required.
            Whether the epoch is being validated. The state is then that of before, so that it is
            validated from the beginning.
        """
        trainer = self._trainer
        running_loss = self._running_loss if trainer._batches_in_epoch_completed > 0 else None
        state = {
            "version": TRAINING_STATE_VERSION,
            "epoch_starts": self._epoch_starts.state_dict(),
            "validations": self._validations.state_dict(),
            "total_batches_completed": trainer._total_batches_completed,
            "should_validate_this_epoch": trainer._should_validate_this_epoch,
            "running_loss": None if running_loss is None else running_loss.state_dict(),
            "steps_of_running_loss": trainer._batches_in_epoch_completed,
            "random_states": random_states(),
            "modules": self._module_states(),
        }
        if in_validation and self._before_validation is not None:
            state.update(self._before_validation)
        return state

    def _module_states(self) -> Dict[str, Any]:
        return changed_states(module_states(self._trainer.model), self._fingerprints_before or {})

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes effect when training has come to the point in time of the checkpoint."""
        self._pending = state_dict
        starts = state_dict["epoch_starts"]
        self._epoch_starts = RandomHistory.from_state_dict(starts, len(starts["lengths"]))
        self._validations.load_state_dict(state_dict["validations"], state_dict["epochs_completed"])
