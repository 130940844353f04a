"""
Constructs what a config describes, as `allennlp train --dry-run` does, from a few instances and
without weights.
"""

import builtins
import copy
import io
import logging
import os
import re
import tempfile
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple
from unittest import mock

import torch
from allennlp.commands.train import TrainModel
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.file_utils import is_url_or_existing_file
from allennlp.common.meta import META_NAME, Meta
from allennlp.common.tqdm import Tqdm
from allennlp.data import DataLoader, DatasetReader, Instance, Vocabulary
from allennlp.models import Model
from allennlp.models.archival import CONFIG_NAME
from allennlp.modules.token_embedders.embedding import parse_embeddings_file_uri
from allennlp.nn import InitializerApplicator
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer
from allennlp.training.util import make_vocab_from_params
from typing_extensions import override

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.commands.forward_pass import MAX_PARAMETERS, ForwardPass
from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.json_types import as_json, is_count, is_integer, values_in
from allennlp_deepspeed.config.key_validation import did_you_mean, nearest, unregistered
from allennlp_deepspeed.config.keys_of_others import advice
from allennlp_deepspeed.config.settings import registered_name
from allennlp_deepspeed.engine.lifecycle.activation_checkpointing import checkpoint_modules
from allennlp_deepspeed.launch import construction_errors, error_messages, unmatched_patterns
from allennlp_deepspeed.launch.config_check import has_known_train_loop, worker_devices
from allennlp_deepspeed.launch.config_warnings import unknown_metrics, warnings_about
from allennlp_deepspeed.meta_model import construct_without_weights
from allennlp_deepspeed.reports.console_handler import is_routine
from allennlp_deepspeed.training.construction import default_learning_rate, freeze

NUM_INSTANCES = 64
"""The number of instances of each file that are read."""

_MAX_INITIALIZED = 1_000_000  # elements

_MAX_LENGTH = 300  # characters of a warning

# For schedules. The number of steps of an epoch isn't known without reading all data.
_NUM_STEPS = 1_000


class DryRun:
    """
    Construction of a config's objects, in the order of AllenNLP's train command. An error in one
    section doesn't end it: the sections that don't need this one are constructed too.

    # Parameters

    params : `Params`, required.
        A complete training configuration that has been checked. It is not changed.
    """

    def __init__(self, params: Params) -> None:
        self._params = params
        self._config: Dict[str, Any] = params.as_dict(quiet=True)
        self._errors = ConfigErrors()
        self._constructed: List[str] = []
        self._skipped: List[str] = []
        self._warnings: List[str] = warnings_about(self._config)
        self._defaults: List[str] = []
        self._initializers: Dict[str, InitializerApplicator] = {}
        self._has_all_instances = True
        self.model: Optional[Model] = None
        self.vocabulary: Optional[Vocabulary] = None
        # The names of the metrics of a validation, if they are known.
        self.metrics: Optional[Set[str]] = None

    def run(self) -> str:
        """
        Constructs everything.

        # Returns

        `str`
            What was constructed, what was not and why, and warnings.

        # Raises

        `ConfigurationError`
            With a line for each error.
        """
        if not has_known_train_loop(self._config):
            loop, loops = self._config["type"], TrainModel.list_available()
            if loop not in loops and "." not in str(loop):
                raise ConfigurationError(unregistered("type", loop, loops))
            return (
                "Nothing was constructed, because 'type' (top level) is a train loop of your own."
            )
        with (
            tempfile.TemporaryDirectory() as directory,
            _quiet(self._warnings),
            construction_errors.checked_lists(),
        ):
            # Parts of the user's read what a training has there, such as wandb-allennlp's callback.
            self._params.to_file(os.path.join(directory, CONFIG_NAME))
            Meta.new().to_file(os.path.join(directory, META_NAME))
            loaders = self._make_loaders(self._make_readers(directory))
            vocabulary = self._make_vocabulary(loaders, directory)
            if vocabulary is not None:
                self.model = self._construct_model(vocabulary, directory)
                vocabulary.save_to_files(os.path.join(directory, "vocabulary"))
            self._construct_parts(self.model, directory)
            if loaders and vocabulary is not None and not self._errors.lines:
                self._run_forward(loaders, vocabulary, directory)
        self._errors.raise_any()
        text = f"Constructed: {', '.join(self._constructed)}."
        text += "".join(f"\nNot constructed: {reason}." for reason in self._skipped)
        text += "".join(f"\n{line}" for line in self._defaults)
        warnings = dict.fromkeys(self._warnings)
        return text + "".join(f"\nWarning: {w}{'' if w.endswith('?') else '.'}" for w in warnings)

    def _make_readers(self, directory: str) -> Dict[str, DatasetReader]:
        readers = {}
        for name in ("dataset_reader", "validation_dataset_reader"):
            if self._config.get(name) is not None:
                with self._collect(name):
                    reader = DatasetReader.from_params(
                        self._section(name), serialization_dir=directory
                    )
                    _limit(reader)
                    readers[name] = reader
                    self._constructed.append(name)
        return readers

    def _make_loaders(self, readers: Dict[str, DatasetReader]) -> Optional[Dict[str, DataLoader]]:
        """Returns the loaders by the name of their data, or `None` if one can't be constructed."""
        loaders, is_complete = {}, True
        for name in ("train", "validation", "test"):
            key = f"{name}_data_path"
            path = self._config.get(key)
            if path is None:
                continue
            reader = readers.get("dataset_reader")
            if name != "train" and self._config.get("validation_dataset_reader") is not None:
                reader = readers.get("validation_dataset_reader")
            if reader is None:
                is_complete = False
                continue
            section = "data_loader"
            if name != "train" and self._config.get("validation_data_loader") is not None:
                section = "validation_data_loader"
            loader = None
            with self._collect(section, key):
                loader = DataLoader.from_params(
                    _in_this_process(self._section(section)), reader=reader, data_path=path
                )
                is_empty = next(iter(loader.iter_instances()), None) is None
                if is_empty:
                    raise ConfigurationError(f"'{key}' is {as_json(path)}, which has no instances")
                loaders[name] = loader
            is_complete = is_complete and name in loaders
        if not is_complete:
            self._skipped.append("vocabulary and model, because data are missing")
            return None
        if loaders:
            self._constructed.append(
                f"data loaders (up to {NUM_INSTANCES} instances of {', '.join(loaders)})"
            )
        return loaders

    def _make_vocabulary(
        self, loaders: Optional[Dict[str, DataLoader]], directory: str
    ) -> Optional[Vocabulary]:
        if loaders is None:
            return None
        chosen = self._config.get("datasets_for_vocab_creation")
        unknown = [name for name in chosen or [] if name not in loaders]
        if unknown:
            self._errors.add(
                f"'datasets_for_vocab_creation' has {as_json(unknown[0])}: choose from "
                f"{', '.join(loaders)}"
            )
            return None
        read = {name: list(loader.iter_instances()) for name, loader in loaders.items()}
        self._has_all_instances = all(len(each) < NUM_INSTANCES for each in read.values())
        # Labels of other data may be in the part of the chosen data that isn't read.
        if not chosen or any(len(read[name]) >= NUM_INSTANCES for name in chosen):
            chosen = list(read)
        instances = [instance for name in chosen for instance in read[name]]
        with self._collect("vocabulary"):
            section = self._section("vocabulary") if "vocabulary" in self._config else Params({})
            vocabulary = Vocabulary.from_params(section.duplicate(), instances=instances)
            self._constructed.append("vocabulary")
            for name, loader in loaders.items():
                section_name = "data_loader"
                if name != "train" and self._config.get("validation_data_loader") is not None:
                    section_name = "validation_data_loader"
                loader.index_with(vocabulary)
                with self._collect(section_name):
                    # Those that are read may be too few for a batch.
                    if next(iter(loader), None) is None and self._has_all_instances:
                        raise ConfigurationError("no batch is full: write a smaller batch size")
            if "non_padded_namespaces" in section.params:
                self._warnings += _padded_labels(vocabulary, instances)
            return vocabulary
        return None

    def _run_forward(
        self, loaders: Dict[str, DataLoader], vocabulary: Vocabulary, directory: str
    ) -> None:
        """Runs the model on the first instances, if that takes seconds."""
        assert self.model is not None  # or there are errors
        if sum(parameter.numel() for parameter in self.model.parameters()) > MAX_PARAMETERS:
            return
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # construction has told its warnings
        try:
            forward = ForwardPass(self._params, vocabulary, directory)
            try:
                forward.train(loaders["train"])
            except Exception as error:
                problem = forward.describe(error)
                if problem is None:
                    if max(worker_devices(self._config)) < 0:
                        self._warnings.append(
                            "the first forward pass, with random weights and no callbacks, fails: "
                            + " ".join(construction_errors.shortened(error).split())[:_MAX_LENGTH]
                        )
                    return
                if self._has_all_instances or self.vocabulary is vocabulary:
                    self._errors.add(problem)
                    for warning in warnings_about(self._config):  # one may be the cause
                        self._errors.add(f"Warning: {warning}.")
                    return
                # A size may be that of a vocabulary of all instances.
                self.vocabulary = self._vocabulary_of_all_instances(directory)
                for loader in loaders.values():
                    loader.index_with(self.vocabulary)
                self._run_forward(loaders, self.vocabulary, directory)
                return
            if "validation" in loaders:
                self.metrics = forward.metrics(loaders["validation"])
                self._warnings += unknown_metrics(self._config["trainer"], self.metrics)
        except Exception:
            return  # of a model that can't be constructed on the CPU, or of its metrics
        finally:
            logging.disable(disabled)

    def _vocabulary_of_all_instances(self, directory: str) -> Vocabulary:
        return make_vocab_from_params(
            self._params.duplicate(), os.path.join(directory, "all_instances")
        )

    def _construct_initializers(self, section: Any, path: str) -> None:
        """Constructs the initializers of a model, which is constructed without them."""
        items: Any = section.items() if isinstance(section, dict) else ()
        for key, part in enumerate(section) if isinstance(section, list) else items:
            if key == "initializer" and part is not None:
                with self._collect(f"{path}.{key}"):
                    self._initializers[path] = InitializerApplicator.from_params(
                        _params(part) if isinstance(part, dict) else part
                    )
            else:
                self._construct_initializers(part, f"{path}.{key}")

    def _construct_model(self, vocabulary: Vocabulary, directory: str) -> Optional[Model]:
        self._construct_initializers(self._config["model"], "model")
        with self._collect("model"), self._find_unknown_namespaces(vocabulary):
            self._find_missing_embeddings()
            try:
                model = construct_without_weights(self._params, vocabulary, directory)
            except ConfigurationError as error:
                cause = error.__cause__
                if self._has_all_instances or cause is None or construction_errors.explain(cause):
                    raise
                # A constructor may look up a label that only later instances have.
                self.vocabulary = self._vocabulary_of_all_instances(directory)
                model = construct_without_weights(self._params, self.vocabulary, directory)
                self._constructed.append("vocabulary of all instances, which the model needs")
            trainer = self._config["trainer"]
            with self._errors.collect():
                freeze(model, trainer.get("no_grad") or [])
            if trainer.get("activation_checkpointing"):
                with self._errors.collect():
                    checkpoint_modules(model, trainer["activation_checkpointing"])()
            self._apply_initializers(model)
            self._compare_lengths(model)
            size = sum(parameter.numel() for parameter in model.parameters())
            self._constructed.append(
                f"model (without weights; with this vocabulary it has {size:,} parameters)"
            )
            return model
        return None

    def _find_missing_embeddings(self) -> None:
        """Finds files of AllenNLP's embeddings that don't exist. They aren't read."""
        for path, section in values_in(self._config["model"], "model"):
            # The default of token embedders; a class of the user's may have a key of this name.
            default = "embedding" if path.split(".")[-2] == "token_embedders" else None
            if not isinstance(section, dict) or section.get("type", default) != "embedding":
                continue
            file = section.get("pretrained_file")
            if isinstance(file, str) and not is_url_or_existing_file(
                parse_embeddings_file_uri(file).main_file_uri
            ):
                self._errors.add(
                    f"'{path}.pretrained_file' is {as_json(file)}, which doesn't exist (the "
                    f"working directory is {os.getcwd()})"
                )

    @contextmanager
    def _find_unknown_namespaces(self, vocabulary: Vocabulary) -> Iterator[None]:
        """Context manager that warns of sizes of namespaces that the data don't have."""
        known, size = vocabulary.get_namespaces(), vocabulary.get_vocab_size

        def checked_size(namespace: str = "tokens") -> int:
            if namespace not in vocabulary.get_namespaces():
                self._warnings.append(
                    f'the model asks for the size of the vocabulary\'s namespace "{namespace}", '
                    f"which has no entries: the data have {', '.join(sorted(known)) or 'none'}"
                )
            return size(namespace)

        with mock.patch.object(vocabulary, "get_vocab_size", checked_size):
            yield

    def _compare_lengths(self, model: Model) -> None:
        """Warns of transformers with fewer positions than the tokens that they are given."""
        for name, module in model.named_modules():
            length = getattr(module, "_max_length", None)
            config = getattr(getattr(module, "transformer_model", None), "config", None)
            positions = getattr(config, "max_position_embeddings", None)
            if is_count(length) and is_count(positions) and length > positions > 0:
                self._warnings.append(
                    f"the embedder '{name}' has a \"max_length\" of {length}, but its transformer "
                    f"{positions} positions"
                )

    def _apply_initializers(self, model: Model) -> None:
        """
        Finds the patterns of initializers that match no parameter, and initializers that fail for
        each that they match, with tensors of the same sizes.
        """
        for path, initializer in self._initializers.items():
            initializers = initializer._initializers
            results: List[List[Optional[Exception]]] = [[] for _ in initializers]
            initializer._initializers = [
                (pattern, partial(_try, initialize, found))  # type: ignore[misc]
                for (pattern, initialize), found in zip(initializers, results)
            ]
            # That of a part sees the names in the part, which may be any module.
            modules = [model] if path == "model" else list(model.modules())
            unmatched = []
            for module in modules:
                with self._find_unmatched() as lines:
                    initializer(module)
                unmatched.append(lines)
            self._warnings += [line for line in unmatched[0] if all(line in u for u in unmatched)]
            for i, found in enumerate(results):
                error = found[0] if found and None not in found else None
                if error is not None:
                    reason = construction_errors.shortened(error)
                    section = f"{path}.initializer.regexes.{i}.1"
                    named = (
                        f"'{key}' is {as_json(value)}"
                        for key, value in values_in(self._config)
                        if key.startswith(f"{section}.")
                        for word in (key.rpartition(".")[2], value)
                        if isinstance(word, str) and re.search(rf"\b{re.escape(word)}\b", reason)
                    )
                    self._errors.add(f"{next(named, repr(section))}: {reason}")

    @contextmanager
    def _find_unmatched(self) -> Iterator[List[str]]:
        """Context manager that yields the list of warnings of patterns that match no parameter."""
        with unmatched_patterns.named(self._config, shows=False) as lines:
            yield lines

    def _construct_parts(self, model: Optional[Model], directory: str) -> None:
        """Constructs the parts of the trainer."""
        trainer = self._config["trainer"]
        self._construct(
            "checkpointer", DeepSpeedCheckpointer.from_params, serialization_dir=directory
        )
        for number, callback in enumerate(trainer.get("callbacks") or []):
            with self._collect(f"trainer.callbacks.{number}"):
                TrainerCallback.from_params(_params(callback), serialization_dir=directory)
                self._constructed.append(f"callback {registered_name(callback)}")
        named = () if model is None else model.named_parameters()
        parameters = [[name, p] for name, p in named if p.requires_grad]
        if not parameters:  # `no_grad` may have frozen all, which is an error already
            return
        with self._find_unmatched() as lines:
            optimizer = self._construct(
                "optimizer", Optimizer.from_params, model_parameters=parameters
            )
        self._warnings += lines
        if optimizer is not None:
            self._warnings += _unknown_options(trainer["optimizer"], optimizer)
        is_default = trainer.get("optimizer") is None
        if optimizer is None:
            optimizer = Optimizer.default(parameters)
        section = DeepSpeedConfig.from_value(trainer.get("deepspeed_config")).config
        if not (is_default and "optimizer" in section):
            self._defaults += default_learning_rate(trainer, optimizer)
        self._construct(
            "learning_rate_scheduler",
            LearningRateScheduler.from_params,
            optimizer=optimizer,
            num_epochs=trainer.get("num_epochs", 20),
            num_steps_per_epoch=_NUM_STEPS,
        )
        self._construct("momentum_scheduler", MomentumScheduler.from_params, optimizer=optimizer)
        self._construct("moving_average", MovingAverage.from_params, parameters=parameters)

    def _construct(self, name: str, from_params: Callable[..., Any], **arguments: Any) -> Any:
        part = self._config["trainer"].get(name)
        if part is None:
            return None
        with self._collect(f"trainer.{name}"):
            constructed = from_params(_params(part), **arguments)
            self._constructed.append(name)
            return constructed
        return None

    def _section(self, name: str) -> Params:
        return _params(self._config[name])

    @contextmanager
    def _collect(self, section: str, data_key: str = "") -> Iterator[None]:
        """Context manager that ends at an error, and adds its description."""
        with counted_lines() as counted:
            try:
                yield
            except Exception as error:
                if isinstance(error, error_messages.WRONG_PATHS) and data_key:
                    path = self._config[data_key]
                    self._errors.add(error_messages.describe_wrong_path(error, data_key, path))
                    return
                if error_messages.is_raised_in_reading(error):
                    where = f"'{data_key}', {counted[-1]}" if counted else f"'{data_key}'"
                    self._errors.add(f"{where}: {construction_errors.shortened(error)}")
                    return
                if isinstance(error, re.error):
                    for path, value in values_in(self._config):
                        if value == error.pattern:
                            text = f"'{path}' is {as_json(value)}, which is no regular expression"
                            self._errors.add(f"{text}: {error.msg}")
                            return
                for line in construction_errors.describe(error, section):
                    self._errors.add(line)


@contextmanager
def _quiet(warnings: List[str]) -> Iterator[None]:
    """
    Context manager without AllenNLP's progress bars, that adds what is logged as a warning to a
    list. A message that is logged for each of several values is added once.
    """
    seen: Set[Tuple[str, Any]] = set()

    def collect(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_ours = record.name.startswith("allennlp_deepspeed")
        is_new = (record.name, record.msg) not in seen
        if record.levelno >= logging.WARNING and is_new and not is_ours and not is_routine(record):
            seen.add((record.name, record.msg))
            warnings.append(" ".join(record.getMessage().split())[:_MAX_LENGTH].rstrip("."))

    bar = Tqdm.tqdm
    with (
        mock.patch.object(logging.Logger, "callHandlers", collect),
        mock.patch.object(Tqdm, "tqdm", staticmethod(partial(bar, disable=True))),
    ):
        yield


def _try(
    initialize: Callable[..., None],
    results: List[Optional[Exception]],
    tensor: torch.Tensor,
    **kwargs: Any,
) -> None:
    """Initializer that keeps a tensor as it is, and appends the error of another one."""
    error = None
    if tensor.numel() <= _MAX_INITIALIZED:
        try:
            with torch.random.fork_rng(devices=[]):
                initialize(torch.empty(tensor.shape), **kwargs)
        except Exception as raised:
            error = raised
    results.append(error)


def _params(value: Any) -> Params:
    return Params({"type": value} if isinstance(value, str) else copy.deepcopy(value))


def _in_this_process(params: Params) -> Params:
    """Returns the section of a data loader without worker processes, and for the CPU."""
    for key in ("num_workers", "cuda_device"):
        if is_integer(params.params.get(key)) and params.params[key] >= 0:
            del params.params[key]
    return params


def _limit(reader: DatasetReader) -> None:
    """Limits the instances that a reader yields, and those of readers in it."""
    limits = [reader.max_instances, NUM_INSTANCES]
    reader.max_instances = min(limit for limit in limits if limit is not None)
    for value in vars(reader).values():
        for inner in value.values() if isinstance(value, dict) else [value]:
            if isinstance(inner, DatasetReader):
                _limit(inner)


def _padded_labels(vocabulary: Vocabulary, instances: List[Instance]) -> Iterator[str]:
    """Yields a warning for each namespace of labels that has entries that are no labels."""
    for name, field in instances[0].fields.items() if instances else ():
        namespace = getattr(field, "_label_namespace", None)
        if namespace is not None and vocabulary.is_padded(namespace):
            yield (
                f"'vocabulary.non_padded_namespaces' lacks \"{namespace}\", the namespace of the "
                f'field "{name}": {vocabulary._padding_token} and {vocabulary._oov_token} are '
                'classes, too. Add it, or "*labels" and "*tags", which are the default'
            )


def _unknown_options(section: Any, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yields a warning for each key of `parameter_groups` that is like one of the optimizer's."""
    groups = section.get("parameter_groups") if isinstance(section, dict) else None
    for i, (_, options) in enumerate(groups or []):
        for key in options:
            known = list(optimizer.defaults)
            if key not in known and (nearest(key, known) or advice(key)):
                path = f"trainer.optimizer.parameter_groups.{i}.1.{key}"
                yield f"'{path}' is no key of the optimizer's: {did_you_mean(key, known)}"


class _CountedFile(io.TextIOWrapper):
    """Text file that counts the lines that have been read from it."""

    num_lines = 0

    # Is also called for each line of a loop, since this is a subclass.
    @override
    def readline(self, *args: Any) -> str:  # type: ignore[override]
        self.num_lines += 1
        return super().readline(*args)

    @override
    def __str__(self) -> str:
        name = getattr(self.buffer, "name", "")
        return f"{name}, line {self.num_lines}" if self.num_lines else str(name)


@contextmanager
def counted_lines() -> Iterator[List[_CountedFile]]:
    """
    Context manager that yields the list of the text files that are opened in it, each of which
    counts its lines: a reader's error names neither the file nor the line.
    """
    files: List[_CountedFile] = []
    open_file = builtins.open

    def open_counted(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        if mode not in ("r", "rt") or buffering != -1 or args or set(kwargs) - _OF_TEXT:
            return open_file(file, mode, buffering, *args, **kwargs)
        counted = _CountedFile(open_file(file, "rb"), **kwargs)  # noqa: SIM115
        files.append(counted)
        return counted

    with mock.patch.object(builtins, "open", open_counted):
        yield files


_OF_TEXT = {"encoding", "errors", "newline"}
