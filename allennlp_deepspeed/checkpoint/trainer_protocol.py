import inspect
from typing import Any, ContextManager, Iterable, Iterator, List, Mapping, NoReturn, Protocol

from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.trainer import TrainerCheckpoint
from typing_extensions import override

from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime
from allennlp_deepspeed.checkpoint.shared_directories import Directories
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel

TRAINING_STATE_VERSION = 7
"""The format version of a `TrainerCheckpoint`. Version 0.1.0 of this package wrote version 2."""


class Stateful(Protocol):
    """Part of a training whose state is in checkpoints."""

    def state_dict(self) -> Any:
        """Returns this rank's state as plain data."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the output of `state_dict`."""


class ModelStateOfEngine(Mapping):
    """
    Model state of a `TrainerCheckpoint`, which can't be read: the engine saves the model itself.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "`get_checkpoint_state` of a 'deepspeed' trainer has no model state, because the "
            "engine saves the shards. For the full weights, call `trainer.model.state_dict()` "
            "within `with trainer.modified_weights():` on every rank."
        )

    @override
    def __getitem__(self, name: str) -> NoReturn:
        self._refuse()

    @override
    def __iter__(self) -> Iterator[str]:
        self._refuse()

    @override
    def __len__(self) -> int:
        self._refuse()

    @override
    def __reduce__(self) -> NoReturn:
        # Pickling would save it.
        self._refuse()


class TrainerProtocol(Protocol):
    """Interface of a trainer that the checkpointer uses."""

    @property
    def model(self) -> Model:
        """The model, whose parameters may be partitioned."""

    @property
    def wrapped_model(self) -> DeepSpeedWrappedModel:
        """The owner of the engine."""

    @property
    def engine(self) -> DeepSpeedEngine:
        """The initialized engine."""

    @property
    def directories(self) -> Directories:
        """The groups of ranks that share a serialization directory."""

    @property
    def callbacks(self) -> List[TrainerCallback]:
        """The callbacks, whose states are in the training state."""

    @property
    def best_weights(self) -> BestWeights:
        """The weights of the best epoch so far."""

    @property
    def validation_scores(self) -> Mapping[PointInTime, float]:
        """The scores of checkpoints whose weights have been validated. The higher, the better."""

    @property
    def checkpointer(self) -> Any:
        """The checkpointer, or `None`."""

    @property
    def is_resumable(self) -> bool:
        """
        Returns whether training could be resumed from the state as it is. The same on every rank.
        """

    def get_checkpoint_state(self) -> TrainerCheckpoint:
        """
        Returns this rank's training state: the state of each part, and the values that the
        checkpointer reads.
        """

    def weights_to_save(self) -> ContextManager[None]:
        """
        Context manager in which the weights are those of the training, after checks of what must
        hold of weights that are saved. Must be entered on every rank.
        """

    def save_best_weights(self) -> None:
        """
        Saves the weights if the epoch that has just ended was the best, and records the score of
        the checkpoint that is going to be saved. Must be called on every rank.
        """

    def all_reduce_metrics(self) -> None:
        """Sums the counts of metrics over the ranks. To be called by every rank."""

    def instances_per_step(self) -> int:
        """Returns the number of instances per optimizer step, over all ranks."""


def overridden(own: type, subclass: type, names: Iterable[str]) -> List[str]:
    """Returns the names whose definition in a subclass differs from the one in the class `own`."""
    find = inspect.getattr_static
    return [name for name in names if find(subclass, name, None) is not find(own, name, None)]
