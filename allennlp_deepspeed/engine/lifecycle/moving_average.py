"""Moving averages of sharded weights."""

from typing import Any, Dict, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.moving_average import ExponentialMovingAverage, MovingAverage
from typing_extensions import override

from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.shards import Fragment, Shards, full_shape
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector

# The state of a moving average for each parameter.
_TENSORS = {"parameters", "shadows", "backups"}


class ShardedMovingAverage(EvaluationWeights):
    """
    Computes an AllenNLP `MovingAverage` of the weights that the optimizer updates, each rank for
    its shard, in fp32 at every precision. Not registered: the trainer wraps the `moving_average` of
    the config in it.

    # Parameters

    moving_average : `MovingAverage`, required.
        Computes the average. Its parameters are replaced by this rank's elements of them.
    shards : `Shards`, required.

    # Raises

    `ConfigurationError`
        If its parameters aren't the trainable parameters.
    """

    def __init__(self, moving_average: MovingAverage, shards: Shards) -> None:
        given = {parameter for _, parameter in moving_average._parameters}
        super().__init__(shards)
        self._fragments: Dict[Any, Fragment] = shards.fragments  # type: ignore[assignment]
        self._full_parameters = moving_average._parameters
        stepped = {p for group in shards.groups for p in group if p.requires_grad}
        # ZeRO leaves parameters without elements out of its groups.
        trained = {p for p in given if p.requires_grad or full_shape(p).numel() == 0}
        if stepped - trained or given - trained:
            raise ConfigurationError(
                "'trainer.moving_average' must average all trainable parameters and no frozen "
                "ones: construct it from those of `model.named_parameters()` whose "
                "`requires_grad` is true."
            )
        self._take_shadows(moving_average._shadows)
        self._moving_average = moving_average
        self._replace_parameters()

    @classmethod
    def construct(
        cls,
        moving_average: MovingAverage,
        wrapped_model: DeepSpeedWrappedModel,
        change_detector: WeightChangeDetector,
    ) -> "ShardedMovingAverage":
        """
        Constructs a moving average that is released with the engine.

        # Parameters

        moving_average : `MovingAverage`, required.
        wrapped_model : `DeepSpeedWrappedModel`, required.
        change_detector : `WeightChangeDetector`, required.
            Raises an error before the averages replace weights that others have changed.

        # Raises

        `ConfigurationError`
            If the parameters of `moving_average` aren't the trainable parameters.
        """
        sharded = cls(moving_average, wrapped_model.shards)
        wrapped_model.call_before_destroy(sharded.release)
        sharded.change_detector = change_detector
        return sharded

    @property
    def of_parameters(self) -> MovingAverage:
        """Returns the moving average that computes the averages."""
        return self._moving_average

    def _replace_parameters(self) -> None:
        tensors = [dict(self._parameters), self._shadows, self._backups]
        if type(self._moving_average) is not ExponentialMovingAverage:
            # It may choose by name. AllenNLP's own is faster with fewer and larger tensors.
            tensors = [self._by_parameter(each) for each in tensors]
        parameters, self._shadows_by_name, self._moving_average._backups = tensors
        self._moving_average._parameters = list(parameters.items())
        self._moving_average._shadows = dict(self._shadows_by_name)

    def _by_parameter(self, tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """
        Returns views of this rank's elements of each parameter, by name: in the shape of the
        parameter if these are all of them.

        # Parameters

        tensors : `Dict[str, torch.Tensor]`
            Tensors of the layout of the shards, by the names of the shards.
        """
        shard_names = {shard: name for name, shard in self._parameters}
        views: Dict[str, torch.Tensor] = {}
        for name, parameter in self._full_parameters:
            if parameter in self._fragments:
                fragment, shape = self._fragments[parameter], full_shape(parameter)
                view = tensors[shard_names[fragment.master]]
                if view.shape != shape:
                    view = fragment.in_master(view.detach())
                    view = view.view(shape) if fragment.size == shape.numel() else view
                views[name] = view
        return views

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
    def _assign(self) -> None:
        self._moving_average.assign_average_value()

    @override
    def _restore(self) -> None:
        self._moving_average.restore()

    @override
    def state_dict(self) -> Dict[str, Any]:
        """Returns this rank's shard of the averages, and the further state of a subclass."""
        self._collect_shadows()
        state_dict = self._moving_average.state_dict()
        further = {key: value for key, value in state_dict.items() if key not in _TENSORS}
        return {**further, "shadows": self._shadows}

    @override
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        differing = sorted(state_dict["shadows"].keys() ^ self._shadows.keys(), key=int)
        if differing:
            (parameter, *_) = self._shards.parameters_of_masters[int(differing[0])]
            raise ConfigurationError(
                f"The parameter '{self._shards.name_of(parameter)}' was frozen in one of the "
                "checkpoint and this training, and 'trainer.moving_average' is of the trainable "
                "ones: freeze the same parameters as then."
            )
        for name, shadow in state_dict["shadows"].items():
            self._shadows[name].copy_(shadow)
        tensors = {key: getattr(self._moving_average, f"_{key}") for key in _TENSORS}
        tensors["shadows"] = dict(self._shadows_by_name)
        self._moving_average.load_state_dict({**state_dict, **tensors})

    def _collect_shadows(self) -> None:
        """Copies averages that the moving average has replaced and not changed in place."""
        for name, shadow in self._shadows_by_name.items():
            shadow.copy_(self._moving_average._shadows[name])
