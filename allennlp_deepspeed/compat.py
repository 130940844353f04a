"""
What today's PyTorch breaks in AllenNLP 2.10.1, mended. Importing this package applies it.
"""

import copy
import functools
import importlib.util
import inspect
import sys
import uuid
import warnings
from typing import Any, Callable, Dict, Hashable, List, Union
from unittest import mock

import numpy as np
import torch
from allennlp.common import cached_transformers
from allennlp.common import tqdm as allennlp_tqdm
from allennlp.common.cached_transformers import TransformerSpec
from allennlp.common.util import hash_object
from allennlp.nn import util as nn_util
from allennlp.training.callbacks import WandBCallback
from allennlp.training.learning_rate_schedulers.pytorch_lr_schedulers import (
    ReduceOnPlateauLearningRateScheduler,
)
from tqdm import tqdm


def apply() -> None:
    """May be called more than once."""
    construct_reduce_on_plateau_without_verbose()
    allow_numpy_scalars_in_training_states()
    support_bf16_in_tiny_value_of_dtype()
    tell_cached_transformers_apart()
    hide_deprecations_of_renamed_functions()
    show_progress_without_widgets()
    name_runs_of_wandb()


def construct_reduce_on_plateau_without_verbose() -> None:
    """
    The key is still taken from a config, and means nothing.

    Works around AllenNLP 2.10.1: it passes `verbose` on to PyTorch's `ReduceLROnPlateau`, which
    since 2.7 doesn't take it. Gone when "reduce_on_plateau" can be constructed.
    """

    def __init__(
        self: ReduceOnPlateauLearningRateScheduler,
        optimizer: torch.optim.Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool = False,
        threshold_mode: str = "rel",
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_lr: Union[float, List[float]] = 0,
        eps: float = 1e-8,
    ) -> None:
        lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            mode=mode,  # type: ignore[arg-type]
            factor=factor,
            patience=patience,
            threshold_mode=threshold_mode,  # type: ignore[arg-type]
            threshold=threshold,
            cooldown=cooldown,
            min_lr=min_lr,  # type: ignore[arg-type]
            eps=eps,
        )
        super(ReduceOnPlateauLearningRateScheduler, self).__init__(lr_scheduler)  # type: ignore[arg-type]

    ReduceOnPlateauLearningRateScheduler.__init__ = __init__  # type: ignore[method-assign]


def allow_numpy_scalars_in_training_states() -> None:
    """
    `torch.load` now loads weights only, unless told what else is harmless.

    Works around AllenNLP 2.10.1: its training states can hold metrics that are NumPy scalars, which
    PyTorch doesn't load since 2.6. Gone when `torch.load` does.
    """
    reconstruct, _ = np.float64(0).__reduce__()  # has moved from module to module between versions
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    torch.serialization.add_safe_globals([reconstruct, np.dtype, *dtypes])


def support_bf16_in_tiny_value_of_dtype() -> None:
    """
    bf16 has the range of fp32, so that it takes the same value.

    Works around AllenNLP 2.10.1: its masks refuse bf16. Gone when `tiny_value_of_dtype` has a value
    for it.
    """
    original = nn_util.tiny_value_of_dtype

    def tiny_value_of_dtype(dtype: torch.dtype) -> float:
        return original(torch.float32 if dtype == torch.bfloat16 else dtype)

    if original.__module__ == nn_util.__name__:
        tiny_value_of_dtype.__doc__ = original.__doc__
        for module in list(sys.modules.values()):  # some have imported the function itself
            if getattr(module, "tiny_value_of_dtype", None) is original:
                module.tiny_value_of_dtype = tiny_value_of_dtype  # type: ignore[attr-defined]


def tell_cached_transformers_apart() -> None:
    """
    Transformers are kept by all arguments that they have been loaded with.

    Works around AllenNLP 2.10.1: its cache of transformers ignores `transformer_kwargs` and
    `load_weights`, so that an embedder gets what another with the same `model_name` has loaded.
    Gone when two with different `attn_implementation` have these.
    """
    get = cached_transformers.get
    if not hasattr(get, "tells_transformers_apart"):
        cached_transformers.get = _by_all_arguments(get)


def _by_all_arguments(get: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(get)

    @functools.wraps(get)
    def get_by_all_arguments(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        key: Any = transformer_key(call.arguments)
        if isinstance(key, TransformerSpec):
            return get(*args, **kwargs)
        kept: Dict[Any, Any] = cached_transformers._model_cache
        if key not in kept:
            make_copy, call.arguments["make_copy"] = call.arguments["make_copy"], False
            with mock.patch.object(cached_transformers, "_model_cache", {}):
                kept[key] = get(*call.args, **call.kwargs)
            call.arguments["make_copy"] = make_copy
        return copy.deepcopy(kept[key]) if call.arguments["make_copy"] else kept[key]

    get_by_all_arguments.tells_transformers_apart = True  # type: ignore[attr-defined]
    return get_by_all_arguments


def transformer_key(arguments: Dict[str, Any]) -> Hashable:
    """
    What `cached_transformers` keeps a transformer under.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        All of `cached_transformers.get`, by name, with `kwargs` for the others.
    """
    spec = TransformerSpec(*(arguments[field] for field in TransformerSpec._fields))
    others = arguments["kwargs"]
    if not others and arguments["load_weights"]:
        return spec
    return spec, arguments["load_weights"], hash_object(others)


def hide_deprecations_of_renamed_functions() -> None:
    """
    Ignores PyTorch's warnings of deprecated functions that AllenNLP and DeepSpeed call.

    Works around AllenNLP 2.10.1 and DeepSpeed 0.19.8: the former enters `torch.cuda.amp.autocast`
    for every validation batch, the latter calls two deprecated functions of `torch.distributed` for
    every parameter. Gone when both call the new ones.
    """
    for name in (r"torch\.distributed\.", r"torch\.cuda\.amp\."):
        warnings.filterwarnings("ignore", f"`{name}.*` is deprecated", category=FutureWarning)


def show_progress_without_widgets() -> None:
    """
    In a notebook without ipywidgets a bar is a line of text, as elsewhere.

    Works around AllenNLP 2.10.1: in a notebook it asks tqdm for bars made of widgets, whether
    ipywidgets are there or not, and ends with an `ImportError` where they aren't. Gone when it asks
    for `tqdm.auto`.
    """
    is_of_notebooks = allennlp_tqdm._tqdm is not tqdm
    if is_of_notebooks and importlib.util.find_spec("ipywidgets") is None:
        allennlp_tqdm._tqdm = tqdm


def name_runs_of_wandb() -> None:
    """
    The callback "wandb" begins a run with an ID of its own.

    Works around AllenNLP 2.10.1: the callback calls `wandb.util.generate_id`, which wandb 0.31
    doesn't have. Gone when a run of the callback begins with today's wandb.
    """
    on_start = WandBCallback.on_start
    if hasattr(on_start, "has_id"):
        return

    @functools.wraps(on_start)
    def on_start_with_id(self: WandBCallback, *args: Any, **kwargs: Any) -> None:
        # As long as wandb's own.
        self._run_id = self._run_id or uuid.uuid4().hex[:8]
        on_start(self, *args, **kwargs)

    on_start_with_id.has_id = True  # type: ignore[attr-defined]
    WandBCallback.on_start = on_start_with_id  # type: ignore[method-assign]
