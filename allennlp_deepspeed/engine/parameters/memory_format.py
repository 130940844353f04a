"""
Supports parameters that DeepSpeed can't view as the bytes that it broadcasts: those that have no
dimensions, are transposed or have another memory format.
"""

from contextlib import contextmanager
from typing import Any, ContextManager, Iterable, Iterator

from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, zero
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.process.process_environment import SharedContext


def support_any_layout() -> ContextManager[None]:
    """
    Context manager in which DeepSpeed supports parameters of any shape and layout, at stage 3
    except empty ones. Stages 1 to 3 make them contiguous. It may be nested, as
    `process_environment`.

    Works around DeepSpeed 0.19.8: it can't broadcast parameters that have no dimensions or aren't
    contiguous. It clips gradients by multiplying them with a factor of one dimension, which fails
    for gradients without dimensions. Gone when an engine with both is initialized, and clips.
    [#6571](https://github.com/deepspeedai/DeepSpeed/issues/6571)
    """
    return _support.used()


@contextmanager
def _broadcast_as_vectors() -> Iterator[None]:
    """Context manager in which DeepSpeed broadcasts parameters as vectors."""
    broadcast_model, zero_init_param, exit_gathered = internals.broadcasting_functions()

    def _broadcast_model(engine: DeepSpeedEngine) -> None:
        with _as_vectors(engine.module.parameters()):
            broadcast_model(engine)

    def _zero_init_param(init: zero.Init, parameter: Any) -> None:
        shape = parameter.shape
        with _as_vectors([parameter]):
            zero_init_param(init, parameter)
        internals.set_full_shape(parameter, shape)

    def _exit(gathered: zero.GatheredParameters, *exception: Any) -> Any:
        if gathered.src_rank is None:
            return exit_gathered(gathered, *exception)
        with _as_vectors(gathered.params):
            return exit_gathered(gathered, *exception)

    with (
        internals.replace_attributes(DeepSpeedEngine, _broadcast_model=_broadcast_model),
        internals.replace_attributes(zero.Init, _zero_init_param=_zero_init_param),
        internals.replace_attributes(zero.GatheredParameters, _exit=_exit),
    ):
        yield


@contextmanager
def _clip_without_dimensions() -> Iterator[None]:
    """Context manager in which DeepSpeed clips gradients at stage 0 as PyTorch does."""

    def clip_fp32_gradients(engine: DeepSpeedEngine) -> None:
        clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())

    with internals.replace_attributes(DeepSpeedEngine, clip_fp32_gradients=clip_fp32_gradients):
        yield


@contextmanager
def _support_any_layout() -> Iterator[None]:
    with _broadcast_as_vectors(), _clip_without_dimensions():
        yield


_support = SharedContext(_support_any_layout)


@contextmanager
def _as_vectors(parameters: Iterable[Parameter]) -> Iterator[None]:
    """
    Context manager in which parameters that can't be viewed as bytes have one dimension. At exit
    their shape and layout are restored with the values of the vectors, unless they have been
    partitioned.
    """
    changed = []
    with access_allowed():
        for parameter in parameters:
            # A partitioned parameter is a vector.
            if parameter.dim() == 0 or not parameter.is_contiguous():
                data = parameter.data
                parameter.data = data.reshape(-1)
                changed.append((parameter, parameter.data, data))
    try:
        yield
    finally:
        with access_allowed():
            for parameter, vector, data in changed:
                if parameter.shape == vector.shape:
                    parameter.data = data.copy_(parameter.data.view(data.shape))
