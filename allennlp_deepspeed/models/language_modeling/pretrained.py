"""
Loads transformers and tokenizers, and saves the files that an archive needs to be opened anywhere.
"""

import copy
import functools
import json
import logging
import os
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    MutableMapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
)
from weakref import WeakKeyDictionary

import torch
import transformers
from allennlp.common.checks import ConfigurationError
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from allennlp_deepspeed import files
from allennlp_deepspeed.config.key_validation import did_you_mean
from allennlp_deepspeed.frozen_records import PretrainedWeightsError
from allennlp_deepspeed.meta_model import is_without_weights
from allennlp_deepspeed.models.language_modeling.example_sizes import ExampleSizes, ModelLimits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Next to the vocabulary, which AllenNLP archives completely. It doesn't read names with a leading
# dot as namespaces.
_SAVED = os.path.join("vocabulary", ".transformer")

# Next to a saved tokenizer: the source that its reader loaded it from.
_SOURCE = "source.json"

# Arguments about the location of a tokenizer's files, which don't apply to saved ones.
_FILE_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "gguf_file",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)

# The arguments of `from_pretrained` that `from_config` accepts; others are about files.
_CONFIG_ARGUMENTS = ("attn_implementation", "dtype", "trust_remote_code")

VERSION = transformers.__version__

_MODELS = "https://huggingface.co/docs/transformers"

Directory = Union[str, os.PathLike, None]


def load_transformer(
    model_name: Optional[str],
    config: Optional[Dict[str, Any]],
    arguments: Dict[str, Any],
    load_weights: bool,
    serialization_dir: Directory,
    needs_all_weights: bool = False,
) -> "PreTrainedModel":
    """
    Loads or constructs a transformer.

    # Parameters

    model_name : `str`, required.
        A name, a directory or a GGUF file; `None` if there is a `config`.
    config : `Dict[str, Any]`, required.
        The configuration, with its `model_type`, of a model with random weights.
    arguments : `Dict[str, Any]`, required.
        Further arguments of `AutoModelForCausalLM.from_pretrained`. The default `dtype` is fp32.
    load_weights : `bool`, required.
        Whether to load pretrained weights.
    serialization_dir : `Union[str, PathLike]`, required.
        If weights aren't loaded, the configuration saved in this directory is used if there is one.
    needs_all_weights : `bool`, optional (default = `False`)
        Whether to refuse pretrained weights that lack some, which would be initialized randomly.

    # Raises

    `PretrainedWeightsError`
        If there is no such model.
    `ConfigurationError`
        If `config` has no known `model_type`, or the pretrained weights lack some.
    """
    if config is not None:
        _check_model_type(config)
    load_weights = load_weights and not is_without_weights()
    arguments = _with_dtype(arguments)
    saved = saved_files(serialization_dir, "config.json")
    try:
        if load_weights and config is None:
            return _load_pretrained(model_name, arguments, needs_all_weights)
        if saved is not None and not load_weights:
            loaded = transformers.AutoConfig.from_pretrained(saved)
            # Adapters store the model's name, not the directory it was saved in.
            loaded.name_or_path = model_name or ""
        elif config is not None:
            # The end-of-sequence token is unset unless the config names one: the default of its
            # class is for another tokenizer.
            loaded = transformers.AutoConfig.for_model(**{"eos_token_id": None, **config})
        else:
            name, file_argument = _name_and_file(model_name)
            file_arguments = {k: v for k, v in arguments.items() if k != "dtype"}
            loaded = transformers.AutoConfig.from_pretrained(
                name, **file_argument, **file_arguments
            )
        arguments = {
            k: v for k, v in arguments.items() if config is not None or k in _CONFIG_ARGUMENTS
        }
        constructed = transformers.AutoModelForCausalLM.from_config(loaded, **arguments)
    except (
        AttributeError,
        ImportError,
        OSError,
        TypeError,
        ValueError,
        StrictDataclassError,
    ) as error:
        key = "config" if model_name is None else "model_name"
        raise PretrainedWeightsError(
            f"'model.{key}' is {model_name if config is None else config!r}, from which "
            f"transformers {VERSION} can't load a causal language model: {error}"
        ) from error
    if saved is not None and saved_files(serialization_dir, "generation_config.json"):
        constructed.generation_config = transformers.GenerationConfig.from_pretrained(saved)
    return constructed


def _load_pretrained(
    model_name: Optional[str], arguments: Dict[str, Any], needs_all_weights: bool
) -> "PreTrainedModel":
    name, file_argument = _name_and_file(model_name)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    pretrained, report = load(name, output_loading_info=True, **file_argument, **arguments)
    random = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if needs_all_weights and random:
        raise ConfigurationError(
            f"'model.save_adapters_only' is true, but '{model_name}' lacks {', '.join(random)}. "
            "These weights are initialized randomly, and would be lost: remove the key."
        )
    return _remove_quantization_marks(pretrained) if file_argument else pretrained


def load_tokenizer(name: str, arguments: Dict[str, Any]) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer.

    # Parameters

    name : `str`, required.
        A name, a directory or a GGUF file.
    arguments : `Dict[str, Any]`, required.
        Further arguments of `AutoTokenizer.from_pretrained`.

    # Raises

    `ConfigurationError`
        If there is no such tokenizer.
    """
    try:
        directory, file_argument = _name_and_file(name)
        # A copy for each caller, since callers set attributes of it.
        return copy.deepcopy(
            _load_cached(directory, json.dumps({**file_argument, **arguments}, sort_keys=True))
        )
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"transformers {VERSION} can't load a tokenizer from '{name}': {error}"
        ) from error


def load_reader_tokenizer(
    name: str, arguments: Dict[str, Any], serialization_dir: Directory
) -> PreTrainedTokenizerBase:
    """
    Returns the tokenizer of a reader: the saved one, if there is one. It is archived with the
    model, which is constructed after the reader.

    # Parameters

    name : `str`, required.
        As for `load_tokenizer`.
    arguments : `Dict[str, Any]`, required.
        As for `load_tokenizer`.
    serialization_dir : `Union[str, PathLike]`, required.

    # Raises

    `ConfigurationError`
        If there is no such tokenizer, or if it differs from the saved one or from that of another
        reader of the same run.
    """
    source = _Source(name, arguments)
    if saved_files(serialization_dir, "tokenizer_config.json"):
        loaded = _load_saved_tokenizer(source, serialization_dir)
    else:
        loaded = load_tokenizer(name, arguments)
    if serialization_dir is not None:
        directory = os.path.realpath(serialization_dir)
        other = _find_reader_tokenizer(serialization_dir)
        if other is not None and _tokenization_state(other) != _tokenization_state(loaded):
            other_source = _readers[other].source
            raise ConfigurationError(
                f"One reader has {source}, and another {other_source}, but an archive has one "
                "tokenizer: write the same 'tokenizer' and 'tokenizer_kwargs' in 'dataset_reader' "
                "and 'validation_dataset_reader'."
            )
        _readers[loaded] = _Reader(directory, source, ExampleSizes())
    return loaded


def example_sizes(reader_tokenizer: PreTrainedTokenizerBase) -> Optional[ExampleSizes]:
    """
    Returns the object that collects the sizes of a reader's examples, or `None` for a reader
    without a serialization directory, whose model isn't known.
    """
    reader = _readers.get(reader_tokenizer)
    return None if reader is None else reader.example_sizes


def compare_examples(serialization_dir: Directory, transformer: "PreTrainedModel") -> None:
    """
    Compares a model with the examples that readers of the same run have read and will read.

    # Raises

    `ConfigurationError`
        If an example exceeds the model's sizes.
    """
    if serialization_dir is None:
        return
    for _, reader in _readers_of(serialization_dir):
        reader.example_sizes.compare(ModelLimits.from_model(transformer))


def resize_embeddings(transformer: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase) -> range:
    """
    Adds embeddings for all tokens of a tokenizer that the model has none for. They are initialized
    with the mean of the others, in the output layer too.

    # Returns

    `range`
        The tokens that have been added.
    """
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    num_embeddings = ModelLimits.from_model(transformer).num_embeddings
    if num_tokens <= num_embeddings:
        return range(0)
    transformer.resize_token_embeddings(num_tokens, mean_resizing=False)
    layers = [transformer.get_input_embeddings(), transformer.get_output_embeddings()]
    with torch.no_grad():
        for weight in {id(layer.weight): layer.weight for layer in layers if layer}.values():
            # In fp64 it is the same on other machines, whose archives may lack frozen weights.
            weight[num_embeddings:] = weight[:num_embeddings].mean(dim=0, dtype=torch.float64)
    return range(num_embeddings, num_tokens)


def tokenizer_to_save(
    name: Optional[str], model_name: Optional[str], serialization_dir: Directory
) -> Optional[PreTrainedTokenizerBase]:
    """
    Returns the tokenizer to archive.

    # Parameters

    name : `str`, required.
        The value of `model.tokenizer`, or `None`.
    model_name : `str`, required.
        The model whose tokenizer is used if there is neither a reader nor a `name`.
    serialization_dir : `Union[str, PathLike]`, required.

    # Returns

    `Optional[PreTrainedTokenizerBase]`
        The reader's tokenizer if there is one. `None` if there is nothing to save, or it has been
        saved.

    # Raises

    `ConfigurationError`
        If `model.tokenizer` differs from the reader's tokenizer.
    """
    if serialization_dir is None or saved_files(serialization_dir, "config.json"):
        return None
    reader_tokenizer = _find_reader_tokenizer(serialization_dir)
    if reader_tokenizer is not None:
        source = _readers[reader_tokenizer].source
        if name not in (None, source.name):
            named = load_tokenizer(str(name), source.arguments)
            if _tokenization_state(named) != _tokenization_state(reader_tokenizer):
                raise ConfigurationError(
                    f"'model.tokenizer' is '{name}', but the reader's tokenizer is {source}: "
                    "remove 'model.tokenizer', and the archive gets the reader's."
                )
        return reader_tokenizer
    if name is not None:
        return load_tokenizer(name, {})
    if model_name is None:
        return None
    try:
        return load_tokenizer(model_name, {})
    except ConfigurationError as error:
        logger.warning("The archive has no tokenizer: %s", error)
        return None


def saved_tokenizer(serialization_dir: Directory) -> Optional[PreTrainedTokenizerBase]:
    """Returns the saved tokenizer with its reader's arguments, or `None`."""
    directory = saved_files(serialization_dir, "tokenizer_config.json")
    if directory is None:
        return None
    source = _read_source(directory)
    return _load_from_directory(directory, {} if source is None else source.arguments)


class _Source(NamedTuple):
    """Name and arguments that a tokenizer is loaded from."""

    name: str
    arguments: Dict[str, Any]

    @override
    def __str__(self) -> str:
        return f"'{self.name}' with 'tokenizer_kwargs' {json.dumps(self.arguments)}"


class _Reader(NamedTuple):
    """Information about a reader for its model."""

    serialization_dir: str
    source: _Source
    example_sizes: ExampleSizes


# The readers of this process by their tokenizers. A model, whose archive contains the reader's
# tokenizer, isn't passed its reader.
_readers: MutableMapping[PreTrainedTokenizerBase, _Reader] = WeakKeyDictionary()


def _readers_of(serialization_dir: Directory) -> List[Tuple[PreTrainedTokenizerBase, _Reader]]:
    assert serialization_dir is not None
    wanted = os.path.realpath(serialization_dir)
    return [item for item in list(_readers.items()) if item[1].serialization_dir == wanted]


def _find_reader_tokenizer(serialization_dir: Directory) -> Optional[PreTrainedTokenizerBase]:
    return next((each for each, _ in _readers_of(serialization_dir)), None)


def _load_saved_tokenizer(source: _Source, serialization_dir: Directory) -> PreTrainedTokenizerBase:
    """Returns the saved tokenizer if this source produces the same tokens."""
    directory = saved_files(serialization_dir, "tokenizer_config.json")
    assert directory is not None
    saved_source = _read_source(directory)
    if saved_source is None or saved_source == source:
        return _load_from_directory(directory, source.arguments)
    saved = _load_from_directory(directory, saved_source.arguments)
    try:
        wanted = load_tokenizer(*source)
    except ConfigurationError:
        # There is no such tokenizer where the archive is opened.
        wanted = _load_from_directory(directory, source.arguments)
    if _tokenization_state(wanted) != _tokenization_state(saved):
        raise ConfigurationError(
            f"The reader's tokenizer is {source}, but the model was trained with {saved_source}: "
            "write these values as 'tokenizer' and 'tokenizer_kwargs' of the reader."
        )
    return saved


def _load_from_directory(directory: str, arguments: Dict[str, Any]) -> PreTrainedTokenizerBase:
    arguments = {key: value for key, value in arguments.items() if key not in _FILE_ARGUMENTS}
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, **arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"transformers {VERSION} can't load the tokenizer of the archive: {error}"
        ) from error


def _read_source(directory: str) -> Optional[_Source]:
    """
    Returns the source of a saved tokenizer, or `None` if it was saved before there was such a file,
    or without a reader.
    """
    path = os.path.join(directory, _SOURCE)
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return _Source(**json.load(file))


def _save_tokenizer(directory: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Saves a tokenizer and its source.

    # Raises

    `ConfigurationError`
        If loading it would return a different tokenizer.
    """
    tokenizer.save_pretrained(directory)
    reader = _readers.get(tokenizer)
    if reader is None:
        return
    source = reader.source
    with open(os.path.join(directory, _SOURCE), "w") as file:
        json.dump(source._asdict(), file)
    loaded = _load_from_directory(directory, source.arguments)
    if _tokenization_state(loaded) != _tokenization_state(tokenizer):
        raise ConfigurationError(
            f"The reader's tokenizer, {source}, gives other tokens after saving and loading: call "
            "its 'save_pretrained' with a directory, and write that directory as 'tokenizer' of "
            "the reader, without 'tokenizer_kwargs'."
        )


def _tokenization_state(tokenizer: PreTrainedTokenizerBase) -> Dict[str, Any]:
    """
    Returns the state that determines a tokenizer's tokens, wherever the tokenizer was loaded from.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: Dict[str, Any] = (
        tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    )
    if backend is not None:
        # Arguments of the last call.
        state.update(truncation=None, padding=None)
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    return {"state": state, "special": special, "template": tokenizer.chat_template}


@functools.lru_cache(maxsize=4)
def _load_cached(name: str, arguments: str) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer once for the reader and the model of a process: from a GGUF file it takes
    seconds.
    """
    return transformers.AutoTokenizer.from_pretrained(name, **json.loads(arguments))


def save(
    serialization_dir: Directory,
    model: "PreTrainedModel",
    tokenizer: Optional[PreTrainedTokenizerBase],
) -> None:
    """
    Saves a model's configuration and tokenizer unless they have been saved. Any rank, or all ranks,
    may call it.

    # Raises

    `ConfigurationError`
        If loading the tokenizer would return a different one.
    """
    if serialization_dir is None:
        return
    directory = os.path.join(serialization_dir, _SAVED)
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if os.path.isdir(directory):
            return
        unfinished = f"{directory}.unfinished"
        # Left by a failed run.
        files.remove(unfinished)
        model.config.save_pretrained(unfinished)
        if model.generation_config is not None:
            # A model's file may contain values that newer releases of transformers refuse.
            model.generation_config.save_pretrained(unfinished)
        if tokenizer is not None:
            _save_tokenizer(unfinished, tokenizer)
        os.rename(unfinished, directory)


def saved_files(serialization_dir: Directory, name: str) -> Optional[str]:
    """Returns the directory of the saved files, or `None` if it has no file of this name."""
    if serialization_dir is None:
        return None
    directory = os.path.join(serialization_dir, _SAVED)
    return directory if os.path.isfile(os.path.join(directory, name)) else None


def _check_model_type(config: Dict[str, Any]) -> None:
    if "model_type" not in config:
        raise ConfigurationError(
            "'model.config' has no 'model_type': write the type of a transformers model, such as "
            '"llama".'
        )
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        known = list(transformers.CONFIG_MAPPING)
        raise ConfigurationError(
            f"'model.config.model_type' is '{config['model_type']}', which transformers {VERSION} "
            f"don't have: {did_you_mean(config['model_type'], known, _MODELS)}"
        )


def _name_and_file(name: Optional[str]) -> Tuple[str, Dict[str, str]]:
    """Returns for a single-file model its directory, and the argument that names the file."""
    assert name is not None
    if not name.endswith(".gguf"):
        return name, {}
    directory, file = os.path.split(name)
    return directory or os.curdir, {"gguf_file": file}


def _remove_quantization_marks(model: "PreTrainedModel") -> "PreTrainedModel":
    """Removes the quantization attributes of a model from a GGUF file."""
    # Loading dequantizes its weights, but it is still marked as quantized.
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    return model


def _with_dtype(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Sets `dtype`, to fp32 unless `dtype` or its former name `torch_dtype` is given."""
    arguments = dict(arguments)
    given = [arguments.pop(key) for key in ("dtype", "torch_dtype") if key in arguments]
    dtype = given[0] if given else torch.float32
    if isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigurationError(
                f"'model.transformer_kwargs.dtype' is '{dtype}': write \"float32\", \"bfloat16\", "
                '"float16" or "auto".'
            )
        dtype = getattr(torch, dtype)
    return {**arguments, "dtype": dtype}
