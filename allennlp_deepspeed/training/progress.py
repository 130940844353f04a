from dataclasses import dataclass, field
from typing import Any, Dict, Optional

from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime
from allennlp_deepspeed.checkpoint.schedule_unit import ScheduleUnit


@dataclass
class Progress:
    """
    Progress of a run, and the point in time that it resumes from. Until then the data are read
    again, but not trained.

    AllenNLP calls an optimizer step a batch: `batches_in_epoch_completed` are the optimizer steps
    of the current epoch, and `total_batches_completed` those of all epochs.
    """

    epochs_completed: int = 0
    batches_in_epoch_completed: int = 0
    total_batches_completed: int = 0
    schedule_unit: Optional[ScheduleUnit] = None
    """What schedules count, if steps have another size than those that the run began with."""
    start_after_epochs_completed: int = 0
    start_after_batches_in_epoch_completed: int = 0
    should_validate_this_epoch: bool = True
    has_dropped_batches: bool = False
    """Whether this rank has warned of batches that it drops, since other ranks have fewer."""
    num_forward_passes: int = 0
    """Number of forward passes for training in this epoch, by the trainer or by other callers."""
    instances_in_epoch: int = 0
    """Number of instances in this rank's batches of this epoch, trained or skipped."""
    validated_point: PointInTime = PointInTime(0, 0)
    """The point in time of the weights that have been validated last."""
    score_for_schedules: Optional[float] = None
    """The score of a validation within the epoch, if schedules haven't been stepped with it."""
    best_epoch: Optional[int] = None
    """The epoch with the best validation so far, if that was within the epoch, from 0."""
    _state_at_start: Dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def point(self) -> PointInTime:
        """Returns the current point in time."""
        return PointInTime(self.epochs_completed, self.batches_in_epoch_completed)

    @property
    def resume_point(self) -> PointInTime:
        """Returns the point in time that training resumes from."""
        return PointInTime(
            self.start_after_epochs_completed, self.start_after_batches_in_epoch_completed
        )

    def describe(self) -> str:
        """Describes the current point in time for the console."""
        return f"{self.point.describe()} (global step {self.total_batches_completed})"

    def describe_resume_point(self) -> str:
        """Describes the point in time that training resumes from."""
        where = self.resume_point.describe()
        if self.is_converted:
            return where  # the global step counts steps of the former size
        return f"{where} (global step {self.total_batches_completed_at_start})"

    @property
    def total_batches_completed_at_start(self) -> int:
        """Returns the optimizer steps of all epochs at the point that training resumes from."""
        return self._state_at_start.get("total_batches_completed", 0)

    @property
    def is_converted(self) -> bool:
        """Returns whether the checkpoint has the number of steps of another size in its name."""
        return self._state_at_start.get("is_converted", False)

    @property
    def is_fast_forwarding(self) -> bool:
        """Returns whether the resume point isn't reached, so that the next step is skipped."""
        return self.point < self.resume_point

    @property
    def is_fast_forwarding_epoch(self) -> bool:
        """Returns whether that checkpoint includes the full epoch."""
        return self.epochs_completed < self.start_after_epochs_completed

    def schedule_steps(self, global_step: int) -> int:
        """Returns the number of steps that schedules count."""
        return self.schedule_unit.steps(global_step) if self.schedule_unit else global_step

    def complete_step(self) -> None:
        self.batches_in_epoch_completed += 1
        self.total_batches_completed += 1

    def state_dict(self) -> Dict[str, Any]:
        return {
            "epochs_completed": self.epochs_completed,
            "batches_in_epoch_completed": self.batches_in_epoch_completed,
            "total_batches_completed": self.total_batches_completed,
            "schedule_unit": self.schedule_unit and list(self.schedule_unit),
            "should_validate_this_epoch": self.should_validate_this_epoch,
            "has_dropped_batches": self.has_dropped_batches,
            "validated_point": list(self.validated_point),
            "score_for_schedules": self.score_for_schedules,
            "best_epoch": self.best_epoch,
        }

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """
        Sets the point that training resumes from. `finish_fast_forward` restores the rest when it
        is reached.
        """
        self.start_after_epochs_completed = state_dict["epochs_completed"]
        self.start_after_batches_in_epoch_completed = state_dict["batches_in_epoch_completed"]
        unit = state_dict["schedule_unit"]
        self.schedule_unit = None if unit is None else ScheduleUnit(*unit)
        self.has_dropped_batches = state_dict["has_dropped_batches"]
        self.validated_point = PointInTime(*state_dict["validated_point"])
        self.score_for_schedules = state_dict["score_for_schedules"]
        self.best_epoch = state_dict["best_epoch"]
        self._state_at_start = state_dict

    def finish_fast_forward(self) -> None:
        """
        Restores the rest of the state at the point that training resumes from. With another world
        size it was reached after a different number of steps.
        """
        self.total_batches_completed = self._state_at_start["total_batches_completed"]
        self.should_validate_this_epoch = self._state_at_start["should_validate_this_epoch"]


def _attribute(name: str) -> Any:
    def read(self: Any) -> Any:
        return getattr(self._progress, name)

    def write(self: Any, value: Any) -> None:
        setattr(self._progress, name, value)

    return property(read, write)


class ProgressAttributes:
    """
    Attributes of a trainer that AllenNLP's loop reads and writes, which are those of its
    `Progress`.
    """

    _epochs_completed = _attribute("epochs_completed")
    _batches_in_epoch_completed = _attribute("batches_in_epoch_completed")
    _total_batches_completed = _attribute("total_batches_completed")
    _start_after_epochs_completed = _attribute("start_after_epochs_completed")
    _start_after_batches_in_epoch_completed = _attribute("start_after_batches_in_epoch_completed")
    _should_validate_this_epoch = _attribute("should_validate_this_epoch")
