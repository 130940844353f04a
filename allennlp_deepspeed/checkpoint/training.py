from typing import List, Optional, Protocol

from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.trainer import TrainerCheckpoint
from deepspeed.runtime.engine import DeepSpeedEngine

TRAINING_STATE_VERSION = 3
"""Of what is in a `TrainerCheckpoint`. Version 2 was that of 0.1.0."""


class Training(Protocol):
    """All that the checkpointer asks of a trainer."""

    @property
    def model(self) -> Model:
        """Whose parameters may be partitioned."""

    @property
    def engine(self) -> DeepSpeedEngine:
        """Which is up."""

    @property
    def callbacks(self) -> List[TrainerCallback]:
        """Whose states are in the training state."""

    @property
    def is_primary(self) -> bool:
        """Whether this worker writes what its node has once."""

    @property
    def mapping_directory(self) -> Optional[str]:
        """Where whole weights are kept while they are used. `None` if there is memory for them."""

    def get_checkpoint_state(self) -> TrainerCheckpoint:
        """This rank's training state."""

    def save_best_weights(self) -> None:
        """If the epoch that has just ended was the best. To be called by every rank."""

    def instances_per_step(self) -> int:
        """Of all ranks."""
