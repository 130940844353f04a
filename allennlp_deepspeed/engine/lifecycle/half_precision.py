"""Half precision: which modules compute in the dtype of their weights, and which under autocast."""

import re
import traceback
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any, Callable, ContextManager, Iterator, List, Set, Union
from unittest import mock

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models.model import Model
from torch.utils._pytree import tree_leaves, tree_map_only

from allennlp_deepspeed.training_traits import traits_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of the weights, by precision."""

_OF_PYTORCH = (
    torch.nn.Transformer,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerDecoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
)
# In the messages of operations whose operands differ.
_OTHER_DTYPE = re.compile(r"dtype|scalar type|Input type")


class HalfPrecision:
    """
    Runs the forward pass of a model whose weights are in bf16 or fp16.

    AllenNLP's modules create fp32 tensors (masks, lengths, means), which a layer with
    half-precision weights refuses without autocast. Autocast computes layer normalization in fp32
    on GPUs and stores its inputs in fp32 for the backward pass, so modules that are made for half
    precision run without it, as with DeepSpeed alone: those of transformers, PyTorch's
    transformers, and models with the trait `computes_in_weights_dtype`.

    # Parameters

    model : `Model`, required.
    dtype : `torch.dtype`, required.
        The dtype of the weights.
    device_type : `str`, required.
    autocast : `Union[bool, str]`, required.
        The trainer's `half_precision_autocast`.
    """

    # It must not refer to the model, because a copy of a module would copy the model.

    def __init__(
        self, model: Model, dtype: torch.dtype, device_type: str, autocast: Union[bool, str]
    ) -> None:
        self._dtype, self._device_type = dtype, device_type
        self._spares_modules = autocast == "auto"
        is_declared = traits_of(model).computes_in_weights_dtype
        self._is_on = not is_declared if self._spares_modules else bool(autocast)

    @contextmanager
    def installed(self, model: Model) -> Iterator[None]:
        """Context manager in which the model's forward pass runs so. Its outputs are fp32."""
        with ExitStack() as undo:
            if self._is_on and self._spares_modules:
                for module in _made_for_half_precision(model):
                    undo.enter_context(_wrap_forward(module, self._run_in_weights_dtype))
            undo.enter_context(_wrap_forward(model, self._return_fp32))
            yield

    def __call__(self, forward: Callable) -> Callable:
        """Returns another forward pass of the model, which runs in the same precision."""
        return update_wrapper(partial(self._run, forward), forward)

    def _run(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._is_on):
            try:
                return forward(*args, **kwargs)
            except RuntimeError as error:
                if _OTHER_DTYPE.search(str(error)) is None or not self._ran_without(error):
                    raise
                raise ConfigurationError(
                    f"A module can't compute in {self._dtype} without autocast ({error}): write "
                    "\"half_precision_autocast\": true in 'trainer'."
                ) from error

    def _ran_without(self, error: BaseException) -> bool:
        """Returns whether an error is of a module that ran without autocast."""
        frames = traceback.walk_tb(error.__traceback__)
        own = HalfPrecision._run_in_weights_dtype.__code__
        return not self._is_on or any(frame.f_code is own for frame, _ in frames)

    def _return_fp32(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """
        Runs a forward pass and converts its outputs to fp32 in evaluation, because NumPy, which
        AllenNLP's predictions use, has no bf16. In training it converts the loss, because the loss
        of a large batch, or with a regularizer's penalty, overflows fp16.
        """
        outputs = self._run(forward, *args, **kwargs)
        if not torch.is_grad_enabled():
            return tree_map_only(torch.Tensor, _in_fp32, outputs)
        if "loss" in outputs:
            outputs["loss"] = _in_fp32(outputs["loss"])
        return outputs

    def _run_in_weights_dtype(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self._device_type):
            return forward(*args, **kwargs)
        # What other modules have computed in fp32 under autocast, and their masks.
        convert = self._from_fp32
        with torch.autocast(self._device_type, enabled=False):
            return forward(*map(convert, args), **{k: convert(v) for k, v in kwargs.items()})

    def _from_fp32(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._dtype) if _is_fp32(value) else value
        if isinstance(value, (list, tuple, dict)) and any(map(_is_fp32, tree_leaves(value))):
            # Else it stays the caller's object, which a module may fill.
            return tree_map_only(torch.Tensor, self._from_fp32, value)
        return value


def _made_for_half_precision(model: torch.nn.Module) -> List[torch.nn.Module]:
    """Returns the modules that run in the dtype of their weights, PyTorch's outermost only."""
    from transformers import PreTrainedModel  # which takes seconds to import

    found: List[torch.nn.Module] = []
    inner: Set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found.append(module)  # also inner ones, which may be called directly
        elif isinstance(module, _OF_PYTORCH) and module not in inner:
            found.append(module)
            inner.update(module.modules())
    return found


def _wrap_forward(module: torch.nn.Module, wrapper: Callable) -> ContextManager[Any]:
    """
    Context manager in which `wrapper` runs the forward pass of a module, and in copies of the
    module that of the copy.
    """
    # The module may have its own, if a library or a user has wrapped it. A bound method within a
    # partial is copied with the module, unlike a function that refers to it.
    forward: Any = partial(wrapper, module.forward)
    return mock.patch.object(module, "forward", update_wrapper(forward, module.forward))


def _is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor
