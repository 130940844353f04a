from dataclasses import dataclass, field
from typing import Any, Dict

from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime


@dataclass
class Progress:
    """
    How far a training has come, and the point in time that it continues from. Up to there the data
    are read again, but not trained.

    AllenNLP calls an optimizer step a batch: `batches_in_epoch_completed` are the optimizer steps
    of the epoch that a training is in, and `total_batches_completed` those of all epochs.
    """

    epochs_completed: int = 0
    batches_in_epoch_completed: int = 0
    total_batches_completed: int = 0
    start_after_epochs_completed: int = 0
    start_after_batches_in_epoch_completed: int = 0
    should_validate_this_epoch: bool = True
    _state_at_start: Dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def point(self) -> PointInTime:
        """Now."""
        return PointInTime(self.epochs_completed, self.batches_in_epoch_completed)

    @property
    def start(self) -> PointInTime:
        """Where the training continues from."""
        return PointInTime(
            self.start_after_epochs_completed, self.start_after_batches_in_epoch_completed
        )

    @property
    def total_batches_completed_at_start(self) -> int:
        """Optimizer steps of all epochs, where the training continues from."""
        return self._state_at_start.get("total_batches_completed", 0)

    @property
    def is_replaying(self) -> bool:
        """Whether the checkpoint that training continues from has seen the next step."""
        return self.point < self.start

    @property
    def is_replaying_epoch(self) -> bool:
        """Whether the checkpoint has seen all of this epoch."""
        return self.epochs_completed < self.start_after_epochs_completed

    def complete_step(self) -> None:
        self.batches_in_epoch_completed += 1
        self.total_batches_completed += 1

    def state_dict(self) -> Dict[str, Any]:
        return {
            "epochs_completed": self.epochs_completed,
            "batches_in_epoch_completed": self.batches_in_epoch_completed,
            "total_batches_completed": self.total_batches_completed,
            "should_validate_this_epoch": self.should_validate_this_epoch,
        }

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Has the training continue from there. `arrive` says the rest, once it is reached."""
        self.start_after_epochs_completed = state_dict["epochs_completed"]
        self.start_after_batches_in_epoch_completed = state_dict["batches_in_epoch_completed"]
        self._state_at_start = state_dict

    def arrive(self) -> None:
        """
        To be called where the training continues from. With another number of workers it has come
        there in another number of steps.
        """
        self.total_batches_completed = self._state_at_start["total_batches_completed"]
        self.should_validate_this_epoch = self._state_at_start["should_validate_this_epoch"]
