"""
Extension points of the optimizer step for optional features. The trainer calls them in the order of
a step, and knows none by name:

0. `wrap` wraps modules of the model before the engine is initialized, and the constructor runs
   afterwards.
1. `divide` turns the batches that were read into the micro-batches of the step.
2. `receive_micro_batches` gets the micro-batches before the first forward pass.
3. `train_on` runs forward and backward of a micro-batch instead of the trainer.
4. `check` compares state between the ranks, when they agree on the step.

The function that `wrap` returns is called after the engine has been destroyed. Wrappers of the
constructor are removed by `DeepSpeedWrappedModel.call_before_destroy`. Checkpoints contain the
state of an extension under its `state_name`.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Sequence, Type

import torch
import torch.distributed as dist
from allennlp.data.data_loaders import TensorDict
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed.config.declared_keys import TRAINER_KEYS
from allennlp_deepspeed.engine.gradient_synchronizer import GradientSynchronizer
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.training.batch_groups import BatchGroup
from allennlp_deepspeed.training_traits import traits_of

Outputs = Dict[str, torch.Tensor]

_EXTENSIONS = {
    "grad_cache": "allennlp_deepspeed.extensions.grad_cache.GradCache",
    "global_batch_size": "allennlp_deepspeed.extensions.auto_micro_batch_size.AutoMicroBatchSize",
    "sequence_parallel_size": "allennlp_deepspeed.extensions.sequence_parallelism."
    "SequenceParallelism",
    "sequence_tiling": "allennlp_deepspeed.extensions.sequence_tiling.SequenceTiles",
}
"""Extension classes by the trainer's key that enables them."""


@dataclass(frozen=True)
class StepContext:
    """
    Parts of a trainer that extensions work with.

    # Parameters

    model : `Model`
    wrapped_model : `DeepSpeedWrappedModel`
        The wrapped model, whose engine has been initialized.
    gradient_synchronizer : `GradientSynchronizer`
    callbacks : `Sequence[TrainerCallback]`
    data_loaders : `Sequence[Any]`
        The data loaders of training and validation, each of which may be `None`.
    forward : `Callable[[TensorDict], Dict[str, torch.Tensor]]`
        Runs the forward pass of a step, with a graph.
    forward_prepared : `Callable[[TensorDict], Dict[str, torch.Tensor]]`
        As `forward`, for a batch that has been through `prepare`.
    prepare : `Callable[[TensorDict], TensorDict]`
        Broadcasts buffers and moves a batch to the device, before its first forward pass.
    """

    model: Model
    wrapped_model: DeepSpeedWrappedModel
    gradient_synchronizer: GradientSynchronizer
    callbacks: Sequence[TrainerCallback]
    data_loaders: Sequence[Any]
    forward: Callable[[TensorDict], Outputs]
    forward_prepared: Callable[[TensorDict], Outputs]
    prepare: Callable[[TensorDict], TensorDict]


class StepExtension:
    """
    Base class of optional parts of the optimizer step. Every rank must call each of its methods,
    which by default do nothing.

    # Parameters

    value : `Any`, required.
        The value of the extension's key.
    context : `StepContext`, required.

    # Raises

    `ConfigurationError`
        If the model or a callback doesn't support it.
    """

    makes_several_passes: ClassVar[bool] = False
    """Whether a micro-batch that is read becomes several forward and backward passes."""

    divides_batches: ClassVar[bool] = False
    """Whether micro-batches are parts of one batch, whose losses are weighted."""

    state_name: ClassVar[Optional[str]] = None
    """The name of its state in checkpoints, `None` if it has none."""

    ranks_per_batch: int = 1
    """The number of neighbouring ranks that read the same batches."""

    def __init__(self, value: Any, context: StepContext) -> None:
        pass

    @classmethod
    def wrap(cls, value: Any, model: Model, zero_stage: int) -> Callable[[], None]:
        """
        Wraps modules of a model before the engine is initialized.

        # Parameters

        value : `Any`, required.
            The value of the extension's key.
        model : `Model`, required.
        zero_stage : `int`, required.

        # Returns

        `Callable[[], None]`
            A function that restores the modules.
        """
        return lambda: None

    def divide(self, group: BatchGroup) -> BatchGroup:
        """Returns the micro-batches of a step, given the batches that have been read."""
        return group

    def receive_micro_batches(self, micro_batches: List[TensorDict]) -> None:
        """
        Gets the micro-batches of a step before the first forward pass, or a batch of validation.
        """

    def train_on(
        self, batch: TensorDict, num_accumulation_steps: int, is_last: bool
    ) -> Optional[Outputs]:
        """
        Runs forward and backward of a micro-batch.

        # Parameters

        batch : `TensorDict`, required.
        num_accumulation_steps : `int`, required.
            The divisor of the loss.
        is_last : `bool`, required.
            Whether it is the last micro-batch of the step.

        # Returns

        `Optional[Dict[str, torch.Tensor]]`
            The outputs of the model. With `None`, the default, the trainer runs the micro-batch.
        """
        return None

    def check(self, device: torch.device) -> None:
        """Compares the ranks' state since the last call. It synchronizes with the device."""

    def state_dict(self) -> Any:
        """Returns plain data for checkpoints."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the state."""


def find_extensions(arguments: Mapping[str, Any]) -> Dict[str, Type[StepExtension]]:
    """
    Imports the extensions that a run enables.

    # Parameters

    arguments : `Mapping[str, Any]`, required.
        The arguments of the trainer.

    # Returns

    `Dict[str, Type[StepExtension]]`
        The extension classes by key.
    """
    found: Dict[str, Type[StepExtension]] = {}
    for key, path in _EXTENSIONS.items():
        if arguments[key] != TRAINER_KEYS[key].default:
            module, _, name = path.rpartition(".")
            found[key] = getattr(import_module(module), name)
    return found


class StepExtensions:
    """
    The extensions of a trainer, called one after the other.

    # Parameters

    classes : `Dict[str, Type[StepExtension]]`, required.
        The extension classes by key, from `find_extensions`.
    arguments : `Mapping[str, Any]`, required.
        The arguments of the trainer.
    """

    def __init__(
        self, classes: Dict[str, Type[StepExtension]], arguments: Mapping[str, Any]
    ) -> None:
        self._classes = classes
        self._values = {key: arguments[key] for key in classes}
        self._extensions: List[StepExtension] = []
        self.key_of_passes = next(
            (k for k, each in classes.items() if each.train_on is not StepExtension.train_on), None
        )
        """The key of the one that runs forward and backward itself, if there is one."""
        self._has_loss_of_all_ranks = False
        self.divides_batches = any(each.divides_batches for each in classes.values())
        """Whether micro-batches are parts of one batch."""
        self.makes_several_passes = self.divides_batches or any(
            each.makes_several_passes for each in classes.values()
        )
        """Whether a micro-batch that is read becomes several passes."""

    def wrap(self, model: Model, zero_stage: int) -> Callable[[], None]:
        """Wraps modules before the engine is initialized. Returns a function that restores them."""
        with ExitStack() as undo:
            for key, each in self._classes.items():
                undo.callback(each.wrap(self._values[key], model, zero_stage))
            return undo.pop_all().close

    def construct(self, context: StepContext) -> None:
        """Constructs the extensions, after the engine has been initialized."""
        self._has_loss_of_all_ranks = traits_of(context.model).has_loss_of_all_ranks
        self._extensions = [each(self._values[key], context) for key, each in self._classes.items()]

    @property
    def data_parallel_size(self) -> int:
        """Returns the number of ranks, or groups of ranks, that read different data."""
        size = dist.get_world_size()
        for extension in self._extensions:
            size //= extension.ranks_per_batch
        return size

    def divide(self, group: BatchGroup) -> BatchGroup:
        """Returns the micro-batches of a step."""
        for extension in self._extensions:
            group = extension.divide(group)
        if self._has_loss_of_all_ranks:
            # No rank's loss is divided by what another may lack.
            group = group._replace(num_accumulation_steps=len(group.micro_batches))
        return group

    def receive_micro_batches(self, micro_batches: List[TensorDict]) -> None:
        """Passes each extension the micro-batches of a step, or a batch of validation."""
        for extension in self._extensions:
            extension.receive_micro_batches(micro_batches)

    def train_on(
        self, batch: TensorDict, num_accumulation_steps: int, is_last: bool
    ) -> Optional[Outputs]:
        """
        Returns the outputs of the extension that trains on a micro-batch, or `None` if none does.
        """
        for extension in self._extensions:
            outputs = extension.train_on(batch, num_accumulation_steps, is_last)
            if outputs is not None:
                return outputs
        return None

    def check(self, device: torch.device) -> None:
        """Compares the ranks' state."""
        for extension in self._extensions:
            extension.check(device)

    def parts(self) -> Dict[str, StepExtension]:
        """Returns the extensions with states in checkpoints, by name."""
        return {each.state_name: each for each in self._extensions if each.state_name is not None}
