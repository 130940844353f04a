"""
The seam at which optional features plug into the optimizer step. The trainer calls them in the
order of a step, and knows none by name:

0. `wrap` wraps modules of the model before the engine is brought up, and the constructor when it is
   up.
1. `divide` makes the micro-batches of the step from those that were read.
2. `start_step` sees the micro-batches before the first forward pass.
3. `train_on` goes forward and backward through a micro-batch instead of the trainer.
4. `check` compares what the ranks have seen, where they agree on the step anyway.

What `wrap` returns undoes it when the engine has been destroyed. What the constructor has wrapped
is undone by `DeepSpeedWrappedModel.before_destroying`. What an extension has found out is in
checkpoints under its `state_name`.
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

from allennlp_deepspeed.config.own_keys import TRAINER_KEYS
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.training.batch_groups import BatchGroup
from allennlp_deepspeed.training.gradient_sync import GradientSynchronizer

Outputs = Dict[str, torch.Tensor]

_EXTENSIONS = {
    "grad_cache": "allennlp_deepspeed.extensions.grad_cache.GradCache",
    "global_batch_size": "allennlp_deepspeed.extensions.global_batch.MicroBatches",
    "sequence_parallel_size": "allennlp_deepspeed.extensions.sequence_parallelism."
    "SequenceParallelism",
    "sequence_tiling": "allennlp_deepspeed.extensions.sequence_tiling.SequenceTiles",
}
"""Their classes, by the key of the trainer that asks for one."""


@dataclass(frozen=True)
class StepContext:
    """
    The parts of a trainer that extensions work with.

    # Parameters

    model : `Model`
    wrapped_model : `DeepSpeedWrappedModel`
        Its engine is up.
    gradients : `GradientSynchronizer`
    callbacks : `Sequence[TrainerCallback]`
    data_loaders : `Sequence[Any]`
        Of training and validation, `None` if there is none.
    forward : `Callable[[TensorDict], Dict[str, torch.Tensor]]`
        Goes forward as a step does, with a graph.
    batch_outputs : `Callable[[TensorDict, bool], Dict[str, torch.Tensor]]`
        AllenNLP's, which runs the engine's forward pass and adds the penalty of a regularizer.
    prepare : `Callable[[TensorDict], TensorDict]`
        Broadcasts buffers and moves a batch to the device, before its first forward pass.
    """

    model: Model
    wrapped_model: DeepSpeedWrappedModel
    gradients: GradientSynchronizer
    callbacks: Sequence[TrainerCallback]
    data_loaders: Sequence[Any]
    forward: Callable[[TensorDict], Outputs]
    batch_outputs: Callable[[TensorDict, bool], Outputs]
    prepare: Callable[[TensorDict], TensorDict]


class StepExtension:
    """
    An optional part of the optimizer step. Every rank must call each of its methods, which by
    default do nothing.

    # Parameters

    value : `Any`, required.
        What is written under the extension's key.
    context : `StepContext`, required.

    # Raises

    `ConfigurationError`
        If the model or a callback can't be trained with it.
    """

    makes_several_passes: ClassVar[bool] = False
    """Whether a micro-batch that is read becomes several forward and backward passes."""

    divides_batches: ClassVar[bool] = False
    """Whether micro-batches are parts of one batch, whose losses are weighed."""

    state_name: ClassVar[Optional[str]] = None
    """The name of its state in checkpoints, `None` if it has none."""

    workers_per_reader: int = 1
    """The number of neighbouring workers that read the same data."""

    def __init__(self, value: Any, context: StepContext) -> None:
        pass

    @classmethod
    def wrap(cls, value: Any, model: Model, zero_stage: int) -> Callable[[], None]:
        """
        Wraps modules of a model before the engine is brought up.

        # Parameters

        value : `Any`, required.
            What is written under the extension's key.
        model : `Model`, required.
        zero_stage : `int`, required.

        # Returns

        `Callable[[], None]`
            Undoes it.
        """
        return lambda: None

    def divide(self, group: BatchGroup) -> BatchGroup:
        """Return the micro-batches of a step, of those that have been read."""
        return group

    def start_step(self, batches: List[TensorDict]) -> None:
        """See the micro-batches of a step before the first forward pass, or one of validation."""

    def train_on(
        self, batch: TensorDict, num_micro_batches: int, is_last: bool
    ) -> Optional[Outputs]:
        """
        Goes forward and backward through a micro-batch.

        # Parameters

        batch : `TensorDict`, required.
        num_micro_batches : `int`, required.
            The number by which the loss is divided.
        is_last : `bool`, required.
            Whether it is the last micro-batch of the step.

        # Returns

        `Optional[Dict[str, torch.Tensor]]`
            The outputs of the model. `None` to leave the micro-batch to the trainer, as by default.
        """
        return None

    def check(self, device: torch.device) -> None:
        """Compare what ranks have seen since the last call. Waits for the device."""

    def state_dict(self) -> Any:
        """Plain data for checkpoints."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the same back."""


def find_extensions(arguments: Mapping[str, Any]) -> Dict[str, Type[StepExtension]]:
    """
    Imports the extensions that a training asks for.

    # Parameters

    arguments : `Mapping[str, Any]`, required.
        Those of the trainer.

    # Returns

    `Dict[str, Type[StepExtension]]`
        Their classes by key.
    """
    found: Dict[str, Type[StepExtension]] = {}
    for key, path in _EXTENSIONS.items():
        if arguments[key] != TRAINER_KEYS[key].default:
            module, _, name = path.rpartition(".")
            found[key] = getattr(import_module(module), name)
    return found


class StepExtensions:
    """
    The extensions of a trainer, one after the other.

    # Parameters

    classes : `Dict[str, Type[StepExtension]]`, required.
        By key, as `find_extensions` returns them.
    arguments : `Mapping[str, Any]`, required.
        Those of the trainer.
    """

    def __init__(
        self, classes: Dict[str, Type[StepExtension]], arguments: Mapping[str, Any]
    ) -> None:
        self._classes = classes
        self._values = {key: arguments[key] for key in classes}
        self._extensions: List[StepExtension] = []
        self.divides_batches = any(each.divides_batches for each in classes.values())
        """Whether micro-batches are parts of one batch."""
        self.makes_several_passes = self.divides_batches or any(
            each.makes_several_passes for each in classes.values()
        )
        """Whether there are several passes to a micro-batch that is read."""

    def wrap(self, model: Model, zero_stage: int) -> Callable[[], None]:
        """Wraps modules before the engine is brought up. Returns what undoes it."""
        with ExitStack() as undo:
            for key, each in self._classes.items():
                undo.callback(each.wrap(self._values[key], model, zero_stage))
            return undo.pop_all().close

    def construct(self, context: StepContext) -> None:
        """Constructs the extensions, when the engine is up."""
        self._extensions = [each(self._values[key], context) for key, each in self._classes.items()]

    @property
    def num_readers(self) -> int:
        """The number of workers, or of groups of them, that read different data."""
        size = dist.get_world_size()
        for extension in self._extensions:
            size //= extension.workers_per_reader
        return size

    def divide(self, group: BatchGroup) -> BatchGroup:
        """Return the micro-batches of a step."""
        for extension in self._extensions:
            group = extension.divide(group)
        return group

    def start_step(self, batches: List[TensorDict]) -> None:
        """Let each see the micro-batches of a step, or one of validation."""
        for extension in self._extensions:
            extension.start_step(batches)

    def train_on(
        self, batch: TensorDict, num_micro_batches: int, is_last: bool
    ) -> Optional[Outputs]:
        """Return the outputs of the extension that trains on a micro-batch, `None` without one."""
        for extension in self._extensions:
            outputs = extension.train_on(batch, num_micro_batches, is_last)
            if outputs is not None:
                return outputs
        return None

    def check(self, device: torch.device) -> None:
        """Compare what ranks have seen."""
        for extension in self._extensions:
            extension.check(device)

    def parts(self) -> Dict[str, StepExtension]:
        """Those whose states are in checkpoints, by name."""
        return {each.state_name: each for each in self._extensions if each.state_name is not None}
