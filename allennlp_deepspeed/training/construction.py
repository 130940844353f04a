"""
Prepares and checks what a trainer is constructed with, in the same way for Python and for a config
file.
"""

import difflib
import json
import logging
import math
import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from allennlp.common import Lazy
from allennlp.common import util as common_util
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import (
    MultiProcessDataLoader,
    MultiTaskDataLoader,
    SimpleDataLoader,
)
from allennlp.models import Model
from allennlp.nn.parallel import DdpAccelerator, TorchDdpAccelerator
from allennlp.training.optimizers import Optimizer
from allennlp.training.scheduler import Scheduler

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.shared_directories import Directories
from allennlp_deepspeed.config.declared_keys import TrainerArguments
from allennlp_deepspeed.config.deepspeed_config import (
    DeepSpeedConfig,
    ResolvedConfig,
    TrainerSettings,
)
from allennlp_deepspeed.config.global_batch import (
    finds_micro_batch_size,
    no_fixed_size_error,
    refuse_grad_cache,
)
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel, destroy_engines
from allennlp_deepspeed.engine.optimizers import optimizer_check
from allennlp_deepspeed.engine.optimizers.fused import use_fused_kernels
from allennlp_deepspeed.engine.parameters.model_check import check_initialized
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.process.worker_device import (
    capabilities,
    worker_device,
    workers_per_node,
)
from allennlp_deepspeed.training.batch_groups import micro_batch_size, num_batches
from allennlp_deepspeed.training.data_consistency import check_same_data

logger = logging.getLogger(__name__)

# Data loaders that move batches to their `cuda_device`, if they have one.
_LOADERS_OF_ALLENNLP = (MultiProcessDataLoader, MultiTaskDataLoader, SimpleDataLoader)


def construct(
    arguments: TrainerArguments, wrap: Callable[[Model, int], Callable[[], None]]
) -> Tuple[DeepSpeedWrappedModel, TrainerArguments]:
    """
    Initializes the engine, and constructs the parts that need the engine's optimizer. Every rank
    must call it.

    # Parameters

    arguments : `TrainerArguments`, required.
    wrap : `Callable[[Model, int], Callable[[], None]]`, required.
        That of `DeepSpeedWrappedModel`.

    # Returns

    `Tuple[DeepSpeedWrappedModel, TrainerArguments]`
        The engine, and the arguments with all parts constructed and no setting of AllenNLP's
        trainer unset.
    """
    model, optimizer, data_loader = arguments.model, arguments.optimizer, arguments.data_loader
    check_schedule(arguments.learning_rate_scheduler)
    refuse_grad_cache(vars(arguments))
    if finds_micro_batch_size(vars(arguments)) and micro_batch_size(data_loader) is None:
        raise no_fixed_size_error()
    find_unused_parameters = _find_unused_parameters(arguments.ddp_accelerator)
    check_same_data(
        model.vocab,
        {
            "train_data_path": data_loader,
            "validation_data_path": arguments.validation_data_loader,
        },
    )
    _prepare(model, arguments.no_grad or [])
    parameters = [[name, p] for name, p in model.named_parameters() if p.requires_grad]
    deepspeed_config = DeepSpeedConfig.from_value(arguments.deepspeed_config)
    given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    if isinstance(optimizer, Lazy):
        optimizer = optimizer.construct(model_parameters=parameters)
    elif optimizer is None and "optimizer" not in deepspeed_config.config:
        optimizer = Optimizer.default(parameters)
        for line in default_learning_rate({"optimizer": {}}, optimizer):
            logger.info("%s", line)
    optimizer_check.check_type(optimizer)
    device = worker_device(arguments.cuda_device)
    batches_per_epoch = num_batches(data_loader)
    config = deepspeed_config.resolve(
        _settings(arguments, optimizer, batches_per_epoch, device)
    ).limit_buckets(sum(full_shape(p).numel() for p in model.parameters() if p.requires_grad))
    # An optimizer that is given as an object keeps the implementation that it has.
    if given is None and optimizer is not None and config.offload_device != "none":
        use_fused_kernels(optimizer)
    _check_empty_groups(optimizer, arguments)
    _check_owned(model, optimizer, arguments.grad_norm)
    param_groups = [] if optimizer is None else optimizer.param_groups
    empty_groups = [group for group in param_groups if not group["params"]]
    if optimizer is not None:
        optimizer_check.check_modes(optimizer, config, arguments.moving_average is not None)
    wrapped_model = wrap_model(
        model,
        config,
        optimizer,
        device=device,
        local_rank=arguments.local_rank,
        find_unused_parameters=find_unused_parameters,
        checkpointed_modules=arguments.activation_checkpointing,
        wrap=wrap,
    )
    with destroy_on_failure(wrapped_model):
        with ExitStack() as groups:
            # At ZeRO stage 3 the groups are empty between steps.
            groups.enter_context(wrapped_model.shards.in_param_groups())
            if empty_groups:
                groups.enter_context(_restore_empty_groups(wrapped_model.optimizer, empty_groups))
            schedule = _construct_part(
                arguments,
                arguments.learning_rate_scheduler,
                optimizer=wrapped_model.optimizer,
                num_epochs=arguments.num_epochs,
                num_steps_per_epoch=None
                if batches_per_epoch is None
                else math.ceil(batches_per_epoch / config.num_gradient_accumulation_steps),
            )
        check_schedule(schedule)
        return wrapped_model, replace(
            arguments,
            **_parts(arguments, wrapped_model.optimizer, parameters),
            optimizer=wrapped_model.optimizer,
            learning_rate_scheduler=schedule,
            grad_norm=config.grad_norm,
            num_gradient_accumulation_steps=config.num_gradient_accumulation_steps,
            # The engine scales and casts; AllenNLP's own autocast and GradScaler are disabled.
            use_amp=False,
        )


def _prepare(model: Model, no_grad: List[str]) -> None:
    """Prepares the model for the construction of an optimizer."""
    destroy_engines(model)
    check_initialized(model)
    freeze(model, no_grad)
    common_util.log_frozen_and_tunable_parameter_names(model)


def _parts(
    arguments: TrainerArguments, optimizer: torch.optim.Optimizer, parameters: Any
) -> Dict[str, Any]:
    directory = {"serialization_dir": arguments.serialization_dir}
    callbacks = arguments.callbacks or []
    # The optimizer may have frozen some.
    trainable = [[name, p] for name, p in parameters if p.requires_grad]
    with access_allowed():
        # It copies each parameter's elements, which shards replace in the trainer.
        moving_average = _construct_part(arguments, arguments.moving_average, parameters=trainable)
    return {
        "momentum_scheduler": _construct_part(
            arguments, arguments.momentum_scheduler, optimizer=optimizer
        ),
        "moving_average": moving_average,
        "checkpointer": _construct_part(arguments, arguments.checkpointer, **directory),
        "callbacks": [_construct_part(arguments, callback, **directory) for callback in callbacks],
    }


def freeze(model: Model, no_grad: List[str]) -> None:
    """
    Freezes the parameters whose names match one of the regular expressions.

    # Raises

    `ConfigurationError`
        With a line for each regular expression that matches none, or if none is left to train.
    """
    parameters = dict(model.named_parameters())
    lines = []
    for i, pattern in enumerate(no_grad):
        matching = [name for name in parameters if re.search(pattern, name)]
        if not matching:
            lines.append(
                f"'trainer.no_grad.{i}' is {json.dumps(pattern)}, which matches the name of no "
                f"parameter and would freeze nothing. Similar names: {_similar(model, pattern)}."
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if not lines and no_grad and not any(p.requires_grad for p in parameters.values()):
        lines = [
            f"'trainer.no_grad' is {json.dumps(no_grad)}, which freezes all "
            "parameters: write patterns that leave some to train."
        ]
    if lines:
        raise ConfigurationError("\n".join(lines))


def default_learning_rate(
    trainer: Dict[str, Any], optimizer: Optional[torch.optim.Optimizer]
) -> List[str]:
    """
    Returns a line with the learning rate if no key sets it.

    # Parameters

    trainer : `Dict[str, Any]`, required.
        The section of the config.
    optimizer : `Optional[torch.optim.Optimizer]`, required.
        The optimizer of AllenNLP that has been constructed, if there is one.
    """
    section = trainer.get("optimizer")
    rate = None if optimizer is None else optimizer.defaults.get("lr")
    if rate is None or (isinstance(section, dict) and "lr" in section):
        return []
    return [f"trainer.optimizer.lr = {rate} (default of {type(optimizer).__name__}, because unset)"]


def _similar(model: Model, pattern: str) -> str:
    """Returns names of parameters, or parts of names, that a pattern may mean."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    # A tied parameter has the first of its names.
    found = [
        names[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if re.search(pattern, name)
    ]
    if not found:
        parts = dict.fromkeys(part for n in names.values() for part in (*n.split("."), n))
        found = difflib.get_close_matches(pattern, parts, n=3, cutoff=0.3)
    return ", ".join(found or dict.fromkeys(name.split(".")[0] for name in names.values()))


def _settings(
    arguments: TrainerArguments,
    optimizer: Optional[torch.optim.Optimizer],
    batches_per_epoch: Optional[int],
    device: torch.device,
) -> TrainerSettings:
    world_size, directory = arguments.world_size, arguments.serialization_dir
    return TrainerSettings.from_objects(
        vars(arguments),
        optimizer,
        arguments.learning_rate_scheduler,
        micro_batch_size=micro_batch_size(arguments.data_loader),
        batches_per_epoch=batches_per_epoch,
        world_size=world_size,
        workers_per_node=workers_per_node(world_size),
        serialization_dir=None if directory is None else str(directory),
        **capabilities(device),
    )


def wrap_model(
    model: Model, config: ResolvedConfig, optimizer: Optional[torch.optim.Optimizer], **kwargs: Any
) -> DeepSpeedWrappedModel:
    """
    Initializes the engine of a model, with an optimizer that has been checked. Every rank must call
    it, with the arguments of `DeepSpeedWrappedModel`.

    # Raises

    `ConfigurationError`
        If DeepSpeed can't shard the optimizer, or doesn't support `config` with this model.
    """
    if optimizer is None:
        optimizer_check.check_section(config)
    else:
        optimizer_check.check_object(optimizer, config, kwargs["device"])
    return DeepSpeedWrappedModel(model, config, optimizer=optimizer, **kwargs)


@contextmanager
def destroy_on_failure(wrapped_model: DeepSpeedWrappedModel) -> Iterator[None]:
    """Context manager that destroys the engine after an exception."""
    try:
        yield
    except BaseException:
        wrapped_model.destroy()
        raise


def _find_unused_parameters(ddp_accelerator: Optional[DdpAccelerator]) -> bool:
    if ddp_accelerator is None:
        return False
    if isinstance(ddp_accelerator, TorchDdpAccelerator):
        return ddp_accelerator._ddp_kwargs["find_unused_parameters"]
    raise ConfigurationError(
        "The 'deepspeed' trainer can't be used with 'distributed.ddp_accelerator' "
        f"{type(ddp_accelerator).__name__}: remove the key."
    )


def _construct_part(arguments: TrainerArguments, part: Any, **given: Any) -> Any:
    """
    Constructs a lazy part of the arguments, which say in messages where it is. Returns any other
    object unchanged.
    """
    return part.construct(**given) if isinstance(part, Lazy) else part


def check_schedule(schedule: Any) -> None:
    """
    Checks a learning rate scheduler, or its section of the config.

    # Raises

    `ConfigurationError`
        If it unfreezes parameters during training.
    """
    if _unfreezes(schedule):
        raise ConfigurationError(
            "'trainer.learning_rate_scheduler' has \"gradual_unfreezing\": true, but DeepSpeed "
            "doesn't support freezing or unfreezing during training. Remove it, or freeze "
            "parameters by 'trainer.no_grad'."
        )


def _unfreezes(schedule: Any) -> bool:
    """Returns whether a schedule, or an inner one, unfreezes gradually."""
    remaining, seen = [schedule], {}
    while remaining:
        value = remaining.pop()
        if id(value) in seen:  # they may refer to each other
            continue
        seen[id(value)] = value
        if isinstance(value, Lazy):
            value = {**value._params.as_dict(quiet=True), **value._constructor_extras}
        elif isinstance(value, Scheduler):
            value = vars(value)
        if isinstance(value, dict):
            if value.get("gradual_unfreezing") is True:
                return True
            remaining.extend(value.values())
        elif isinstance(value, (list, tuple)):
            remaining.extend(value)
    return False


def check_checkpointer(checkpointer: Any) -> None:
    """
    Checks that a checkpointer supports an engine.

    # Raises

    `ConfigurationError`
        If it doesn't.
    """
    if checkpointer is not None and not isinstance(checkpointer, DeepSpeedCheckpointer):
        raise ConfigurationError(
            "The 'deepspeed' trainer needs a DeepSpeedCheckpointer, not a "
            f'{type(checkpointer).__name__}: write "checkpointer": {{"type": "deepspeed", ...}}.'
        )


def _check_empty_groups(
    optimizer: Optional[torch.optim.Optimizer], arguments: TrainerArguments
) -> None:
    """Checks that the groups that DeepSpeed removes aren't before others that a schedule counts."""
    is_empty = [not group["params"] for group in optimizer.param_groups] if optimizer else []
    for name in ("learning_rate_scheduler", "momentum_scheduler"):
        schedule = getattr(arguments, name)
        counts = isinstance(schedule, Scheduler) or _has_value_per_group(schedule, len(is_empty))
        if counts and is_empty != sorted(is_empty):
            raise ConfigurationError(
                f"Parameter group {is_empty.index(True)} of the optimizer is empty. DeepSpeed "
                f"removes it, so '{name}' would set the values of other groups. Remove it before "
                "you construct the scheduler, or put it last."
            )


def _has_value_per_group(schedule: Any, num_groups: int) -> bool:
    """Returns whether the arguments of a schedule have a list with a number for each group."""
    if not isinstance(schedule, Lazy):
        return False
    params = {} if schedule._params is None else schedule._params.as_dict(quiet=True)
    return any(
        isinstance(value, (list, tuple))
        and len(value) == num_groups
        and all(isinstance(item, (int, float)) for item in value)
        for name, value in {**params, **schedule._constructor_extras}.items()
        if name != "milestones"  # of PyTorch's schedules, which are epochs
    )


def _check_owned(
    model: Model, optimizer: Optional[torch.optim.Optimizer], grad_norm: Union[float, bool, None]
) -> None:
    """Checks that the optimizer has all parameters of which AllenNLP takes the norm."""
    if not grad_norm or optimizer is None:
        return
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in owned:
            raise ConfigurationError(
                f"'trainer.grad_norm' is {json.dumps(grad_norm)}, but the optimizer doesn't have "
                f"the trainable parameter '{name}', whose gradient belongs to the norm: freeze it "
                "by 'trainer.no_grad', or give it to the optimizer"
            )


@contextmanager
def _restore_empty_groups(
    optimizer: torch.optim.Optimizer, empty_groups: List[Dict[str, Any]]
) -> Iterator[None]:
    """
    Context manager in which the optimizer has the empty groups that DeepSpeed has removed.
    AllenNLP's schedules for layer-wise learning rates need the default group at the end.

    Works around DeepSpeed 0.19.8: it removes parameter groups without parameters from the given
    optimizer. Gone when they stay.
    """
    optimizer.param_groups.extend(empty_groups)
    try:
        yield
    finally:
        del optimizer.param_groups[-len(empty_groups) :]


def find_directories(arguments: TrainerArguments, config: ResolvedConfig) -> Directories:
    """
    Finds the ranks that share a serialization directory, and logs them unless all ranks are on one
    host with one directory. Every rank must call it.
    """
    directory = arguments.serialization_dir
    found = Directories.discover(None if directory is None else str(directory))
    setting = config.engine_config.get("checkpoint", {}).get("use_node_local_storage")
    if not arguments.distributed or (
        found.is_shared and not setting and len(set(found.hosts)) == 1
    ):
        return found
    if setting is not None and setting == found.is_shared:
        logger.warning(
            "%s 'trainer.deepspeed_config.checkpoint.use_node_local_storage' is %s, and not "
            "needed: remove it.",
            found.description(),
            json.dumps(setting),
        )
    else:
        logger.info("%s", found.description())
    return found


def keep_batches_on_cpu(data_loader: Any, wrapped_model: DeepSpeedWrappedModel) -> None:
    """
    Prevents a data loader of AllenNLP from moving batches to the device until the engine is
    destroyed. It would synchronize with the device for each batch, and `batch_outputs` doesn't.
    """
    if isinstance(data_loader, _LOADERS_OF_ALLENNLP):
        device = data_loader.cuda_device
        wrapped_model.call_before_destroy(partial(setattr, data_loader, "cuda_device", device))
        data_loader.cuda_device = None
