"""
Parameters that ZeRO stage 3 has released: each rank has a shard of each, and the parameter itself
is an empty tensor, whose norm is 0 in PyTorch.
"""

from contextlib import contextmanager
from functools import wraps
from operator import attrgetter
from types import MethodWrapperType
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals

# Attribute of the parameters of an engine.
_NAME = "name_in_messages"

# The same for its `ds_status`.
_STATUS = "status_in_release"

_VALUES = {getattr(torch.Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag")}

_SHAPE: Any = torch.Tensor.shape
# Attributes and methods of the shape, which is that of the full parameter.
_SHAPES = {
    *(getattr(torch.Tensor, name) for name in ("shape", "ndim", "nbytes", "size", "numel")),
    *(getattr(torch.Tensor, name) for name in ("nelement", "dim", "ndimension", "__len__")),
    torch.numel,
}

_METHODS = {
    getattr(owner, name)
    for owner in (torch.Tensor, torch)
    for name in (
        *(
            "element_size",
            "get_device",
            "is_contiguous",
            "is_floating_point",
            "is_complex",
            "requires_grad_",
            "register_hook",
        ),
        *("register_post_accumulate_grad_hook", "__repr__", "__format__"),
        # PyTorch calls it to find the node of a parameter's gradient.
        "view_as",
    )
    if hasattr(owner, name)
}

access_allowed = torch._C.DisableTorchFunctionSubclass
"""Context manager in which released parameters are accessible as empty tensors."""


class ReleasedParameter(torch.nn.Parameter):
    """
    Class of a parameter from its release by ZeRO stage 3 until it is gathered. Its shape is that of
    the full parameter. Reading or changing its elements raises, as with PyTorch's
    `UninitializedParameter`.
    """

    def _set_status(self, status: Any) -> None:
        attributes = self.__dict__
        attributes["ds_status"] = attributes[_STATUS] = status
        if status is internals.GATHERED:
            self.__class__ = torch.nn.Parameter  # type: ignore[assignment]

    # DeepSpeed reads it a dozen times a step. `attrgetter` costs no call of Python, but can't read
    # an attribute of the property's own name.
    ds_status = property(attrgetter(_STATUS), _set_status)

    @classmethod
    @override
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        attribute = function.__self__ if isinstance(function, MethodWrapperType) else None
        if attribute is _SHAPE:
            # DeepSpeed reads the shape of each parameter when it releases it, and has set
            # `ds_shape` by then. `internals.full_shape` would be three calls more.
            return args[0].ds_shape
        if function in _SHAPES or attribute in _SHAPES:
            args, kwargs = tree_map_only(ReleasedParameter, _without_memory, (args, kwargs))
        elif not _is_about_metadata(function):
            released = (x for x in tree_leaves((args, kwargs)) if isinstance(x, ReleasedParameter))
            raise RuntimeError(
                f"The parameter '{vars(next(released))[_NAME]}' is used while ZeRO stage 3 has it "
                "sharded, outside the forward pass of its module. To read it, gather it on every "
                "rank: `with deepspeed.zero.GatheredParameters([parameter]):`. To copy a module: "
                "`with deepspeed.zero.GatheredParameters(list(module.parameters())):`. To change "
                "it in a callback: `with trainer.modified_weights():`. For a penalty on weights, "
                "override the model's `get_regularization_penalty`. After training with several "
                "workers, load the archive."
            )
        with access_allowed():
            return function(*args, **(kwargs or {}))


def _without_memory(parameter: Any) -> torch.Tensor:
    shape = internals.full_shape(parameter)
    with access_allowed():
        return torch.empty(shape, dtype=parameter.dtype, device="meta")


def _is_about_metadata(function: Any) -> bool:
    if isinstance(function, MethodWrapperType):  # access to an attribute
        return function.__name__ != "__get__" or function.__self__ not in _VALUES
    return function in _METHODS


@contextmanager
def track_released_parameters() -> Iterator[None]:
    """
    Context manager in which a parameter of an engine becomes a `ReleasedParameter` when DeepSpeed
    releases it. It affects the full process.
    """
    release = partition_parameters.free_param

    def release_and_refuse(parameter: Any) -> None:
        release(parameter)
        refuse_access(parameter)

    with internals.replace_attributes(partition_parameters, free_param=release_and_refuse):
        yield


@contextmanager
def call_before_release(function: Callable[[Any], None]) -> Iterator[None]:
    """
    Context manager in which `function` is called with each parameter that DeepSpeed is about to
    release. It affects the full process.
    """
    release = partition_parameters.free_param

    def call_and_release(parameter: Any) -> None:
        function(parameter)
        release(parameter)

    with internals.replace_attributes(partition_parameters, free_param=call_and_release):
        yield


@contextmanager
def refuse_access_to_released(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which any use of the elements of a released parameter raises a `RuntimeError`
    with its name, except when the engine saves and loads its checkpoints. With several workers this
    stays in effect afterwards, as these parameters stay sharded.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        At stage 3.
    """
    named_parameters = engine.module.named_parameters()
    parameters = [(name, p) for name, p in named_parameters if type(p) is torch.nn.Parameter]
    for name, parameter in parameters:
        setattr(parameter, _NAME, name)
        refuse_access(parameter)
    functions = {
        name: _with_access(getattr(engine, name))
        for name in ("module_state_dict", "load_module_state_dict")
    }
    try:
        with internals.replace_attributes(engine, **functions):
            yield
    finally:
        if dist.get_world_size() == 1:
            for _, parameter in parameters:
                allow_access(parameter)
                delattr(parameter, _NAME)


def _with_access(function: Callable) -> Callable:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with access_allowed():
            return function(*args, **kwargs)

    return call


def refuse_access(parameter: Any) -> None:
    """Turns a released parameter of an engine into a `ReleasedParameter`."""
    is_known = type(parameter) is torch.nn.Parameter and hasattr(parameter, _NAME)
    if is_known and parameter.ds_status is internals.RELEASED:
        parameter.__dict__[_STATUS] = internals.RELEASED
        parameter.__class__ = ReleasedParameter  # type: ignore[assignment]


def allow_access(parameter: Any) -> None:
    """Turns a parameter that has been given elements into a plain one."""
    if isinstance(parameter, ReleasedParameter):
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
