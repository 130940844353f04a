"""
Exports trained models to directories that transformers loads without AllenNLP.
"""

import logging
import os
import tarfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model
from allennlp.models.archival import extracted_archive, get_weights_path
from transformers import PreTrainedTokenizerBase

from allennlp_deepspeed import files, frozen_records
from allennlp_deepspeed.checkpoint import frozen_parameters, serialization
from allennlp_deepspeed.checkpoint.checkpoint_directory import BEST_WEIGHTS_NAME
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.offline import (
    check_archive,
    find_checkpoint,
    read_weights,
    split_checkpoint_path,
)
from allennlp_deepspeed.checkpoint.saved_config import read_config
from allennlp_deepspeed.meta_model import construct_without_weights
from allennlp_deepspeed.models import lora
from allennlp_deepspeed.models.attention.block_sparse_pretrained_transformer import (
    warn_of_dense_attention,
)
from allennlp_deepspeed.models.language_modeling import pretrained
from allennlp_deepspeed.models.language_modeling.end_tokens import set_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_DIRECTORY_NAME = "export_huggingface"
_UNFINISHED = ".unfinished"


class _TrainedModel(NamedTuple):
    """
    Weights of a training, with the directory of its config and vocabulary.

    # Parameters

    serialization_dir : `str`
        Directory with the config and the vocabulary.
    state_dict : `Dict[str, Any]`
        State of the plain model, in fp32.
    default_output_dir : `str`
    checkpoint : `str`, optional (default = `None`)
        The checkpoint that the weights are from, if they are from one.
    record : `CommitRecord`, optional (default = `None`)
        The record of that checkpoint.
    """

    serialization_dir: str
    state_dict: Dict[str, Any]
    default_output_dir: str
    checkpoint: str = ""
    record: Optional[CommitRecord] = None


def export_huggingface(
    source: str,
    output_dir: Optional[str] = None,
    epoch: Optional[int] = None,
    best: bool = False,
    module: Optional[str] = None,
    adapters_only: bool = False,
    max_shard_size: str = "5GB",
) -> str:
    """
    Writes a transformer and its tokenizer in the layout that `AutoModelForCausalLM.from_pretrained`
    (of a "causal_lm") or `AutoModel.from_pretrained` (of an encoder in a token embedder), and
    `AutoTokenizer.from_pretrained` read: weights in fp32 and in safetensors, configurations of the
    model and of generation, and the tokenizer with its chat template. LoRA adapters are merged into
    the weights.

    Runs on one CPU without a process group, in the memory of the weights; the weights of an archive
    stay on disk until they are written. If a checkpoint lacks frozen parameters, they are read from
    the source that training has read them from.

    # Parameters

    source : `str`, required.
        An archive, a serialization directory, or a checkpoint in one.
    output_dir : `str`, optional (default = `None`)
        The directory to write the files to. `None` for one next to the archive or in the
        serialization directory, whose name begins with `export_huggingface`.
    epoch : `int`, optional (default = `None`)
        The number of epochs that the checkpoint has completed, as in `export`.
    best : `bool`, optional (default = `False`)
        Whether to export the weights of the best epoch instead of the newest checkpoint's.
    module : `str`, optional (default = `None`)
        The transformer's name in the model. `None` for the only one.
    adapters_only : `bool`, optional (default = `False`)
        Whether to write only the LoRA adapters, in peft's format, and the tokenizer.
    max_shard_size : `str`, optional (default = `"5GB"`)
        The maximum size of a file of weights, in KB, MB, GB or TB.

    # Returns

    `str`
        The directory with the files.

    # Raises

    `CheckpointError`
        If there is no such checkpoint, or it is damaged.
    `ConfigurationError`
        If there is no such transformer, if it can't be written in this form, or if the directory
        isn't empty.
    """
    with _load_trained_model(source, epoch, best) as trained:
        output_dir = os.path.abspath(output_dir or trained.default_output_dir)
        _check_output(output_dir)
        model = _model(trained)
        name, transformer = _transformer(model, module)
        if adapters_only:
            lora.adapted_transformers(transformer)
        else:
            _check_loadable(transformer, name)
            if lora.has_adapters(transformer):
                lora.merge_adapters(transformer)
        tokenizer = _tokenizer(trained.serialization_dir, transformer)
        if tokenizer is not None and transformer.can_generate():
            set_end_tokens(transformer, tokenizer)
        unfinished = output_dir + _UNFINISHED
        files.remove(unfinished)
        files.make_directory(unfinished)
        if adapters_only:
            lora.save_adapters(transformer, unfinished)
        else:
            transformer.save_pretrained(unfinished, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
    for name in os.listdir(unfinished):
        files.flush(os.path.join(unfinished, name))
    files.rename(unfinished, output_dir)
    files.flush(os.path.dirname(output_dir))
    warn_of_dense_attention(transformer)
    return output_dir


@contextmanager
def _load_trained_model(source: str, epoch: Optional[int], best: bool) -> Iterator[_TrainedModel]:
    if best and epoch is not None:
        raise ConfigurationError("--best exports the weights of the best epoch: remove --epoch.")
    if os.path.isfile(source):
        check_archive(source, epoch, best)
        output_dir = os.path.join(os.path.dirname(source), _DIRECTORY_NAME)
        try:
            with extracted_archive(source) as directory:
                path = get_weights_path(directory)
                if not os.path.isfile(path):
                    raise ConfigurationError(f"{source} is an archive without weights.")
                yield _TrainedModel(directory, _load_weights(path), output_dir)
        except tarfile.TarError as error:
            raise ConfigurationError(
                f"{source} is not an AllenNLP archive ({error}): pass a model.tar.gz, a "
                "serialization directory or a checkpoint."
            ) from error
        return
    if best:
        path = os.path.join(source, BEST_WEIGHTS_NAME)
        if not os.path.isfile(path):
            raise ConfigurationError(
                f"There is no {BEST_WEIGHTS_NAME} in {source}: remove --best to export the newest "
                "checkpoint, or pass the archive."
            )
        output_dir = os.path.join(source, f"{_DIRECTORY_NAME}_best")
        yield _TrainedModel(source, _load_weights(path), output_dir)
        return
    serialization_dir, point = split_checkpoint_path(source)
    checkpoint, record = find_checkpoint(serialization_dir, epoch, point)
    logger.info("Exporting the weights of %s", checkpoint)
    suffix = os.path.basename(checkpoint).removeprefix("checkpoint")
    yield _TrainedModel(
        serialization_dir,
        read_weights(checkpoint),
        os.path.join(serialization_dir, _DIRECTORY_NAME + suffix),
        checkpoint,
        record,
    )


def _load_weights(path: str) -> Dict[str, Any]:
    state_dict = serialization.load(path, mmap=True)
    if not isinstance(state_dict, dict) or not all(isinstance(name, str) for name in state_dict):
        raise CheckpointError(f"{path} contains no weights by name.")
    return state_dict


def _check_output(output_dir: str) -> None:
    """
    Checks that the output directory is missing or empty.

    # Raises

    `ConfigurationError`
        If there are files in the directory, or it isn't a directory.
    """
    if os.path.exists(output_dir) and (not os.path.isdir(output_dir) or os.listdir(output_dir)):
        raise ConfigurationError(
            f"{output_dir} exists and isn't an empty directory: remove it, or write another "
            "directory for --output."
        )


def _model(trained: _TrainedModel) -> Model:
    state_dict = trained.state_dict
    if trained.record is not None and trained.record.frozen:
        model = frozen_parameters.construct_model(trained.serialization_dir)
        state_dict = frozen_records.add_frozen_parameters(
            state_dict, model, trained.record.frozen, trained.checkpoint
        )
    elif frozen_records.RECORDS_KEY in state_dict:
        model = frozen_parameters.construct_model(trained.serialization_dir)
        state_dict = frozen_records.complete(state_dict, model)
    else:
        params = read_config(trained.serialization_dir)
        vocabulary = frozen_parameters.load_vocabulary(trained.serialization_dir, params)
        model = construct_without_weights(params, vocabulary, trained.serialization_dir)
    _assign(model, state_dict)
    return model


def _assign(model: Model, state_dict: Dict[str, Any]) -> None:
    """
    Assigns the tensors of a `state_dict` to the model. It may have only some of the names of tied
    tensors.

    # Raises

    `CheckpointError`
        If the `state_dict` is of another model.
    """
    own = model.state_dict(keep_vars=True)
    by_tensor = {id(own[name]): value for name, value in state_dict.items() if name in own}
    complete = {name: by_tensor.get(id(tensor)) for name, tensor in own.items()}
    missing = [name for name, tensor in complete.items() if tensor is None]
    unexpected = [name for name in state_dict if name not in own]
    if missing or unexpected:
        raise CheckpointError(
            f"The weights don't match the model of the config: missing {_listing(missing)}, "
            f"unexpected {_listing(unexpected)}."
        )
    try:
        # AllenNLP's method of this name has no `assign`.
        torch.nn.Module.load_state_dict(model, complete, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"The weights don't match the model of the config: {reason}"
        ) from error


def _listing(names: List[str]) -> str:
    shown = ", ".join(names[:3]) or "nothing"
    return f"{shown} and others" if len(names) > 3 else shown


def _transformer(model: Model, module: Optional[str]) -> Any:
    """Returns the name and the transformer."""
    transformers = lora.find_transformers(model)
    if not transformers:
        raise ConfigurationError(
            f"The model, a {type(model).__name__}, contains no transformers model: remove "
            "--format to export weights and an AllenNLP archive."
        )
    if module is None and len(transformers) > 1:
        raise ConfigurationError(
            f"The model contains {len(transformers)} transformers: add --module with one of "
            f"{', '.join(transformers)}."
        )
    if module is None:
        ((name, transformer),) = transformers.items()
        return name, transformer
    if module not in transformers:
        raise ConfigurationError(
            f"The model contains no transformer '{module}': write --module with one of "
            f"{', '.join(transformers)}."
        )
    return module, transformers[module]


def _check_loadable(transformer: "PreTrainedModel", name: str) -> None:
    """
    Checks that transformers would load the files as the same class of model.

    # Raises

    `ConfigurationError`
        If transformers would load the files as another class of model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    loaded: List[Any] = []
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        classes: Any = mapping.get(type(transformer.config), ())
        loaded += classes if isinstance(classes, tuple) else [classes]
    # A configuration with its own code isn't in the mappings.
    if loaded and type(transformer) not in loaded:
        raise ConfigurationError(
            f"'{name}' is a {type(transformer).__name__}, which can't be loaded by itself; a "
            f"{' or a '.join(c.__name__ for c in loaded)} can. Remove --format to export an "
            "AllenNLP archive."
        )


def _tokenizer(
    serialization_dir: str, transformer: "PreTrainedModel"
) -> Optional[PreTrainedTokenizerBase]:
    """Returns the tokenizer that training has saved, or else the one of the pretrained model."""
    from transformers import AutoTokenizer

    saved = pretrained.saved_tokenizer(serialization_dir)
    if saved is not None:
        return saved
    name = str(transformer.config.name_or_path)
    config = read_config(serialization_dir).as_dict(quiet=True)
    kwargs = _tokenizer_kwargs(config, name)
    reader = config.get("dataset_reader")
    try:
        # Of a model "from_archive", whose training saves no tokenizer.
        if isinstance(reader, dict) and reader.get("type") == "causal_lm":
            arguments = reader.get("tokenizer_kwargs") or {}
            return pretrained.load_tokenizer(reader["tokenizer"], arguments)
        return AutoTokenizer.from_pretrained(name, **kwargs)
    except (ConfigurationError, ImportError, OSError, TypeError, ValueError) as error:
        logger.warning("Exporting without a tokenizer: %s", error)
        return None


def _tokenizer_kwargs(config: Dict[str, Any], model_name: str) -> Dict[str, Any]:
    """
    Returns the arguments with which the training's reader loads the tokenizer of this pretrained
    model: those of its `tokenizer`, or of an indexer if the tokenizer is of another model.
    """
    reader = config.get("dataset_reader")
    reader = reader if isinstance(reader, dict) else {}
    for tokenizer in _parameters_with(model_name, reader.get("tokenizer")):
        return tokenizer.get("tokenizer_kwargs") or {}
    found = (
        parameters["tokenizer_kwargs"]
        for parameters in _parameters_with(model_name, reader)
        if parameters.get("tokenizer_kwargs")
    )
    return next(found, {})


def _parameters_with(model_name: str, config: Any) -> Iterator[Dict[str, Any]]:
    """Yields the sections of a config that name this pretrained model."""
    if isinstance(config, dict):
        if config.get("model_name") == model_name:
            yield config
        config = list(config.values())
    if isinstance(config, list):
        for value in config:
            yield from _parameters_with(model_name, value)
