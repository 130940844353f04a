"""
Constructs parts of a config beforehand, with stand-ins for what they are given: what their
constructors say of ranges and sizes, before data are read. Only those of which it is known that
nothing else decides whether they can be constructed.
"""

import importlib.util
import inspect
import json
import logging
import re
import sys
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional
from unittest import mock

import torch
from allennlp.common import Params, Registrable
from allennlp.common.checks import ConfigurationError
from allennlp.data import DataLoader, DatasetReader
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.metric_tracker import MetricTracker
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import MultiOptimizer, Optimizer

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.section_params import in_silence
from allennlp_deepspeed.config.settings import registered_name
from allennlp_deepspeed.config.values import is_integer, is_number
from allennlp_deepspeed.launch.model_trial import check_model
from allennlp_deepspeed.signatures.callers import is_own_code

logger = logging.getLogger(__name__)

Section = Dict[str, Any]

# No schedule that looks at it needs more.
_STEPS_OF_EPOCH = 1000


def check_parts(config: Dict[str, Any], findings: Findings) -> None:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        A whole training configuration, without what is known to be wrong.
    findings : `Findings`, required.
        Gets a line for each part that can't be constructed, with the key that is to blame and its
        constructor's own words.
    """
    with in_silence():
        _check_trainer(config["trainer"], findings)
        for name in ("data_loader", "validation_data_loader"):
            _check_loader(config.get(name), name, findings)
        check_model(config, findings)
    for name in ("dataset_reader", "validation_dataset_reader"):
        reader = config.get(name)
        if not isinstance(reader, dict):
            continue
        registered = Registrable._registry[DatasetReader].get(str(reader.get("type")))
        most = reader.get("max_instances")
        # A reader of the user's may mean something else by it.
        if registered and is_own_code(registered[0]) and most is not None and not _is_count(most):
            findings.add(
                f"'{name}.max_instances' is {json.dumps(most)}: must be at least 1, or null"
            )


def _check_trainer(trainer: Section, findings: Findings) -> None:
    parameters = [("", torch.nn.Parameter(torch.zeros(1)))]
    optimizer = _check_optimizer(trainer, parameters, findings)
    num_epochs = trainer.get("num_epochs", 20)

    def schedule(section: Section) -> None:
        scheduler = LearningRateScheduler.from_params(
            Params(section),
            optimizer=optimizer(),
            num_epochs=num_epochs,
            num_steps_per_epoch=_STEPS_OF_EPOCH,
        )
        scheduler.step_batch(1)
        scheduler.step(0.5)

    for name, base, construct in (
        ("learning_rate_scheduler", LearningRateScheduler, schedule),
        (
            "momentum_scheduler",
            MomentumScheduler,
            lambda s: MomentumScheduler.from_params(Params(s), optimizer=optimizer()),
        ),
        (
            "moving_average",
            MovingAverage,
            lambda s: MovingAverage.from_params(Params(s), parameters=parameters),
        ),
    ):
        section = _section(trainer.get(name))
        if section is not None and _is_allennlps(base, section) and optimizer is not None:
            _try(construct, section, f"trainer.{name}", findings)
    _check_numbers(trainer, findings)
    metric = trainer.get("validation_metric", "-loss")
    try:
        MetricTracker(metric)
    except ConfigurationError:
        findings.add(
            f"'trainer.validation_metric' is {json.dumps(metric)}: must be the name of a metric "
            'after "+" or "-", for the larger or the smaller the better, such as "-loss"'
        )


def _check_numbers(trainer: Section, findings: Findings) -> None:
    """What AllenNLP finds out when it counts with them."""
    num_epochs = trainer.get("num_epochs", 20)
    if not _is_count(num_epochs):
        findings.add(f"'trainer.num_epochs' is {json.dumps(num_epochs)}: must be at least 1")
    patience = trainer.get("patience")
    if patience is not None and not _is_count(patience):
        findings.add(f"'trainer.patience' is {json.dumps(patience)}: must be at least 1, or null")
    average = trainer.get("moving_average")
    decay = average.get("decay", 0.5) if isinstance(average, dict) else 0.5
    if is_number(decay) and not 0 <= decay <= 1:
        findings.add(f"'trainer.moving_average.decay' is {decay}: must be from 0 to 1")
    for pattern in trainer.get("no_grad") or []:
        try:
            re.compile(pattern)
        except re.error as error:
            findings.add(
                f"'trainer.no_grad' has {json.dumps(pattern)}, which is no regular expression: "
                f"{error}"
            )
    names = [registered_name(callback) for callback in trainer.get("callbacks") or []]
    registered = Registrable._registry[TrainerCallback]
    # A callback of the user's may bring another module of that name.
    are_known = all(name in registered and is_own_code(registered[name][0]) for name in names)
    if "wandb" in names and are_known and importlib.util.find_spec("wandb") is None:
        findings.add(
            "'trainer.callbacks' has \"wandb\", but the package 'wandb' isn't installed: install "
            "it, or remove the callback"
        )


def _is_count(value: Any) -> bool:
    return is_number(value) and 1 <= value <= sys.maxsize and int(value) == value


def _check_optimizer(trainer: Section, parameters: List[Any], findings: Findings) -> Any:
    """Returns a function that constructs one; `None` if it can't be."""
    section = _section(trainer.get("optimizer")) or {}

    def construct(section: Section) -> torch.optim.Optimizer:
        with _without_compiler():
            return Optimizer.from_params(Params(section), model_parameters=parameters)

    def stand_in() -> torch.optim.Optimizer:
        group = {"params": [parameters[0][1]]}
        groups = [group, *({"params": []} for _ in section.get("parameter_groups") or [])]
        with _without_compiler():
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    name = section.get("type", Optimizer.default_implementation)
    known = Registrable._registry[Optimizer].get(name, (MultiOptimizer, None))[0]
    if issubclass(known, MultiOptimizer) or not _is_allennlps(Optimizer, section):
        return stand_in
    if not _try(construct, section, "trainer.optimizer", findings):
        return None
    return lambda: construct(json.loads(json.dumps(section)))


@contextmanager
def _without_compiler() -> Iterator[None]:
    """
    In it PyTorch's optimizers are constructed without importing the compiler, which they do to be
    left out of what it compiles.
    """
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    with mock.patch.object(torch.optim.Optimizer, "add_param_group", add_param_group):
        yield


def _check_loader(loader: Any, name: str, findings: Findings) -> None:
    section = _section(loader)
    if section is None or not _is_allennlps(DataLoader, section):
        return
    sampler = _section(section.get("batch_sampler"))
    size = None if sampler is None else sampler.get("batch_size")
    if is_integer(size) and size < 1:
        findings.add(f"'{name}.batch_sampler.batch_size' is {size}: must be at least 1")
        return
    size = section.get("batch_size")
    if isinstance(size, (int, float)) and size > sys.maxsize:
        findings.add(f"'{name}.batch_size' is {size}: must be at most {sys.maxsize}")
        return
    if registered_name(section) not in ("multiprocess", "of the default type"):
        return
    num_workers = section.get("num_workers")
    alone = isinstance(num_workers, int) and num_workers >= 0

    def construct(section: Section) -> None:
        if alone:
            section["num_workers"] = 0
        section.pop("type", None)
        MultiProcessDataLoader.from_params(
            Params({**section, "quiet": True}), reader=_Empty(), data_path=""
        )

    _try(construct, section, name, findings)


class _Empty(DatasetReader):
    """Of a data set without instances."""

    def _read(self, file_path: Any) -> Iterable[Any]:
        return []


def _try(
    construct: Callable[[Section], Any], section: Section, path: str, findings: Findings
) -> bool:
    error = _error_of(construct, section)
    if error is None:
        return True
    reason = error.message if isinstance(error, ConfigurationError) else str(error)
    if not isinstance(error, (ConfigurationError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    # One of several groups has what others share: not told apart.
    for key, value in section.items():
        others = {name: each for name, each in section.items() if name != key}
        if key != "type" and (
            _error_of(construct, others) is None
            or (is_number(value) and _error_of(construct, {**others, key: 1}) is None)
        ):
            text = json.dumps(value, default=repr)[:100]
            findings.refuse(f"{path}.{key}", f"'{path}.{key}' is {text}: {reason}")
            return False
    # What a section lacks because it was wrong has its own line.
    if not findings.has_refused_within(path):
        findings.refuse(path, f"'{path}': {reason or type(error).__name__}")
    return False


def _error_of(construct: Callable[[Section], Any], section: Section) -> Optional[Exception]:
    try:
        construct(json.loads(json.dumps(section)))
    except Exception as error:
        return error
    return None


def _section(value: Any) -> Optional[Section]:
    if isinstance(value, str):
        return {"type": value}
    return value if isinstance(value, dict) else None


def _is_allennlps(base: Any, section: Section) -> bool:
    """Whether it is a class of AllenNLP's own, which needs nothing but what it is given here."""
    name = section.get("type", base.default_implementation)
    registered = Registrable._registry[base].get(name)
    return registered is not None and registered[0].__module__.startswith("allennlp.")
