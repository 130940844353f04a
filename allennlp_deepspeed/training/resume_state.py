import copy
import logging
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch.distributed as dist
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates
from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.random_states import (
    find_unrestorable_dropout,
    random_states,
    set_random_states,
)
from allennlp_deepspeed.reports.interval_metrics import num_instances
from allennlp_deepspeed.training.callbacks import OWN_CALLBACKS
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.running_loss import RunningLoss
from allennlp_deepspeed.training.validation_history import ValidationHistory

logger = logging.getLogger(__name__)


class ResumeState:
    """
    Restores a worker to its state at a checkpoint, so that training continues as if it had never
    been interrupted. Earlier epochs are read again but not trained, as in AllenNLP, because readers
    and data loaders may have a state. This class adds what AllenNLP leaves out: the random states,
    now and at the start of each epoch, so that the data are read in the same order; the position in
    the validation data; the accumulated losses and metrics of the epoch; other states of the model
    that training has changed; and the state of callbacks.

    # Parameters

    progress : `Progress`, required.
        The progress of a checkpoint is loaded before the rest of its state.
    model : `Model`, required.
    callbacks : `List[TrainerCallback]`, required.
    running_loss : `RunningLoss`, required.
    validations : `ValidationHistory`, required.
    saves_during_validation : `bool`, required.
        Whether a checkpoint may be saved during a validation.
    batch_settings : `Callable[[], Any]`, required.
        Returns what the number of instances in a rank's steps depends on, as plain data; `None` if
        it may differ each time.
    """

    def __init__(
        self,
        progress: Progress,
        model: Model,
        callbacks: List[TrainerCallback],
        running_loss: RunningLoss,
        validations: ValidationHistory,
        saves_during_validation: bool,
        batch_settings: Callable[[], Any],
    ) -> None:
        self._progress = progress
        self._model = model
        self._callbacks = callbacks
        self._running_loss = running_loss
        self._validations = validations
        self.saves_during_validation = saves_during_validation
        self._batch_settings = batch_settings
        self._epoch_starts: List[Dict[str, Any]] = []
        # The training metrics of each epoch.
        self._metrics: List[Dict[str, Any]] = []
        self._attributes = AttributeStates(model)
        # The state of this worker before validation, in the epoch that is validated.
        self._before_validation: Optional[Dict[str, Any]] = None
        self._is_validating = False
        self._is_interrupted = False
        self._is_in_loop = False
        self.has_finished_steps = False
        """Whether the steps of the current epoch are over."""
        self._has_same_batch_settings = False
        # The argument of `load_state_dict`, until its point in time is reached.
        self._pending_state: Optional[Dict[str, Any]] = None
        # The same, if the checkpoint was saved during a validation, until that is restarted.
        self._interrupted_validation: Optional[Dict[str, Any]] = None

    def start_training(self) -> None:
        """
        Records the state of modules. Must be called after callbacks have prepared the model, and
        before training.
        """
        self._attributes.start()
        self._is_in_loop = True

    def start_epoch(self) -> None:
        """
        Restores the random states of an epoch. Must be called before the data of the epoch are
        read.
        """
        self._before_validation = None
        self._is_validating = False
        self._is_interrupted = False
        self.has_finished_steps = False
        self._progress.instances_in_epoch = 0
        self._restore_if_reached()
        epoch = self._progress.epochs_completed
        if self._progress.is_fast_forwarding and epoch < len(self._epoch_starts):
            set_random_states(self._epoch_starts[epoch])
        else:
            # A caller of `_train_epoch` may train an epoch of this number again.
            self._epoch_starts[epoch:] = [random_states()]

    def skip_step(self, micro_batches: Sequence[TensorDict]) -> None:
        """
        Skips a step. Must be called instead of training on it, before the data of the next step are
        read.

        # Parameters

        micro_batches : `Sequence[TensorDict]`, required.
            Those on this rank.

        # Raises

        `CheckpointError`
            On every rank, if the checkpoint is reached, and these steps had other batches before.
        """
        self._progress.instances_in_epoch += sum(map(num_instances, micro_batches))
        self._progress.complete_step()
        self._validations.fast_forward(self._progress.batches_in_epoch_completed)
        self._restore_if_reached()

    def _restore_if_reached(self) -> None:
        if self._progress.point == self._progress.resume_point:
            self._restore()

    def finish_steps(self) -> None:
        """Restores the state at the end of the steps of an epoch, trained or skipped."""
        if self._progress.epochs_completed == self._progress.resume_point.epochs:
            # With another world size the epoch may have fewer steps than had to be skipped.
            self._restore()

    def _restore(self) -> None:
        if self._pending_state is None:
            return
        self._check_batches(self._pending_state)
        state, self._pending_state = self._pending_state, None
        if "train_metrics" in state:
            self._interrupted_validation = state
        set_random_states(state["random_states"])
        modules = find_unrestorable_dropout(self._model)
        if modules:
            logger.warning(
                "After resuming, the dropout between layers of %s differs from an uninterrupted "
                "run: on GPUs cuDNN holds its random state, which can't be saved.",
                ", ".join(modules),
            )
        self._restore_model(state)
        self._progress.finish_fast_forward()
        announce(logger, "Resumed training %s", self._progress.describe_resume_point())
        if state["running_loss"] is not None:
            # It will be divided by the number of steps, which may differ now.
            ratio = self._progress.batches_in_epoch_completed / state["steps_of_running_loss"]
            self._running_loss.load_state_dict(
                {name: loss * ratio for name, loss in state["running_loss"].items()}
            )

    def _check_batches(self, state: Dict[str, Any]) -> None:
        """
        Refuses to continue within an epoch if its batches have other sizes than before, unless the
        checkpointer knows why and has converted the position. A user's sampler may report no batch
        size, and a callback may have changed it.
        """
        point = self._progress.resume_point
        if point.steps == 0:
            return
        before, now = state.get("instances_in_epoch"), self._progress.instances_in_epoch
        problem = None
        if self._has_same_batch_settings and now != before:
            problem = (
                f"Training can't be resumed {point.describe()}: worker {dist.get_rank()} had read "
                f"{before} instances in the steps of this epoch, which have {now} now, so data "
                "would be skipped or trained twice. Restore the data, and the settings of "
                "'data_loader' and its sampler. Or move this checkpoint away, to resume from an "
                "earlier one."
            )
        problems = collectives.gather_problems(problem)
        if problems:
            raise CheckpointError(problems[0])

    def _restore_model(self, state: Dict[str, Any]) -> None:
        self._attributes.load_state_dict(state["modules"])
        for name, parameter in self._model.named_parameters():
            is_trained = name not in state["frozen"]
            if parameter.requires_grad != is_trained:  # as a callback has set it
                parameter.requires_grad_(is_trained)

    def finish_training(self) -> None:
        """Restores the model after the last epoch, if no step is left after the checkpoint."""
        self._is_in_loop = False
        if self._pending_state is not None and self._progress.point == self._progress.resume_point:
            state, self._pending_state = self._pending_state, None
            set_random_states(state["random_states"])
            self._restore_model(state)

    def finish_epoch(self, metrics: Dict[str, float]) -> Dict[str, float]:
        """
        Finishes the training part of an epoch, after `finish_steps`.

        # Parameters

        metrics : `Dict[str, float]`, required.
            The training metrics of the epoch.

        # Returns

        `Dict[str, float]`
            The same metrics, unless the checkpoint was saved during the validation of this epoch:
            then those from before the validation. For an epoch before the checkpoint, those of when
            it was trained, since a subclass of the trainer may read them.
        """
        epoch = self._progress.epochs_completed
        self.has_finished_steps = True
        if self._progress.is_fast_forwarding_epoch:
            self._validations.fast_forward(step=None)
            return {**next(iter(self._metrics[epoch : epoch + 1]), {}), **metrics}
        if self._interrupted_validation is not None:
            metrics = self._interrupted_validation["train_metrics"]
            # Reading to the end of the data may have changed them.
            set_random_states(self._interrupted_validation["random_states"])
            self._interrupted_validation = None
        self._metrics[epoch:] = [dict(metrics)]
        if self.saves_during_validation:
            self._before_validation = {
                "random_states": random_states(),
                "modules": self._attributes.state_dict(),
                "train_metrics": metrics,
                **copy.deepcopy(self._callback_states()),
            }
        return metrics

    def start_validation(self) -> None:
        """Records the start of a validation. Must be called before its data are read."""
        self._is_validating = True
        if self.saves_during_validation and not self.has_finished_steps:
            # The trainer restores everything else.
            self._before_validation = copy.deepcopy(self._callback_states())
        self._validations.start()

    def finish_validation(self) -> None:
        """Must be called after a validation, unless it was interrupted."""
        self._is_validating = False
        epochs, steps = self._progress.point
        self._validations.finish(None if self.has_finished_steps else steps)
        if self.has_finished_steps:
            self._progress.validated_point = PointInTime(epochs + 1, 0)

    def forget_validation(self) -> None:
        """Must be called after a validation within the epoch that is going to be repeated."""
        self._validations.forget(self._progress.batches_in_epoch_completed)

    @property
    def is_validation_interrupted(self) -> bool:
        """Returns whether `interrupt_validation` has been called in this epoch."""
        return self._is_interrupted

    @property
    def is_resumable(self) -> bool:
        """
        Returns whether training could be resumed from the state as it is. It can't before the
        checkpoint that it resumes from is reached, within a validation, and, in AllenNLP's loop,
        between the last step of an epoch and its end, because schedules have been stepped.
        """
        if self._is_interrupted:
            return True
        is_epoch_ending = self.has_finished_steps and self._progress.batches_in_epoch_completed > 0
        is_in_between = self._is_validating or (self._is_in_loop and is_epoch_ending)
        return self._pending_state is None and not is_in_between

    def interrupt_validation(self) -> None:
        """
        Sets the state to that before the validation, so that it will be restarted, for a checkpoint
        that is saved during it.
        """
        self._is_interrupted = True

    def state_dict(self) -> Dict[str, Any]:
        steps = self._progress.batches_in_epoch_completed
        state = {
            "epoch_starts": list(self._epoch_starts),
            "metrics": list(self._metrics),
            "validations": self._validations.state_dict(),
            "running_loss": self._running_loss.state_dict() if steps > 0 else None,
            "steps_of_running_loss": steps,
            "batch_settings": self._batch_settings(),
            "instances_in_epoch": self._progress.instances_in_epoch,
            "random_states": random_states(),
            "modules": self._attributes.state_dict(),
            "frozen": [n for n, p in self._model.named_parameters() if not p.requires_grad],
            **self._callback_states(),
        }
        if self._is_interrupted and self._before_validation is not None:
            state.update(self._before_validation)
        return state

    def _callback_states(self) -> Dict[str, Any]:
        own = self._own_callbacks()
        return {
            "callbacks": [callback.state_dict() for callback in self._user_callbacks()],
            "own_callbacks": {name: callback.state_dict() for name, callback in own.items()},
        }

    def _own_callbacks(self) -> Dict[str, TrainerCallback]:
        """Returns the callbacks that the trainer has added, by the names of their classes."""
        return {type(c).__name__: c for c in self._callbacks if isinstance(c, OWN_CALLBACKS)}

    def _user_callbacks(self) -> List[TrainerCallback]:
        return [c for c in self._callbacks if not isinstance(c, OWN_CALLBACKS)]

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """
        Loads a state that is restored when training reaches the point in time of the checkpoint.
        Only the states of callbacks, which are called earlier, are restored immediately.
        """
        # By position as in AllenNLP: added callbacks are at the end.
        for callback, state in zip(self._user_callbacks(), state_dict["callbacks"]):
            callback.load_state_dict(state)
        own_states = state_dict["own_callbacks"]
        for name, callback in self._own_callbacks().items():
            if name in own_states:
                callback.load_state_dict(own_states[name])
        self._pending_state = state_dict
        settings = self._batch_settings()
        has_same = settings is not None and settings == state_dict.get("batch_settings")
        self._has_same_batch_settings = has_same
        self._epoch_starts = list(state_dict["epoch_starts"])
        self._metrics = list(state_dict["metrics"])
        self._validations.load_state_dict(state_dict["validations"])
