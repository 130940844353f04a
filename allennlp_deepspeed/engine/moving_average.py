"""Moving averages of sharded weights."""

import sys
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.moving_average import ExponentialMovingAverage, MovingAverage
from typing_extensions import override

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.interruption import TrainingInterrupted
from allennlp_deepspeed.engine.shards import Fragment, Shards, full_shape
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel

# The state of a moving average for each parameter.
_TENSORS = {"parameters", "shadows", "backups"}


class ShardedMovingAverage(MovingAverage):
    """
    Computes an AllenNLP `MovingAverage` of the weights that the optimizer updates, each rank for
    its shard, in fp32 at every precision. Not registered: the trainer wraps the `moving_average` of
    the config in it.

    # Parameters

    moving_average : `MovingAverage`, required.
        Computes the average. Its parameters are replaced by this rank's elements of them.
    engine : `DeepSpeedEngine`, required.

    # Raises

    `ConfigurationError`
        If its parameters aren't the trainable parameters.
    """

    def __init__(self, moving_average: MovingAverage, engine: DeepSpeedEngine) -> None:
        given = {parameter for _, parameter in moving_average._parameters}
        self._shards = Shards(engine)
        self._fragments: Dict[Any, Fragment] = self._shards.fragments  # type: ignore[assignment]
        super().__init__(
            (str(i), shard)
            for i, shard in enumerate(self._shards.masters)
            # At stage 0 the optimizer may have frozen parameters.
            if not isinstance(shard, torch.nn.Parameter) or shard.requires_grad
        )
        self._full_parameters = moving_average._parameters
        stepped = {p for group in self._shards.groups for p in group if p.requires_grad}
        # ZeRO leaves parameters without elements out of its groups.
        trained = {p for p in given if p.requires_grad or full_shape(p).numel() == 0}
        if stepped - trained or given - trained:
            raise ConfigurationError(
                "'trainer.moving_average' must average all trainable parameters and no frozen "
                "ones: construct it from those of `model.named_parameters()` whose "
                "`requires_grad` is true."
            )
        # Called on every rank before the averages replace the weights.
        self.before_assigning: Callable[[], None] = lambda: None
        self._take_shadows(moving_average._shadows)
        self._moving_average = moving_average
        self._replace_parameters()
        self._error_when_assigned: Optional[BaseException] = None

    @classmethod
    def construct(
        cls,
        moving_average: MovingAverage,
        wrapped_model: DeepSpeedWrappedModel,
        before_assigning: Callable[[], None],
    ) -> "ShardedMovingAverage":
        """
        Constructs a moving average that is released with the engine.

        # Parameters

        moving_average : `MovingAverage`, required.
        wrapped_model : `DeepSpeedWrappedModel`, required.
        before_assigning : `Callable[[], None]`, required.
            Called on every rank before the averages replace the weights.

        # Raises

        `ConfigurationError`
            If the parameters of `moving_average` aren't the trainable parameters.
        """
        sharded = cls(moving_average, wrapped_model.engine)
        wrapped_model.call_before_destroy(sharded.release)
        sharded.before_assigning = before_assigning
        return sharded

    def _replace_parameters(self) -> None:
        tensors = [dict(self._parameters), self._shadows, self._backups]
        if type(self._moving_average) is not ExponentialMovingAverage:
            # It may choose by name. AllenNLP's own is faster with fewer and larger tensors.
            tensors = [self._by_parameter(each) for each in tensors]
        parts, self._parts_of_shadows, self._moving_average._backups = tensors
        self._moving_average._parameters = list(parts.items())
        self._moving_average._shadows = dict(self._parts_of_shadows)

    def _by_parameter(self, tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """
        Returns views of this rank's elements of each parameter, by name: in the shape of the
        parameter if these are all of them.

        # Parameters

        tensors : `Dict[str, torch.Tensor]`
            Tensors of the layout of the shards, by the names of the shards.
        """
        shard_names = {shard: name for name, shard in self._parameters}
        parts: Dict[str, torch.Tensor] = {}
        for name, parameter in self._full_parameters:
            if parameter in self._fragments:
                fragment, shape = self._fragments[parameter], full_shape(parameter)
                part = tensors[shard_names[fragment.master]]
                if part.shape != shape:
                    part = fragment.in_master(part.detach())
                    part = part.view(shape) if fragment.size == shape.numel() else part
                parts[name] = part
        return parts

    def _take_shadows(self, shadows: Dict[str, torch.Tensor]) -> None:
        """Continues the averages of an earlier training that aren't those of an engine."""
        names = {shard: name for name, shard in self._parameters}
        for name, parameter in self._full_parameters:
            is_fp32 = shadows[name].dtype == torch.float32
            is_full = is_fp32 and shadows[name].shape == full_shape(parameter)
            if is_full and parameter in self._fragments:
                fragment = self._fragments[parameter]
                shadow = self._shadows[names[fragment.master]]
                fragment.write(shadow, shadows[name])

    def release(self) -> None:
        """
        Restores the parameters that the moving average was constructed with, in a single process.
        Must be called before the engine is destroyed.
        """
        if dist.get_world_size() > 1:
            return
        average = self._moving_average
        self._collect_shadows()
        average._parameters = [(n, p) for n, p in self._full_parameters if p in self._fragments]
        average._shadows = self._by_parameter(self._shadows)
        average._backups = self._by_parameter(self._backups)

    @override
    def apply(self, num_updates: Optional[int] = None) -> None:
        self._moving_average.apply(num_updates)

    @override
    def assign_average_value(self) -> None:
        """Replaces the weights by the averages. Every rank must call it."""
        self.before_assigning()
        self._error_when_assigned = sys.exc_info()[1]
        self._moving_average.assign_average_value()
        self._shards.update_parameters()

    @contextmanager
    def assigned(self) -> Iterator[None]:
        """Context manager in which the averages are the weights. Every rank must enter it."""
        self.assign_average_value()
        try:
            yield
        finally:
            self.restore()

    @override
    def restore(self) -> None:
        """
        Restores the weights. Every rank must call it. On a rank that is failing it does nothing,
        and the other ranks need not call it: AllenNLP calls it while the exception propagates.
        """
        if self._is_failing() and dist.get_world_size() > 1:
            return
        self._moving_average.restore()
        self._shards.update_parameters()

    def _is_failing(self) -> bool:
        """
        Returns whether an exception has been raised since `assign_average_value` that other ranks
        may not have.
        """
        error = sys.exc_info()[1]
        return error is not self._error_when_assigned and not isinstance(error, TrainingInterrupted)

    @override
    def state_dict(self) -> Dict[str, Any]:
        """Returns this rank's shard of the averages, and the further state of a subclass."""
        self._collect_shadows()
        state_dict = self._moving_average.state_dict()
        further = {key: value for key, value in state_dict.items() if key not in _TENSORS}
        return {**further, "shadows": self._shadows}

    @override
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        for name, shadow in state_dict["shadows"].items():
            self._shadows[name].copy_(shadow)
        tensors = {key: getattr(self._moving_average, f"_{key}") for key in _TENSORS}
        tensors["shadows"] = dict(self._parts_of_shadows)
        self._moving_average.load_state_dict({**state_dict, **tensors})

    def _collect_shadows(self) -> None:
        """Copies averages that the moving average has replaced and not changed in place."""
        for name, part in self._parts_of_shadows.items():
            part.copy_(self._moving_average._shadows[name])
