import inspect
from typing import Any, Iterable, Iterator, List, Mapping, NoReturn, Protocol

from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.trainer import TrainerCheckpoint

from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.directories import Directories
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine

TRAINING_STATE_VERSION = 6
"""Of what is in a `TrainerCheckpoint`. Version 2 was that of 0.1.0."""


class Part(Protocol):
    """Something of a training that goes on from a checkpoint where it was."""

    def state_dict(self) -> Any:
        """Plain data, on this rank."""

    def load_state_dict(self, state_dict: Any) -> None:
        """The same back."""


class ModelStateOfEngine(Mapping):
    """The model state of a `TrainerCheckpoint`, which can't be read: the engine saves it itself."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "`get_checkpoint_state` of a 'deepspeed' trainer has no state of the model: the engine "
            "saves the shards. For the full weights, call `trainer.model.state_dict()` "
            "within `with trainer.modified_weights():` on every rank."
        )

    def __getitem__(self, name: str) -> NoReturn:
        self._refuse()

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __reduce__(self) -> NoReturn:
        # It would be saved.
        self._refuse()


class Training(Protocol):
    """All that the checkpointer asks of a trainer."""

    @property
    def model(self) -> Model:
        """Whose parameters may be partitioned."""

    @property
    def engine(self) -> DeepSpeedEngine:
        """Which is up."""

    @property
    def directories(self) -> Directories:
        """Which ranks share a serialization directory."""

    @property
    def callbacks(self) -> List[TrainerCallback]:
        """Whose states are in the training state."""

    @property
    def best_weights(self) -> BestWeights:
        """Those of the best epoch so far."""

    def get_checkpoint_state(self) -> TrainerCheckpoint:
        """This rank's training state: that of each part, and what the checkpointer reads of it."""

    def save_best_weights(self) -> None:
        """If the epoch that has just ended was the best. To be called by every rank."""

    def instances_per_step(self) -> int:
        """Of all ranks."""


def overridden(own: type, subclass: type, names: Iterable[str]) -> List[str]:
    """Return those of the names that a subclass defines otherwise than the class `own` does."""
    find = inspect.getattr_static
    return [name for name in names if find(subclass, name, None) is not find(own, name, None)]
