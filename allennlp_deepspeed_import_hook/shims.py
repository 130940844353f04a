"""
Context managers that give AllenNLP, and its library allennlp-models, the APIs that transformers 5,
huggingface_hub 1 and other libraries have removed. Each surrounds the execution of one module.

Works around AllenNLP 2.10.1: it is written for transformers 4 and huggingface_hub 0. Since then
classes, methods of tokenizers, the precision of loaded models and names of files have changed. Gone
when it can be imported with the current versions, and its "pretrained_transformer" tokenizer,
indexer and embedder and the modules of `allennlp.modules.transformer` work.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional
from unittest import mock

_PACKAGE = "allennlp_deepspeed"
_SAFETENSORS = "model.safetensors"
# It takes long to import, and a command may not need it.
_MODELS = "transformers.modeling_utils"


@contextmanager
def uncompared_signatures(module: ModuleType) -> Iterator[None]:
    """
    Lets `@overrides` decorate methods that override others with different arguments, such as
    `text_to_instance`, as AllenNLP's guide taught it with overrides 3.1.0.

    In a class of AllenNLP's kind, a method that overrides none gives a warning: AllenNLP may have
    dropped what it overrode.

    Works around overrides 7.7.0: it compares signatures when a class is defined, as it does since
    version 5, and raises a `TypeError` in the readers of most projects. Gone when it doesn't.
    """
    with suppress(ImportError):
        decorator: Any = importlib.import_module("overrides.overrides")
        if hasattr(decorator, "ensure_signature_is_compatible"):
            decorator.ensure_signature_is_compatible = _accept_signature
        if hasattr(decorator, "_get_base_classes"):
            get = decorator._get_base_classes
            decorator._get_base_classes = functools.partial(_bases_with_the_method, get)
    yield


def _accept_signature(*args: Any) -> None:
    """Compares nothing."""


def _bases_with_the_method(get: Any, frame: Any, namespace: Dict[str, Any]) -> List[type]:
    """Returns the bases of a class, or of AllenNLP's kind one made up if none has the method."""
    bases: List[type] = get(frame, namespace)
    method = sys._getframe(1).f_locals["method"]
    kinds = [kind for base in bases for kind in getattr(base, "__mro__", ())]
    if any(hasattr(base, method.__name__) for base in bases) or not any(
        kind.__module__.startswith("allennlp.") for kind in kinds
    ):
        return bases
    logging.getLogger(__name__).warning(
        "%s is under @overrides, but AllenNLP no longer has or calls a method of that name",
        method.__qualname__,
    )
    return [type("Former", (), {method.__name__: method})]


# Modules that take long to import, by the module that imports them whenever AllenNLP is imported.
_LATE = {
    "allennlp.fairness.bias_direction": "sklearn",
    "allennlp.fairness.bias_mitigators": "sklearn",
    "allennlp.fairness.fairness_metrics": "scipy.stats",
    "allennlp.modules.transformer.activation_layer": "transformers.models.bert.modeling_bert",
    "allennlp.training.metrics.auc": "sklearn",
    "allennlp.training.metrics.evalb_bracketing_scorer": "nltk",
    "allennlp.training.metrics.spearman_correlation": "scipy.stats",
    "torchvision.ops.roi_align": "torch._dynamo.utils",
    "transformers.trainer_pt_utils": "transformers.integrations.deepspeed",
    "transformers.trainer_utils": "peft",
}


@contextmanager
def late_imports(module: ModuleType) -> Iterator[None]:
    """
    Has AllenNLP import `_LATE` when they are used, because most programs use none of them, and they
    take as long as the rest. Other programs import them as before.
    """
    import allennlp_deepspeed_import_hook as hook

    hook.SHIMS.update(dict.fromkeys(_LATE, "late_import"))
    yield


@contextmanager
def late_import(module: ModuleType) -> Iterator[None]:
    """Runs a module with a stand-in for the one that it imports late."""
    late = _LATE[module.__name__]
    top, *_ = late.split(".")
    # Python looks for the packages of a module first.
    names = [late[:i] for i, letter in enumerate(late) if letter == "."] + [late]
    added = {name: _stand_in(name) for name in names if name not in sys.modules}
    if top in added:
        # By which it is known to be installed.
        added[top].__spec__ = importlib.util.find_spec(top)
        if added[top].__spec__ is None:
            added = {}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


def _stand_in(module_name: str) -> ModuleType:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _LateName(module_name, name)

    stand_in = ModuleType(module_name)
    stand_in.__getattr__ = get  # type: ignore[method-assign]
    return stand_in


class _LateName:
    """A name of a module that is imported when the name is called, subscripted or looked into."""

    def __init__(self, module_name: str, name: str) -> None:
        self._module_name, self._name = module_name, name

    def _value(self) -> Any:
        module = importlib.import_module(self._module_name)
        if not hasattr(module, self._name):
            return importlib.import_module(f"{self._module_name}.{self._name}")
        return getattr(module, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value()(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._value()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `typing` asks for them
            raise AttributeError(name)
        return getattr(self._value(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._module_name in sys.modules and isinstance(instance, self._value())


@contextmanager
def command_without_a_plugin_file(module: ModuleType) -> Iterator[None]:
    """
    Imports the package with AllenNLP's plugins for its own command, `allennlp deepspeed`, and for
    the list of commands. Other commands import it if a plugin file or `--include-package` names it.
    """
    yield
    plugins: Any = module
    discover_plugins = plugins.discover_plugins

    @functools.wraps(discover_plugins)
    def discover() -> Iterator[str]:
        is_command = os.path.basename(sys.argv[0]) == "allennlp" or sys.argv[0].endswith(
            os.path.join("allennlp", "__main__.py")
        )
        lists_commands = is_command and sys.argv[1:2] in ([], ["-h"], ["--help"])
        if lists_commands or sys.argv[1:2] == ["deepspeed"]:
            importlib.import_module(_PACKAGE)
        yield from discover_plugins()

    plugins.discover_plugins = discover


@contextmanager
def package_of_the_trainer(module: ModuleType) -> Iterator[None]:
    """
    Refuses a config with the trainer or the train loop of the package if that isn't imported, which
    AllenNLP reports after it has read the data. The package replaces this check by its own.
    """
    yield
    command: Any = module
    train_model = command.train_model

    @functools.wraps(train_model)
    def checked_train_model(params: Any, *args: Any, **kwargs: Any) -> Any:
        included = [*args, *kwargs.values()]
        if not any(isinstance(value, list) and _PACKAGE in value for value in included):
            _check_imported(params)
        return train_model(params, *args, **kwargs)

    checked_train_model.without_package = train_model  # type: ignore[attr-defined]
    command.train_model = checked_train_model


@contextmanager
def package_without_its_modules(module: ModuleType) -> Iterator[None]:
    """
    Has `--include-package` import the package alone, which registers the names of its modules
    itself. AllenNLP imports all modules of a package, and meanwhile modules of the user that have
    the names of its folders.
    """
    yield
    util: Any = module
    import_with_submodules = util.import_module_and_submodules

    @functools.wraps(import_with_submodules)
    def import_included(package_name: str, *args: Any, **kwargs: Any) -> None:
        if package_name.partition(".")[0] == _PACKAGE:
            with util.push_python_path("."):
                importlib.import_module(package_name)
            return
        try:
            import_with_submodules(package_name, *args, **kwargs)
        except ModuleNotFoundError as error:
            is_command = sys._getframe(1).f_globals.get("__name__") == "allennlp.commands"
            if not is_command or not f"{package_name}.".startswith(f"{error.name}."):
                raise
            sys.exit(_describe_missing_package(package_name))

    util.import_module_and_submodules = import_included


def _describe_missing_package(name: str) -> str:
    import difflib

    names = [entry.removesuffix(".py") for entry in os.listdir()]
    similar = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {similar[0]}?" if similar else "start the command in the folder above it"
    return f"--include-package {name}: neither {os.getcwd()} nor the environment has it; {hint}"


@contextmanager
def checkpoints_as_archives(module: ModuleType) -> Iterator[None]:
    """
    Lets `allennlp evaluate`, `allennlp predict` and `load_archive` read a checkpoint of this
    package: its weights are exported to a temporary archive.
    """
    yield
    archival: Any = module
    load_archive = archival.load_archive

    @functools.wraps(load_archive)
    def load_exported(archive_file: Any, *args: Any, **kwargs: Any) -> Any:
        if not os.path.isfile(os.path.join(archive_file, "commit.json")):
            return load_archive(archive_file, *args, **kwargs)
        import tempfile

        from allennlp_deepspeed.checkpoint.export import ARCHIVE_NAME, export
        from allennlp_deepspeed_import_hook import temporary_directory

        with tempfile.TemporaryDirectory(dir=temporary_directory.path()) as directory:
            export(os.fspath(archive_file), output_dir=directory)
            return load_archive(os.path.join(directory, ARCHIVE_NAME), *args, **kwargs)

    archival.load_archive = load_exported


def _check_imported(params: Any) -> None:
    from allennlp.commands.train import TrainModel
    from allennlp.common.checks import ConfigurationError
    from allennlp.training import Trainer

    trainer = params.get("trainer")
    types: Any = {
        "trainer.type": (
            Trainer,
            trainer if isinstance(trainer, str) else (trainer or {}).get("type"),
        ),
        "type": (TrainModel, params.get("type")),
    }
    for key, (kind, value) in types.items():
        # Another package may have a class of this name.
        if value == "deepspeed" and value not in kind.list_available():
            raise ConfigurationError(
                f"'{key}' is \"deepspeed\", but {_PACKAGE} isn't imported: add --include-package "
                f"{_PACKAGE} to the command, or import it before `train_model`."
            )


@contextmanager
def former_classes_of_the_hub(module: ModuleType) -> Iterator[None]:
    """
    Provides `HfFolder` and `Repository` as stand-ins while AllenNLP imports them. AllenNLP's
    `push-to-hf`, which uses them, has not worked with any version of the hub for years, and raises
    an error that explains it.
    """
    import huggingface_hub

    with ExitStack() as stack:
        for name in ("HfFolder", "Repository"):
            stand_in = type(name, (RemovedHubClass,), {})
            stack.enter_context(mock.patch.object(huggingface_hub, name, stand_in, create=True))
        yield


class RemovedHubClass:
    """Stand-in for a class that `push-to-hf` uses."""

    @staticmethod
    def get_token() -> str:
        raise RuntimeError(
            "AllenNLP's 'push-to-hf' needs huggingface_hub<0.10. Upload the archive with "
            "'hf upload', or use huggingface_hub.HfApi().upload_folder."
        )


@contextmanager
def former_transformers(module: ModuleType) -> Iterator[None]:
    """
    Restores how transformers 4 loaded models: in fp32 unless `transformer_kwargs` sets a type, and
    so that they can be re-initialized. transformers 5 loads them in the type of the file, and its
    `_init_weights` skips weights that have been loaded.
    """
    import transformers

    from allennlp_deepspeed_import_hook import saved_tokenizers

    # A type in annotations, which would import all that models need.
    is_late = _MODELS not in sys.modules
    if is_late:
        transformers.PreTrainedModel = Any  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        if is_late:
            del transformers.PreTrainedModel
    module.AutoModel = AutoModelInFp32  # type: ignore[attr-defined]
    module.get_tokenizer = saved_tokenizers.as_saved(module.get_tokenizer)  # type: ignore[attr-defined]


@contextmanager
def former_tokenizers(module: ModuleType) -> Iterator[None]:
    """Restores what tokenizers, models and modules of transformers had in version 4."""
    import allennlp_deepspeed_import_hook as hook
    from allennlp_deepspeed_import_hook import former_names, former_states, former_tokenizers

    yield
    former_tokenizers.restore()
    former_names.restore()
    if _MODELS in sys.modules:
        former_states.restore(sys.modules[_MODELS])
    else:
        hook.SHIMS[_MODELS] = "former_models"


@contextmanager
def former_names(module: ModuleType) -> Iterator[None]:
    """Adds the names that a module of transformers had."""
    from allennlp_deepspeed_import_hook import former_names

    yield
    former_names.add_to(module)


@contextmanager
def former_models(module: ModuleType) -> Iterator[None]:
    """Restores the names of the module with the base class of models, and what models had."""
    from allennlp_deepspeed_import_hook import former_names, former_states

    yield
    former_names.add_to(module)
    former_states.restore(module)


class AutoModelInFp32:
    """
    The methods of `transformers.AutoModel` that AllenNLP calls, with their behaviour before version
    5.
    """

    @staticmethod
    def from_pretrained(model_name: str, **kwargs: Any) -> Any:
        import torch
        import transformers

        if "torch_dtype" not in kwargs:
            kwargs.setdefault("dtype", torch.float32)
        loaded = transformers.AutoModel.from_pretrained(model_name, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            # `parameters` would gather partitioned parameters.
            for owner in (module, *module._parameters.values(), *module._buffers.values()):
                if owner is not None:
                    vars(owner).pop("_is_hf_initialized", None)
        return loaded

    @staticmethod
    def from_config(config: Any, **kwargs: Any) -> Any:
        import torch
        import transformers

        return transformers.AutoModel.from_config(config, **{"dtype": torch.float32, **kwargs})


@contextmanager
def late_settings_of_transformers(module: ModuleType) -> Iterator[None]:
    """
    Applies what a token embedder sets in the config of a transformer that has been built.

    Works around AllenNLP 2.10.1: with `gradient_checkpointing`, "pretrained_transformer" and
    "pretrained_transformer_mismatched" recompute nothing, because transformers reads this key of
    the config while it builds a transformer. With `"last_layer_only": false` and a `sub_module`
    that has a copy of the config, as T5's, there are no hidden states. Gone when fewer elements are
    saved for the backward pass with the former, and the latter works.
    """
    yield
    embedder = module.PretrainedTransformerEmbedder  # type: ignore[attr-defined]
    construct = embedder.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Where the transformer is loaded, because the embedder may keep only a part of it.
        from allennlp.common import cached_transformers

        get = _checkpointing(cached_transformers.get, kwargs.get("gradient_checkpointing"))
        with mock.patch.object(cached_transformers, "get", get):
            construct(self, *args, **kwargs)
        if self.config.output_hidden_states and hasattr(self.transformer_model, "config"):
            self.transformer_model.config.output_hidden_states = True

    embedder.__init__ = __init__


def _checkpointing(get: Callable[..., Any], argument: Optional[bool]) -> Callable[..., Any]:
    def get_transformer(*args: Any, gradient_checkpointing: Any = None, **kwargs: Any) -> Any:
        # The former also as a part of `transformer_kwargs`.
        is_wanted = gradient_checkpointing if argument is None else argument
        transformer = get(*args, **kwargs)
        if is_wanted is not None:
            _set_gradient_checkpointing(transformer, is_wanted)
        return transformer

    return get_transformer


def _set_gradient_checkpointing(transformer: Any, is_wanted: bool) -> None:
    from allennlp.common.checks import ConfigurationError

    if not transformer.supports_gradient_checkpointing:
        if is_wanted:
            raise ConfigurationError(
                f"'gradient_checkpointing' of a token embedder can't be true: "
                f"{type(transformer).__name__} has no layers that transformers can checkpoint. "
                "Remove it, or name modules in 'trainer.activation_checkpointing'."
            )
        return
    # Former versions of transformers 5 have the second name only.
    kind = "activation" if hasattr(transformer, "activation_checkpointing_enable") else "gradient"
    if not is_wanted:
        getattr(transformer, f"{kind}_checkpointing_disable")()
        return
    getattr(transformer, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    # Only reentrant checkpoints need it, and it lets activations of a frozen transformer be saved.
    transformer.disable_input_require_grads()


@contextmanager
def ranks_in_spawned_loader_workers(module: ModuleType) -> Iterator[None]:
    """
    Divides the instances of a reader that shards manually also in a loader worker that doesn't have
    the process group of the process that has started it. Here, because such a process doesn't
    import the package.

    Works around AllenNLP 2.10.1: `shard_iterable` asks for the process group, which a spawned
    loader worker doesn't have, so that every rank trains on all instances. Gone when it uses the
    reader's `DistributedInfo`.
    """
    yield
    reader_module: Any = module
    shard_iterable = reader_module.DatasetReader.shard_iterable

    @functools.wraps(shard_iterable)
    def shard(self: Any, iterable: Any) -> Any:
        info = self.get_distributed_info()
        if info is not None and not reader_module.util.is_distributed():
            iterable = itertools.islice(iterable, info.global_rank, None, info.world_size)
        return shard_iterable(self, iterable)

    reader_module.DatasetReader.shard_iterable = shard


_WITHOUT_LAZY = ("allennlp", "allennlp_models", "allennlp_deepspeed")


@contextmanager
def former_argument_of_readers(module: ModuleType) -> Iterator[None]:
    """
    Lets readers of projects pass `lazy`, an argument of AllenNLP 1 that was the first. Data are
    read once. In a config of AllenNLP's own readers it remains unknown.
    """
    yield
    reader: Any = module.DatasetReader  # type: ignore[attr-defined]
    initialize = reader.__init__

    @functools.wraps(initialize)
    def initialize_without_lazy(self: Any, *args: Any, **kwargs: Any) -> None:
        given: List[bool] = []
        if type(self).__module__.partition(".")[0] not in _WITHOUT_LAZY:
            # No other argument in this position is a truth value.
            if args and isinstance(args[0], bool):
                given, args = [args[0]], args[1:]
            elif "lazy" in kwargs:
                given = [kwargs.pop("lazy")]
        if given:
            self.lazy = given[0]
        if any(given):
            logging.getLogger(__name__).warning(
                "%s is lazy, but data are read once: write 'data_loader.max_instances_in_memory' "
                "to read them in each epoch",
                type(self).__name__,
            )
        initialize(self, *args, **kwargs)

    reader.lazy = False
    reader.__init__ = initialize_without_lazy


@contextmanager
def former_method_of_metrics(module: ModuleType) -> Iterator[None]:
    """
    Gives metrics of AllenNLP 0.9 the method that `detach_tensors` has replaced, which also moved
    the tensors to the CPU.
    """
    yield
    metric: Any = module.Metric  # type: ignore[attr-defined]
    metric.unwrap_to_tensors = staticmethod(
        lambda *tensors: (
            x.cpu() if hasattr(x, "cpu") else x for x in metric.detach_tensors(*tensors)
        )
    )


@contextmanager
def weights_of_today(module: ModuleType) -> Iterator[None]:
    """
    Makes the modules of `allennlp.modules.transformer`, which look for `pytorch_model.bin` only,
    read `model.safetensors` as well. A model that has both files is read from the former. They also
    get the settings of `config.json` as they are there: transformers 5 ties the weights of T5
    whatever `tie_word_embeddings` says.
    """
    yield
    transformer_module: Any = module
    construct = vars(transformer_module.TransformerModule)["from_pretrained_module"].__func__

    @functools.wraps(construct)
    def from_pretrained_module(
        cls: Any, model_name: str, *args: Any, auto_config_kwargs: Any = None, **kwargs: Any
    ) -> Any:
        auto_config_kwargs = {**_overridden_settings(model_name), **(auto_config_kwargs or {})}
        return construct(cls, model_name, *args, auto_config_kwargs=auto_config_kwargs, **kwargs)

    transformer_module.TransformerModule.from_pretrained_module = classmethod(
        from_pretrained_module
    )
    of_class = vars(transformer_module.TransformerModule)["_get_pretrained_state_dict"].__func__

    @functools.wraps(of_class)
    def get_pretrained_state_dict(
        cls: Any, model_name: str, weights_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        weights_path = weights_path or _weights_path(model_name)
        return of_class(cls, model_name, weights_path, *args, **kwargs)

    transformer_module.TransformerModule._get_pretrained_state_dict = classmethod(
        get_pretrained_state_dict
    )
    transformer_module.read_state_dict = _read_safetensors_too(transformer_module.read_state_dict)


def _overridden_settings(model_name: str) -> Dict[str, Any]:
    """Returns the settings of a `config.json` that the class of the config has overridden."""
    from transformers import AutoConfig, PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(model_name)
    config = AutoConfig.from_pretrained(model_name)
    return {
        name: value
        for name, value in written.items()
        if isinstance(value, (bool, int, float, str)) and getattr(config, name, value) != value
    }


def _weights_path(model_name: str) -> Optional[str]:
    """
    Returns the path of the weights, or `None` if neither file exists or it can't be known: AllenNLP
    then reports it.
    """
    from transformers.utils import cached_file

    for name in ("pytorch_model.bin", _SAFETENSORS):
        path: Optional[str] = cached_file(
            model_name,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            return path
    return None


def _read_safetensors_too(read_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read_state_dict)
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(path).endswith(_SAFETENSORS):
            return read_state_dict(path, *args, **kwargs)
        import torch
        from safetensors.torch import load_file

        # Only the call that reads the file is replaced. Left-out and renamed weights are handled as
        # before.
        with mock.patch.object(torch, "load", lambda path, map_location: load_file(path)):
            return read_state_dict(path, *args, **kwargs)

    return read


@contextmanager
def former_checkpoints(module: ModuleType) -> Iterator[None]:
    """Resumes a training that an environment of 2022 has begun."""
    yield
    from allennlp_deepspeed_import_hook import former_checkpoints

    trainer: Any = module.GradientDescentTrainer  # type: ignore[attr-defined]
    trainer._maybe_restore_checkpoint = former_checkpoints.by_name(
        trainer._maybe_restore_checkpoint
    )


@contextmanager
def former_adamw(module: ModuleType) -> Iterator[None]:
    """
    Provides `transformers.AdamW`, from which AllenNLP's "huggingface_adamw" inherits and which
    transformers 5 has removed.
    """
    import transformers

    from allennlp_deepspeed_import_hook.former_adamw import AdamW

    if not hasattr(transformers, "AdamW"):
        transformers.AdamW = AdamW  # type: ignore[attr-defined]
    yield


@contextmanager
def _resources_without_setuptools() -> Iterator[None]:
    if importlib.util.find_spec("pkg_resources") is not None:
        yield
        return
    stand_in = ModuleType("pkg_resources")
    stand_in.resource_filename = _resource_path  # type: ignore[attr-defined]
    sys.modules["pkg_resources"] = stand_in
    try:
        yield
    finally:
        del sys.modules["pkg_resources"]


def _resource_path(module_name: str, name: str) -> str:
    return os.path.join(os.path.dirname(str(sys.modules[module_name].__file__)), name)


@contextmanager
def former_imports_of_narrativeqa(module: ModuleType) -> Iterator[None]:
    """
    It imports py-rouge, which imports `pkg_resources` to find two files of its own: setuptools no
    longer has that. It also downloads data of NLTK's, in each worker. What needs them says so.
    """
    import nltk

    with mock.patch.object(nltk, "download"), _resources_without_setuptools():
        yield


@contextmanager
def files_outside_of_nltk(module: ModuleType) -> Iterator[None]:
    """
    NLTK reads no files outside its folders of data, except where it is told of their folder.
    """
    import nltk

    yield
    reader = module.BracketParseCorpusReader  # type: ignore[attr-defined]

    def read(root: str, *args: Any, **kwargs: Any) -> Any:
        if root not in nltk.data.path:
            nltk.data.path.append(root)
        return reader(root, *args, **kwargs)

    module.BracketParseCorpusReader = read  # type: ignore[attr-defined]


@contextmanager
def former_wordpieces(module: ModuleType) -> Iterator[None]:
    """
    It calls `wordpiece_tokenizer` of BERT's tokenizer, which only one in Python had.
    """
    yield
    tokenizer = module.BertTokenizer  # type: ignore[attr-defined]
    if not hasattr(tokenizer, "wordpiece_tokenizer"):
        tokenizer.wordpiece_tokenizer = property(_Wordpieces)


class _Wordpieces:
    def __init__(self, tokenizer: Any) -> None:
        self._model = tokenizer.backend_tokenizer.model

    def tokenize(self, text: str) -> List[str]:
        return [piece.value for word in text.split() for piece in self._model.tokenize(word)]
