"""What a checkpoint has of a trainer, besides the model and the optimizer."""

from contextlib import nullcontext
from typing import Any, Dict, Mapping

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.checkpoint.trainer_protocol import TRAINING_STATE_VERSION, Stateful
from allennlp_deepspeed.training.schedule_state import (
    keep_group_values,
    length_of,
    schedule_of,
    start_plateau,
    state_of,
    warn_of_former_lengths,
)

# They only choose how to train, and may choose again.
_OPTIONAL = {"gradient_synchronization", "memory_choices"}


def stateful_parts(trainer: Any) -> Dict[str, Stateful]:
    """
    Returns the trainer's parts with states in checkpoints, by name, in the order in which they are
    loaded.
    """
    parts = {
        "progress": trainer._progress,
        "metric_tracker": trainer._metric_tracker,
        "validation_scores": trainer._validation_scores,
        "learning_rate_scheduler": state_of(trainer._learning_rate_scheduler),
        "momentum_scheduler": state_of(trainer._momentum_scheduler),
        "moving_average": trainer._evaluation_weights,
        "attributes": trainer._attributes,
        "gradient_scaler": trainer._gradient_step.scaler,
        "best_weights": trainer.best_weights,
        "gradient_synchronization": trainer._gradient_synchronizer,
        "memory_choices": trainer._memory_choices,
        **trainer._extensions.parts(),
        "resume_state": trainer._resume_state,
    }
    return {name: part for name, part in parts.items() if part is not None}


def training_state(trainer: Any) -> Dict[str, Any]:
    """Returns the training state of this rank."""
    return {
        "version": TRAINING_STATE_VERSION,
        "instances_per_step": trainer.instances_per_step(),
        "num_epochs": trainer._num_epochs,
        **{name: part.state_dict() for name, part in trainer.parts().items()},
    }


def load_training_state(trainer: Any, state: Mapping[str, Any]) -> None:
    """
    Loads the output of `training_state`. Every rank must call it.

    # Raises

    `CheckpointError`
        If the trainer has a part that the training started without.
    """
    parts = trainer.parts()
    missing = [name for name in parts if name not in state]
    if set(missing) - _OPTIONAL - set(trainer._extensions.parts()):
        raise CheckpointError(
            f"The checkpoint has no state for 'trainer.{missing[0]}', which the training started "
            "without: remove the key, or start again in another serialization directory."
        )
    has_other_length = state["num_epochs"] != trainer._num_epochs
    unit = state["progress"]["schedule_unit"]
    with keep_group_values(trainer.optimizer):
        for name, part in parts.items():
            if name in state:
                length = length_of(part, unit) if has_other_length else {}
                with warn_of_former_lengths(name, part) if has_other_length else nullcontext():
                    part.load_state_dict(state[name])
                for attribute, value in length.items():
                    setattr(schedule_of(part), attribute, value)
    tracker = trainer._metric_tracker
    tracked = list(map(list, tracker.tracked_metrics))
    if state["metric_tracker"].get("tracked_metrics", tracked) != tracked:
        for schedule in (trainer._learning_rate_scheduler, trainer._momentum_scheduler):
            start_plateau(schedule, tracker._best_so_far)
