"""
Has every training of this process checked before any data is read or any worker started, and the
workers of the "deepspeed" trainer supervised.

AllenNLP has no seam before that, so `install` puts itself in front of
`allennlp.commands.train.train_model`.
"""

import functools
import inspect
import re
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Callable, Dict, Optional

from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import int_to_device

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.global_batch import fill_batch_size, finds_micro_batch_size
from allennlp_deepspeed.config.settings import registered_name
from allennlp_deepspeed.config.values import is_integer
from allennlp_deepspeed.engine.accelerator import DeepSpeedDdpAccelerator
from allennlp_deepspeed.launch import failures, fingerprint, nodes, recovery, resumption
from allennlp_deepspeed.launch import launched as launching
from allennlp_deepspeed.launch.config_check import (
    accelerator_of,
    check,
    has_deepspeed_trainer,
    settings_of,
    worker_devices,
)
from allennlp_deepspeed.launch.first_and_last_lines import (
    command,
    ends_with_how_to_continue,
    first_and_last_lines,
)
from allennlp_deepspeed.launch.node_files import NodeFiles
from allennlp_deepspeed.processes import launcher, worker_failure
from allennlp_deepspeed.processes.announcements import wants_whole_log
from allennlp_deepspeed.processes.fork_server import ForkServer, is_safe_here
from allennlp_deepspeed.processes.job import Job
from allennlp_deepspeed.processes.launcher import Launched
from allennlp_deepspeed.processes.sequence_groups import read_by_groups
from allennlp_deepspeed.processes.supervision import supervised_workers
from allennlp_deepspeed.processes.worker_device import capabilities
from allennlp_deepspeed.reports.console import ConsoleSettings, prepare_worker, shown_on_console

# What workers use models of transformers for, by keys and types. Where a config doesn't show it,
# each worker imports them itself.
_NEED_TRANSFORMERS = re.compile("transformer|causal_lm|ddp_accelerator")

__all__ = ["check", "has_deepspeed_trainer", "install", "worker_devices", "worker_preparation"]


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
        failures.check_type(params)
        _name_trainer(params)
        is_ours = has_deepspeed_trainer(params.as_dict(quiet=True))
        try:
            if not is_ours:
                check(params)
            else:
                arguments = inspect.signature(train_model).bind(params, *args, **kwargs).arguments
                return _train_ours(train_model, arguments)
        except Exception as error:
            failures.explain(error)
            raise
        return train_model(params, *args, **kwargs)

    checked_train_model.checks_deepspeed = True  # type: ignore[attr-defined]
    train_command.train_model = checked_train_model
    failures.install()


def _name_trainer(params: Params) -> None:
    """Which AllenNLP takes for an object everywhere, but not here with several workers."""
    if isinstance(params.params.get("trainer"), str):
        params.params["trainer"] = {"type": params.params["trainer"]}


def _train_ours(train_model: Callable[..., Any], arguments: Dict[str, Any]) -> Any:
    """Checks, and trains."""
    launched = launcher.detect()
    settings = _console_settings(arguments, launched)
    with ExitStack() as stack:
        # Before anything that can't be forked, such as the thread that draws on the console.
        fork_server = _fork_server(arguments["params"], launched)
        if fork_server is not None:
            stack.enter_context(fork_server)
        if settings is not None and settings.is_shown:
            started_by = None if launched is None else launched.launcher
            stack.enter_context(ends_with_how_to_continue(arguments, started_by))
        stack.enter_context(shown_on_console(settings))
        try:
            if launched is not None:
                launching.into_config(arguments["params"], launched, arguments)
            fill_in(arguments["params"])
            check(arguments["params"])
        except ConfigurationError as error:
            if launched is not None and launched.local_rank != 0:
                failures.leave_to_first(error)
            raise
        return _train(train_model, arguments, launched, settings, fork_server)


def _fork_server(params: Params, launched: Optional[Launched]) -> Optional[ForkServer]:
    """
    For several workers, of the command: a program of the user's may have begun what a fork can't go
    on with, and keep it where it isn't seen.
    """
    has_workers = params.get("distributed") is not None or launched is not None
    if not has_workers or not command() or not is_safe_here():
        return None
    # The compiler, because optimizers leave themselves out of what it compiles.
    modules = ["torch._dynamo"]
    if _NEED_TRANSFORMERS.search(str(params.as_dict(quiet=True))):
        modules.append("transformers.modeling_utils")
    return ForkServer(modules)


def fill_in(params: Params) -> None:
    """
    # Parameters

    params : `Params`, required.
        A whole training configuration. What follows from other keys is written into it.
    """
    config = params.as_dict(quiet=True)
    if not has_deepspeed_trainer(config) or not finds_micro_batch_size(config["trainer"]):
        return
    distributed = config.get("distributed") or {}
    if not isinstance(distributed, dict):
        return
    devices, num_nodes = distributed.get("cuda_devices"), distributed.get("num_nodes", 1)
    has_workers = isinstance(devices, list) and devices and is_integer(num_nodes) and num_nodes > 0
    # Anything else the check refuses.
    if not distributed or has_workers:
        fill_batch_size(params.params, recovery.number_of_workers(params))


def _console_settings(
    arguments: Dict[str, Any], launched: Optional[Launched]
) -> Optional[ConsoleSettings]:
    """`None` where the console is to have the whole log."""
    if wants_whole_log():
        return None
    settings = ConsoleSettings.of_this_process(arguments.get("file_friendly_logging", False))
    # Of the processes of a launcher one shows on each node what they have in common.
    return settings._replace(is_shown=launched is None or launched.local_rank == 0)


def _train(
    train_model: Callable[..., Any],
    arguments: Dict[str, Any],
    launched: Optional[Launched],
    settings: Optional[ConsoleSettings],
    fork_server: Optional[ForkServer],
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
    settings : `ConsoleSettings`, optional
        `None` where the console is to have the whole log.
    fork_server : `ForkServer`, optional
        Of workers.
    """
    params, directory = arguments["params"], arguments["serialization_dir"]
    node_rank = arguments.get("node_rank", 0)
    config = params.as_dict(quiet=True)
    prepare = _read_by_groups(config, worker_preparation(params, directory))
    prepare = functools.partial(_explain_failures, prepare)
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
        if settings is not None:
            prepare = functools.partial(prepare_worker, settings, prepare)
        compare = functools.partial(_compare_vocabularies, job, node_files, directory)
        stack.enter_context(supervised_workers(job, prepare, compare, local_rank, fork_server))
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
        is_first = node_rank == 0 and (launched is None or launched.rank == 0)
        with first_and_last_lines(arguments, is_first):
            return train_model(**arguments)


def _explain_failures(prepare: Optional[Callable[[], None]]) -> None:
    """Has a worker explain why it fails while it is constructed."""
    worker_failure.explain_with(failures.message_of, failures.log_to_files)
    if prepare is not None:
        prepare()


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


def worker_preparation(params: Params, serialization_dir: str) -> Optional[Callable[[], None]]:
    """
    What each worker has to call before AllenNLP constructs its accelerator, which it does before
    the trainer: it tells a "deepspeed" accelerator how the trainer partitions parameters. `None` if
    there is no such accelerator.
    """
    config = params.as_dict(quiet=True)
    accelerator = accelerator_of(config)
    if registered_name(accelerator) != "deepspeed":
        return None
    deepspeed_config = DeepSpeedConfig.of(config["trainer"].get("deepspeed_config"))
    settings = settings_of(config, deepspeed_config, serialization_dir)
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
