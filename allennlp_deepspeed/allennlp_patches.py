"""
Adapts AllenNLP 2.10.1 to current PyTorch. Importing this package applies all workarounds.
"""

import copy
import functools
import glob
import importlib.util
import inspect
import os
import sys
import tarfile
import uuid
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Callable, Dict, Hashable, Iterator, List, Union
from unittest import mock

import numpy as np
import torch
from allennlp.common import cached_transformers
from allennlp.common import tqdm as allennlp_tqdm
from allennlp.common.cached_transformers import TransformerSpec
from allennlp.common.util import hash_object
from allennlp.data.data_loaders import data_collator, multiprocess_data_loader
from allennlp.models import archival
from allennlp.modules.seq2vec_encoders import cnn_encoder
from allennlp.nn import util as nn_util
from allennlp.training.callbacks import WandBCallback
from allennlp.training.learning_rate_schedulers.pytorch_lr_schedulers import (
    ReduceOnPlateauLearningRateScheduler,
)
from isal import igzip
from tqdm import tqdm
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from allennlp_deepspeed import files


def apply() -> None:
    """Applies all workarounds. May be called more than once."""
    construct_reduce_on_plateau_without_verbose()
    allow_numpy_scalars_in_training_states()
    support_bf16_in_tiny_value_of_dtype()
    mask_short_texts_of_cnns_in_any_precision()
    tell_cached_transformers_apart()
    show_progress_without_widgets()
    name_runs_of_wandb()
    compress_archives_with_isal()
    archive_from_any_directory()
    share_locks_of_spawned_loader_workers()
    mask_tokens_with_the_given_probability()


def construct_reduce_on_plateau_without_verbose() -> None:
    """
    Makes "reduce_on_plateau" accept and ignore the key `verbose`.

    Works around AllenNLP 2.10.1: it passes `verbose` to PyTorch's `ReduceLROnPlateau`, which
    doesn't accept it since 2.7. Gone when "reduce_on_plateau" can be constructed.
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
    Allows `torch.load` to load NumPy scalars. By default it loads weights only.

    Works around AllenNLP 2.10.1: its training states can contain metrics that are NumPy scalars.
    PyTorch 2.6 and later doesn't load them. Gone when `torch.load` does.
    """
    reconstruct, _ = np.float64(0).__reduce__()  # its module differs between versions of NumPy
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    torch.serialization.add_safe_globals([reconstruct, np.dtype, *dtypes])


def support_bf16_in_tiny_value_of_dtype() -> None:
    """
    Makes `tiny_value_of_dtype` return the value of fp32 for bf16, which has the same range.

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


def mask_short_texts_of_cnns_in_any_precision() -> None:
    """
    Makes `CnnEncoder` have features of 0, in half precision too, where a filter is longer than the
    text: models with an encoder of characters have them for each word of one or two letters.

    Works around AllenNLP 2.10.1: if a filter is longer than its text, its `CnnEncoder` adds the
    smallest value of fp16 or bf16 to a feature, which makes the feature fp32, and sets to 0 what is
    the smallest value of fp32. The feature stays at -65504 or -3e38. Gone when it is 0 in half
    precision.
    """
    smallest = nn_util.min_value_of_dtype(torch.float32)
    cnn_encoder.min_value_of_dtype = lambda dtype: smallest  # type: ignore[attr-defined]


def tell_cached_transformers_apart() -> None:
    """
    Caches transformers by all arguments that they were loaded with.

    Works around AllenNLP 2.10.1: its cache of transformers ignores `transformer_kwargs` and
    `load_weights`. An embedder gets the transformer that an embedder with the same `model_name` but
    other arguments has loaded. Gone when two embedders with different `attn_implementation` get
    different transformers.
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
    Returns the key of a transformer in the cache of `cached_transformers`.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        All arguments of `cached_transformers.get`, by name, with the variable ones as `kwargs`.
    """
    spec = TransformerSpec(*(arguments[field] for field in TransformerSpec._fields))
    others = arguments["kwargs"]
    if not others and arguments["load_weights"]:
        return spec
    return spec, arguments["load_weights"], hash_object(others)


def show_progress_without_widgets() -> None:
    """
    Shows progress bars as text in a notebook without ipywidgets.

    Works around AllenNLP 2.10.1: in a notebook it uses tqdm's widget bars even if ipywidgets isn't
    installed, and fails with an `ImportError`. Gone when it uses `tqdm.auto`.
    """
    is_of_notebooks = allennlp_tqdm._tqdm is not tqdm
    if is_of_notebooks and importlib.util.find_spec("ipywidgets") is None:
        allennlp_tqdm._tqdm = tqdm


def name_runs_of_wandb() -> None:
    """
    Starts the runs of the callback "wandb" with an ID of our own.

    Works around AllenNLP 2.10.1: the callback calls `wandb.util.generate_id`, which wandb 0.31
    doesn't have. Gone when a run of the callback starts with the current wandb.
    """
    on_start = WandBCallback.on_start
    if hasattr(on_start, "has_id"):
        return

    @functools.wraps(on_start)
    def on_start_with_id(self: WandBCallback, *args: Any, **kwargs: Any) -> None:
        # The length of wandb's own IDs.
        self._run_id = self._run_id or uuid.uuid4().hex[:8]
        on_start(self, *args, **kwargs)

    on_start_with_id.has_id = True  # type: ignore[attr-defined]
    WandBCallback.on_start = on_start_with_id  # type: ignore[method-assign]


def compress_archives_with_isal() -> None:
    """
    Makes AllenNLP write `model.tar.gz` with ISA-L, which is several times as fast as gzip's fastest
    level at the same size. AllenNLP's own level is the slowest. The archive gets its name when it
    is complete and on disk: AllenNLP leaves a part of it there if it is killed.
    """
    archival.tarfile = SimpleNamespace(open=_open_archive)  # type: ignore[attr-defined, assignment]


@contextmanager
def _open_archive(path: str, mode: str) -> Iterator[tarfile.TarFile]:
    if mode == "w:gz":
        unfinished = f"{path}.unfinished"
        try:
            with (
                files.add_path_to_errors(unfinished),
                files.create(unfinished) as compressed,
                igzip.IGzipFile(path, "wb", fileobj=compressed) as file,
                tarfile.open(fileobj=file, mode="w") as archive,
            ):
                yield archive
        except BaseException:
            files.remove(unfinished)
            raise
        files.flush(unfinished)
        files.rename(unfinished, path)
        files.flush(os.path.dirname(os.path.abspath(path)))
    else:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            yield archive


def archive_from_any_directory() -> None:
    """
    Makes AllenNLP add the files of `include_in_archive` to the archive of any directory.

    Works around AllenNLP 2.10.1: it takes the path of the serialization directory for a pattern of
    `glob`, and finds no file in one such as `out[lr=0.1]`. Gone when its archive has them.
    """
    archival.glob = SimpleNamespace(glob=_find_in_directory)  # type: ignore[attr-defined, assignment]


def _find_in_directory(pattern: str) -> List[str]:
    """Returns the paths that match a pattern. It begins with the path of a directory."""
    directory = os.path.dirname(pattern)
    while directory and not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return glob.glob(glob.escape(directory) + pattern[len(directory) :])


def share_locks_of_spawned_loader_workers() -> None:
    """
    Gives the worker processes of data loaders a lock of their own start method.

    Works around AllenNLP 2.10.1: its data loader gives its workers a lock of the default start
    method, which can't be passed to spawned ones (`"start_method": "spawn"`) since Python 3.11.5.
    Gone when such a loader reads instances.
    """
    for name in ("_start_instance_workers", "_start_batch_workers"):
        _start_with_own_lock(name)


def _start_with_own_lock(name: str) -> None:
    start = getattr(multiprocess_data_loader.MultiProcessDataLoader, name)
    if hasattr(start, "has_own_lock"):
        return

    @functools.wraps(start)
    def start_with_own_lock(self: Any, queue: Any, ctx: Any) -> Any:
        locks = SimpleNamespace(RLock=ctx.RLock, JoinableQueue=ctx.JoinableQueue)
        with mock.patch.object(multiprocess_data_loader, "mp", locks):
            return start(self, queue, ctx)

    start_with_own_lock.has_own_lock = True  # type: ignore[attr-defined]
    setattr(multiprocess_data_loader.MultiProcessDataLoader, name, start_with_own_lock)


def mask_tokens_with_the_given_probability() -> None:
    """
    Makes the collator "language_model" pass its arguments to transformers by name.

    Works around AllenNLP 2.10.1: it passes them by position, where transformers 5 takes
    `mlm_probability` as `whole_word_mask`, and fails with the first batch. Gone when the collator
    has the `mlm_probability` that it was given.
    """

    def by_name(
        tokenizer: PreTrainedTokenizerBase, mlm: bool, mlm_probability: float
    ) -> DataCollatorForLanguageModeling:
        return DataCollatorForLanguageModeling(tokenizer, mlm=mlm, mlm_probability=mlm_probability)

    data_collator.DataCollatorForLanguageModeling = by_name  # type: ignore[misc,assignment]
