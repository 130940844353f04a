"""
Parameters that DeepSpeed doesn't expect: those without dimensions, transposed or in another memory
format it can't view as the bytes that it broadcasts, and empty ones it can't partition.
"""

from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, List
from unittest import mock

from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad_norm_

from allennlp_deepspeed.engine.shards import whole_shape


@contextmanager
def any_layout() -> Iterator[None]:
    """
    Within it DeepSpeed takes parameters of any shape and layout. Stages 1 to 3 leave them
    contiguous.
    """
    with _broadcast_as_vectors(), _clipped_without_dimensions(), _empty_left_alone():
        yield


@contextmanager
def _broadcast_as_vectors() -> Iterator[None]:
    """
    Within it DeepSpeed sees parameters as vectors where it broadcasts them.

    Mends DeepSpeed 0.19.8: it can't broadcast parameters without dimensions, or that are not
    contiguous. Gone when an engine comes up with both.
    [#6571](https://github.com/deepspeedai/DeepSpeed/issues/6571)
    """
    broadcast_model = DeepSpeedEngine._broadcast_model
    zero_init_param = zero.Init._zero_init_param
    exit_gathered = zero.GatheredParameters._exit

    def _broadcast_model(engine: DeepSpeedEngine) -> None:
        with _as_vectors(engine.module.parameters()):
            broadcast_model(engine)

    def _zero_init_param(init: zero.Init, parameter: Any) -> None:
        shape = parameter.shape
        with _as_vectors([parameter]):
            zero_init_param(init, parameter)
        parameter.ds_shape = shape

    def _exit(gathered: zero.GatheredParameters, *exception: Any) -> Any:
        if gathered.src_rank is None:
            return exit_gathered(gathered, *exception)
        with _as_vectors(gathered.params):
            return exit_gathered(gathered, *exception)

    with (
        mock.patch.object(DeepSpeedEngine, "_broadcast_model", _broadcast_model),
        mock.patch.object(zero.Init, "_zero_init_param", _zero_init_param),
        mock.patch.object(zero.GatheredParameters, "_exit", _exit),
    ):
        yield


@contextmanager
def _clipped_without_dimensions() -> Iterator[None]:
    """
    Mends DeepSpeed 0.19.8: its function that clips gradients multiplies by a factor of one
    dimension, which a gradient without any can't take. Gone when `clip_grad_norm_` clips a scalar.
    """

    def clip_fp32_gradients(engine: DeepSpeedEngine) -> None:
        clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())

    with mock.patch.object(DeepSpeedEngine, "clip_fp32_gradients", clip_fp32_gradients):
        yield


@contextmanager
def _empty_left_alone() -> Iterator[None]:
    """
    Within it parameters without elements stay as they are at ZeRO stage 3.

    Mends DeepSpeed 0.19.8: at stage 3 the hook of a module that has a parameter without elements
    waits for what isn't gathered, and fails. Gone when an engine goes forward through one.
    """
    zero_init_param = zero.Init._zero_init_param
    iter_params = partitioned_param_coordinator.iter_params
    partition = zero.Init._partition

    def _zero_init_param(init: zero.Init, parameter: Any) -> None:
        zero_init_param(init, parameter)
        if parameter.ds_numel == 0:
            parameter.data = parameter.data.new_empty(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE

    def _partition(init: zero.Init, parameters: List[Any], *args: Any, **kwargs: Any) -> None:
        # An empty one is partitioned once, for what DeepSpeed keeps on it.
        parameters = [p for p in parameters if p.ds_numel > 0 or p.ds_tensor is None]
        partition(init, parameters, *args, **kwargs)

    def _iter_params(*args: Any, **kwargs: Any) -> Iterable[Any]:
        return (p for p in iter_params(*args, **kwargs) if whole_shape(p).numel() > 0)

    with (
        mock.patch.object(zero.Init, "_zero_init_param", _zero_init_param),
        mock.patch.object(zero.Init, "_partition", _partition),
        mock.patch.object(partitioned_param_coordinator, "iter_params", _iter_params),
        mock.patch.object(parameter_offload, "iter_params", _iter_params),
    ):
        yield


@contextmanager
def _as_vectors(parameters: Iterable[Parameter]) -> Iterator[None]:
    """
    Within it parameters that can't be viewed as bytes have one dimension. They get their shape and
    layout back with the values that the vectors have then, unless they have been partitioned.
    """
    changed = []
    for parameter in parameters:
        data = parameter.data
        if data.dim() == 0 or not data.is_contiguous():
            parameter.data = data.reshape(-1)
            changed.append((parameter, parameter.data, data))
    try:
        yield
    finally:
        for parameter, vector, data in changed:
            if parameter.data.shape == vector.shape:
                parameter.data = data.copy_(parameter.data.view(data.shape))


def freeze_empty(model: Module) -> Callable[[], None]:
    """
    Freezes the parameters without elements, for ZeRO stage 3, whose optimizer has no place for
    them; see `_empty_left_alone`. Their gradients are all that changes.

    # Returns

    `Callable[[], None]`
        Undoes it.
    """
    empty = [p for p in model.parameters() if p.requires_grad and whole_shape(p).numel() == 0]

    def require_grad(value: bool) -> None:
        for parameter in empty:
            parameter.requires_grad_(value)

    require_grad(False)
    return lambda: require_grad(True)
