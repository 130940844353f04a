"""
Constructs the model of a config without its weights.
"""

import logging
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Dict, Iterator, Optional
from unittest import mock

import torch
from allennlp.common import Params, cached_transformers
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models.model import Model, remove_weights_related_keys_from_params
from allennlp.modules.transformer import TransformerModule
from allennlp.training.util import make_vocab_from_params
from typing_extensions import override

logger = logging.getLogger(__name__)

_is_without_weights: ContextVar[bool] = ContextVar("is_without_weights", default=False)


def is_without_weights() -> bool:
    """Returns whether a model is being constructed without its pretrained weights."""
    return _is_without_weights.get()


def construct_without_weights(
    params: Params,
    vocabulary: Optional[Vocabulary] = None,
    serialization_dir: Optional[str] = None,
    on_meta_device: bool = True,
) -> Model:
    """
    Constructs the model of a training configuration on the meta device, where tensors have shapes
    and no memory. A model whose constructor computes with values can't be constructed there: it is
    constructed on the CPU, with random weights. Pretrained weights aren't read, except the archive
    of a `"from_archive"`.

    # Parameters

    params : `Params`, required.
        A complete training configuration. It is not changed.
    vocabulary : `Vocabulary`, optional (default = `None`)
        `None` for the vocabulary of the configuration, whose data are read.
    serialization_dir : `str`, optional (default = `None`)
        The directory of a finished training, from which the model may load files that it has saved.
        `None` for an empty one.
    on_meta_device : `bool`, optional (default = `True`)
        If not, it is constructed on the CPU, with random weights.

    # Raises

    `ConfigurationError`
        If the configuration has no model, data for its vocabulary can't be read, or one of the two
        can't be constructed.
    """
    if "model" not in params:
        raise ConfigurationError("The config has no 'model'.")
    with tempfile.TemporaryDirectory() as empty:
        directory = serialization_dir or empty
        if vocabulary is None:
            vocabulary = _make_vocabulary(params, directory)
        with _skip_pretrained_weights():
            try:
                with _on_meta_device() if on_meta_device else nullcontext():
                    return _construct(params, vocabulary, directory)
            except ConfigurationError:
                raise
            except Exception as error:
                logger.warning(
                    "The model can't be constructed on the meta device (%s: %s), and is "
                    "constructed on the CPU instead.",
                    type(error).__name__,
                    error,
                )
                with _name_in_errors("model"):
                    return _construct(params, vocabulary, directory)


@contextmanager
def _name_in_errors(section: str) -> Iterator[None]:
    """Context manager that names the section of the config if it can't be constructed."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigurationError(
            f"'{section}' of the config could not be constructed: {type(error).__name__}: {reason}"
        ) from error


def _make_vocabulary(params: Params, serialization_dir: str) -> Vocabulary:
    with _name_in_errors("vocabulary"):
        try:
            return make_vocab_from_params(params.duplicate(), serialization_dir)
        except OSError as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigurationError(
                f"The data of the vocabulary could not be read: {reason}. Use an existing "
                'vocabulary: -o \'{"vocabulary": {"type": "from_files", "directory": '
                '"out/vocabulary"}}\', or {"type": "empty"} if no layer depends on its size.'
            ) from error


def _construct(params: Params, vocabulary: Vocabulary, serialization_dir: str) -> Model:
    model_params = params.duplicate().pop("model")
    if isinstance(model_params, Params):
        remove_weights_related_keys_from_params(model_params)
    return Model.from_params(
        params=model_params, vocab=vocabulary, serialization_dir=serialization_dir
    )


@contextmanager
def _on_meta_device() -> Iterator[None]:
    """
    Context manager that constructs tensors on the meta device.

    Works around PyTorch 2.14.1: `torch.FloatTensor(num, dimension)` ignores the default device, and
    is on the CPU. AllenNLP's `Embedding` constructs its weight with it. Gone when it is on the
    default device. [#126533](https://github.com/pytorch/pytorch/issues/126533)
    """
    float_tensor = torch.FloatTensor

    class SizedOnMeta(type):
        """
        Metaclass for a type, because modules imported in this context evaluate `torch.FloatTensor |
        None`.
        """

        @override
        def __call__(cls, *args: Any) -> torch.Tensor:
            is_size = all(isinstance(arg, int) for arg in args)
            return torch.empty(*args) if is_size else float_tensor(*args)

        @override
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, float_tensor)

    with (
        torch.device("meta"),
        mock.patch.object(torch, "FloatTensor", SizedOnMeta("FloatTensor", (), {})),
    ):
        yield


@contextmanager
def _skip_pretrained_weights() -> Iterator[None]:
    """
    Context manager that passes `load_weights=False`, AllenNLP's own argument, for all pretrained
    transformers in a model.
    """
    get = cached_transformers.get
    from_pretrained = TransformerModule.from_pretrained_module.__func__  # type: ignore[attr-defined]

    def get_without_weights(*args: Any, **kwargs: Any) -> Any:
        return get(*args, **_without_weights(kwargs))

    def from_pretrained_without_weights(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return from_pretrained(cls, *args, **_without_weights(kwargs))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(cached_transformers, "get", get_without_weights))
        # Models constructed here and elsewhere can't share this cache.
        patches.enter_context(mock.patch.object(cached_transformers, "_model_cache", {}))
        patches.enter_context(
            mock.patch.object(
                TransformerModule,
                "from_pretrained_module",
                classmethod(from_pretrained_without_weights),
            )
        )
        token = _is_without_weights.set(True)
        patches.callback(_is_without_weights.reset, token)
        yield


def _without_weights(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    return {**kwargs, "load_weights": False}
