import logging
import re
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Iterator, List, Optional
from unittest import mock

import torch
from allennlp.models.model import Model
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from allennlp_deepspeed.deepspeed_api import zero
from allennlp_deepspeed.engine.parameters.released_parameters import ReleasedParameter

logger = logging.getLogger(__name__)


class PartitionedRegularizer:
    """
    Lets a model with a regularizer train at ZeRO stage 3.

    AllenNLP's trainer computes the penalty after the model's forward pass, when stage 3 has already
    resharded the parameters. This class computes it at the end of the forward pass instead, and
    lets DeepSpeed gather the penalized parameters until then and during the backward pass.

    Every rank must construct it, before the engine, so that its hook runs before the engine's.

    # Parameters

    model : `Model`, required.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compute_penalty = _in_fp32(model.get_regularization_penalty)
        # They are unsharded already unless the model has been constructed partitioned.
        with zero.GatheredParameters(self._penalized_parameters()):
            self._penalty: Optional[torch.Tensor] = self._compute_penalty()
        if self._penalty is not None:
            model.get_regularization_penalty = self._last_penalty  # type: ignore[method-assign]
            self._hook = model.register_forward_hook(self._after_forward)

    def gather_with_model(self) -> None:
        """
        Registers the penalized parameters with the model. Must be called after the parameters have
        been partitioned.
        """
        if self._penalty is None:
            return
        parameters: List[Any] = self._penalized_parameters()
        logger.info(
            "The regularizer keeps parameters of %d elements in all gathered on each worker from "
            "the forward pass until their gradients are computed.",
            sum(parameter.ds_numel for parameter in parameters),
        )
        for parameter in parameters:
            zero.register_external_parameter(self._model, parameter)

    def _penalized_parameters(self) -> List[torch.nn.Parameter]:
        return [
            parameter
            for name, parameter in self._model.named_parameters()
            if self._may_penalize(name, parameter)
        ]

    def _may_penalize(self, name: str, parameter: torch.nn.Parameter) -> bool:
        if type(self._model).get_regularization_penalty is not Model.get_regularization_penalty:
            return True  # the model has its own penalty, on unknown parameters
        if self._model._regularizer is None or not parameter.requires_grad:
            return False
        regularizers = self._model._regularizer._regularizers
        return any(re.search(regex, name) for regex, _ in regularizers)

    def remove(self) -> None:
        if self._penalty is not None:
            self._hook.remove()
            del self._model.get_regularization_penalty

    def _after_forward(self, model: Model, inputs: Any, outputs: Any) -> None:
        if model.training or torch.is_grad_enabled():
            self._penalty = self._compute_penalty()

    def _last_penalty(self) -> Optional[torch.Tensor]:
        return self._penalty


@contextmanager
def compute_penalty_in_fp32(model: Model) -> Iterator[None]:
    """
    Context manager in which the penalty of a half-precision model is computed in fp32: the sum of
    squares of many weights overflows fp16.
    """
    penalty = _in_fp32(model.get_regularization_penalty)
    with mock.patch.object(model, "get_regularization_penalty", penalty):
        yield


def _in_fp32(function: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(function)
    def compute() -> Any:
        with _InFp32():
            return function()

    return compute


class _InFp32(TorchFunctionMode):
    """Mode in which PyTorch's functions get half-precision tensors converted to fp32."""

    @override
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, _to_fp32, (args, kwargs or {}))
        return function(*args, **kwargs)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ReleasedParameter):
        return tensor
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
