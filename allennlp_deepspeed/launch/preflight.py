"""
Checks what can be checked of a config before any data is read or any worker started, and has the
workers of the "deepspeed" trainer supervised.

AllenNLP constructs the trainer in the workers only, after it has made the vocabulary. It has no
seam before that, so `install` puts itself in front of `allennlp.commands.train.train_model`.
"""

import functools
import inspect
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional

import torch
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import int_to_device
from allennlp.models import Model
from allennlp.training.trainer import Trainer

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.operators import check_nvme, check_torch_compile
from allennlp_deepspeed.config.own_keys import (
    CHECKPOINTER_KEYS,
    NEW_TRAINER_KEYS,
    check_names,
    check_values,
)
from allennlp_deepspeed.config.settings import DEFAULT_TYPE, registered_name
from allennlp_deepspeed.config.transformer_kwargs import check_transformer_kwargs
from allennlp_deepspeed.engine.accelerator import DeepSpeedDdpAccelerator
from allennlp_deepspeed.language_modeling import can_share, cant_share
from allennlp_deepspeed.launch import fingerprint, nodes, recovery, resumption
from allennlp_deepspeed.launch import launched as launching
from allennlp_deepspeed.launch.node_files import NodeFiles
from allennlp_deepspeed.optimizers import check_optimizer
from allennlp_deepspeed.processes import launcher
from allennlp_deepspeed.processes.job import Job
from allennlp_deepspeed.processes.launcher import Launched
from allennlp_deepspeed.processes.sequence_groups import read_by_groups
from allennlp_deepspeed.processes.supervision import supervised_workers
from allennlp_deepspeed.processes.worker_device import capabilities
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer


def install() -> None:
    """
    Has every training of this process checked first, and then supervised. May be called more than
    once.
    """
    train_model = train_command.train_model
    if hasattr(train_model, "checks_deepspeed"):
        return

    @functools.wraps(train_model)
    def checked_train_model(params: Params, *args: Any, **kwargs: Any) -> Any:
        is_ours = has_deepspeed_trainer(params.as_dict(quiet=True))
        arguments = inspect.signature(train_model).bind(params, *args, **kwargs).arguments
        launched = launcher.detect() if is_ours else None
        if launched is not None:
            launching.into_config(params, launched, arguments)
        check(params)
        if not is_ours:
            return train_model(params, *args, **kwargs)
        return _train(train_model, arguments, launched)

    checked_train_model.checks_deepspeed = True  # type: ignore[attr-defined]
    train_command.train_model = checked_train_model


def _train(
    train_model: Callable[..., Any], arguments: Dict[str, Any], launched: Optional[Launched]
) -> Any:
    """
    Trains with what has been checked.

    # Parameters

    train_model : `Callable`
        AllenNLP's.
    arguments : `Dict[str, Any]`
        Its arguments.
    launched : `Launched`, optional
        What a launcher says of this process.
    """
    params, directory = arguments["params"], arguments["serialization_dir"]
    node_rank = arguments.get("node_rank", 0)
    config = params.as_dict(quiet=True)
    prepare = _read_by_groups(config, worker_preparation(params, directory))
    if launched is None:
        local_rank, member = None, nodes.member(config, node_rank)
    else:
        local_rank = launching.local_rank_to_start(config, launched)
        member = launching.member(config, launched)
    with ExitStack() as stack:
        job = None if member is None else stack.enter_context(Job(member))
        node_files = None
        if job is not None:
            job.meet(fingerprint.of_config(config, arguments))
        if job is not None and not job.is_alone:
            node_files = NodeFiles(job, directory, local_rank or 0)
            stack.enter_context(node_files.in_parent())
            prepare = node_files.in_worker(prepare)
        compare = functools.partial(_compare_vocabularies, job, node_files, directory)
        stack.enter_context(supervised_workers(job, prepare, compare, local_rank))
        is_leader = node_files is None or node_files.is_leader
        if resumption.is_asked_for(config):
            force = arguments.get("force", False)
            continues = is_leader and resumption.has_training(directory, force)
            if node_files is not None:
                continues = node_files.any_node(continues)
            if is_leader and not continues:
                resumption.begin_anew(directory)
            arguments["recover"] = continues
        if arguments.get("recover"):
            if node_files is not None:
                node_files.restore_config(params)
            if is_leader:
                recovery.prepare(params, directory, node_rank)
        return train_model(**arguments)


def _read_by_groups(
    config: Dict[str, Any], prepare: Optional[Callable[[], None]]
) -> Optional[Callable[[], None]]:
    """What each worker has to call first, so that those that share sequences read the same data."""
    size = config["trainer"].get("sequence_parallel_size", 1)
    return prepare if size == 1 else functools.partial(_prepare_reader, size, prepare)


def _prepare_reader(size: int, prepare: Optional[Callable[[], None]]) -> None:
    read_by_groups(size)
    if prepare is not None:
        prepare()


def _compare_vocabularies(
    job: Optional[Job], node_files: Optional[NodeFiles], serialization_dir: str
) -> None:
    """Before there are workers."""
    if node_files is not None:
        node_files.wait_until_ready()
    fingerprint.compare_vocabulary(job, serialization_dir)


def check(params: Params, on_this_machine: bool = True) -> None:
    """
    # Parameters

    params : `Params`, required.
        A whole training configuration. It is not changed.
    on_this_machine : `bool`, optional (default = `True`)
        Whether this machine is to train. Otherwise nothing is asked of its devices and compilers,
        nor whether the config suits a device.

    # Raises

    `ConfigurationError`
        If the config has a "deepspeed" trainer that can't be constructed or can't finish. With a
        line for each reason.
    """
    config: Dict[str, Any] = params.as_dict(quiet=True)
    trainer = config.get("trainer")
    trainer_type = registered_name(trainer)
    is_deepspeed = has_deepspeed_trainer(config)
    if registered_name(_accelerator(config)) == "deepspeed" and not is_deepspeed:
        raise ConfigurationError(
            "'distributed.ddp_accelerator' is 'deepspeed', which only the 'deepspeed' trainer can "
            'use: add "type": "deepspeed" to the trainer, or leave the accelerator out.'
        )
    if config.get("type") == "deepspeed" and not is_deepspeed:
        raise ConfigurationError(
            f"The top-level 'type' is 'deepspeed', but 'trainer.type' is {trainer_type}: write "
            '"deepspeed" for both, or leave out the first.'
        )
    if not isinstance(trainer, dict):
        return
    if not is_deepspeed:
        _check_no_own_keys(trainer, trainer_type)
        return
    findings = Findings()
    nodes.check(config.get("distributed"), findings)
    _check_keys(trainer, findings)
    _check_trainer(config, findings)
    _check_checkpointer(trainer.get("checkpointer"), findings)
    with findings.collect():
        _check_deepspeed_config(config, findings, on_this_machine)
    findings.raise_any()


def _check_trainer(config: Dict[str, Any], findings: Findings) -> None:
    """What it says itself, whatever DeepSpeed makes of it."""
    num_workers = len(worker_devices(config))
    if num_workers > 1 and config.get("evaluate_on_test") and config.get("type") != "deepspeed":
        findings.add(
            "'evaluate_on_test' with several workers needs a train loop that evaluates on all of "
            'them: add "type": "deepspeed" at the top level of the config.'
        )
    if config["trainer"].get("sequence_parallel_size", 1) != 1:
        _check_model_to_share(config.get("model"), findings)
    accelerator = _accelerator(config)
    if registered_name(accelerator) not in (None, DEFAULT_TYPE, "torch", "deepspeed"):
        findings.add(
            f"'distributed.ddp_accelerator' is {accelerator}, but with the 'deepspeed' trainer "
            'DeepSpeed takes its place: write "deepspeed", or leave it out.'
        )


def _check_model_to_share(model: Any, findings: Findings) -> None:
    """That its type is known is for AllenNLP to say."""
    name = registered_name(model)
    if name in Model.list_available():
        model_class = Model.resolve_class_name(name)[0]
        if not can_share(model_class):
            findings.add(str(cant_share(model_class)))


def _check_deepspeed_config(
    config: Dict[str, Any], findings: Findings, on_this_machine: bool
) -> None:
    trainer = config["trainer"]
    deepspeed_config = DeepSpeedConfig.of(trainer.get("deepspeed_config"))
    if not on_this_machine:
        deepspeed_config.check_schema(findings)
        return
    settings = _settings(config, deepspeed_config)
    resolved = deepspeed_config.resolve_collecting(settings, findings)
    with findings.collect():
        check_nvme(resolved, settings.device_type)
    with findings.collect():
        check_torch_compile(resolved, settings.device_type)
    check_transformer_kwargs(config.get("model"), resolved, settings.device_type, findings)
    with findings.collect():
        check_optimizer(trainer.get("optimizer"), resolved, settings.device_type)


def _accelerator(config: Dict[str, Any]) -> Any:
    return (config.get("distributed") or {}).get("ddp_accelerator")


def worker_preparation(params: Params, serialization_dir: str) -> Optional[Callable[[], None]]:
    """
    What each worker has to call before AllenNLP constructs its accelerator, which it does before
    the trainer: it tells a "deepspeed" accelerator how the trainer partitions parameters. `None` if
    there is no such accelerator.
    """
    config = params.as_dict(quiet=True)
    accelerator = _accelerator(config)
    if registered_name(accelerator) != "deepspeed":
        return None
    deepspeed_config = DeepSpeedConfig.of(config["trainer"].get("deepspeed_config"))
    settings = _settings(config, deepspeed_config, serialization_dir)
    if settings.use_amp:
        device = int_to_device(worker_devices(config)[0])
        settings = replace(settings, **capabilities(device))
    partitioning = deepspeed_config.partitioning(settings)
    # Version 0.1.0 wrote it into the recorded config.
    said = accelerator.get("deepspeed_config") if isinstance(accelerator, dict) else None
    if said is not None and _without_nvme_paths(said) != _without_nvme_paths(partitioning):
        raise ConfigurationError(
            "'distributed.ddp_accelerator.deepspeed_config' is not what "
            "'trainer.deepspeed_config' says: remove it, and it is taken from there."
        )
    return functools.partial(DeepSpeedDdpAccelerator.tell, partitioning)


def _without_nvme_paths(partitioning: Dict[str, Any]) -> Dict[str, Any]:
    """Which are in the serialization directory that the config was trained in."""
    zero = dict(partitioning.get("zero_optimization", {}))
    for section in ("offload_param", "offload_optimizer"):
        if isinstance(zero.get(section), dict):
            zero[section] = {k: v for k, v in zero[section].items() if k != "nvme_path"}
    return {**partitioning, "zero_optimization": zero}


def _check_no_own_keys(trainer: Dict[str, Any], trainer_type: Optional[str]) -> None:
    """AllenNLP's own trainer would drop them in silence."""
    if trainer_type not in (DEFAULT_TYPE, "gradient_descent"):
        return
    for key in NEW_TRAINER_KEYS:
        if key in trainer:
            raise ConfigurationError(
                f"'trainer.{key}' is given, but the trainer is AllenNLP's own: add "
                '"type": "deepspeed" to the trainer. (With -o, "trainer.num_epochs" changes a key '
                'of it, and "trainer" replaces all of it.)'
            )


def _check_keys(trainer: Dict[str, Any], findings: Findings) -> None:
    """AllenNLP drops keys that a trainer doesn't know in silence."""
    trainer_class, constructor = Trainer.resolve_class_name(trainer["type"])
    arguments = inspect.signature(getattr(trainer_class, constructor or "__init__")).parameters
    known = [
        name
        for name, argument in arguments.items()
        if name not in ("self", "model", "data_loader", "validation_data_loader")
        and argument.kind is not argument.VAR_KEYWORD
    ]
    keys = {k: v for k, v in trainer.items() if k not in ("type", "run_sanity_checks")}
    check_names("trainer", "'deepspeed' trainer", known, keys, findings)
    # What DeepSpeed's configuration depends on is checked with it.
    check_values("trainer", TrainerSettings.other_keys(), keys, findings)


def _check_checkpointer(checkpointer: Any, findings: Findings) -> None:
    name = registered_name(checkpointer)
    if name not in (None, DEFAULT_TYPE, *DeepSpeedCheckpointer.list_available()):
        findings.add(
            f"'trainer.checkpointer.type' is '{name}', but the 'deepspeed' trainer needs a "
            'DeepSpeedCheckpointer: write "deepspeed", or leave out the type.'
        )
        return
    if name not in (DEFAULT_TYPE, "deepspeed") or not isinstance(checkpointer, dict):
        return
    keys = {name: value for name, value in checkpointer.items() if name != "type"}
    check_values("trainer.checkpointer", CHECKPOINTER_KEYS, keys, findings)
    known = list(CHECKPOINTER_KEYS)
    check_names("trainer.checkpointer", "checkpointer", known, keys, findings)


def worker_devices(config: Dict[str, Any]) -> List[int]:
    """A device for each worker of the whole training."""
    distributed = config.get("distributed")
    if distributed is None:
        device = config["trainer"].get("cuda_device")
        default = 0 if torch.cuda.device_count() > 0 else -1
        return [device if isinstance(device, int) else default]
    return list(distributed.get("cuda_devices") or []) * distributed.get("num_nodes", 1)


def _settings(
    config: Dict[str, Any], deepspeed_config: DeepSpeedConfig, serialization_dir: str = ""
) -> TrainerSettings:
    """What the GPU can do has a stand-in."""
    devices = worker_devices(config)
    return TrainerSettings.of_config(
        config,
        deepspeed_config.config,
        world_size=len(devices),
        workers_per_node=len(devices) // (config.get("distributed") or {}).get("num_nodes", 1),
        device_type="cuda" if any(device >= 0 for device in devices) else "cpu",
        serialization_dir=serialization_dir,
    )


def has_deepspeed_trainer(config: Dict[str, Any]) -> bool:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        A whole training configuration.

    # Returns

    `bool`
        Whether its trainer is the "deepspeed" one or a registered subclass of it.
    """
    name = registered_name(config.get("trainer"))
    if not isinstance(name, str) or name == DEFAULT_TYPE:
        return False
    try:
        trainer_class, _ = Trainer.resolve_class_name(name)
    except ConfigurationError:
        return False  # AllenNLP says which there are
    return issubclass(trainer_class, DeepSpeedTrainer)
