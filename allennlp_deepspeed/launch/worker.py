"""
Worker process that trains one rank. It runs all of AllenNLP's train command, whose parent process
prepares the files that workers read. Here the first worker of each serialization directory prepares
them.
"""

import inspect
import logging
import os
import random
import signal
import socket
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, Optional, Tuple
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from allennlp.commands import train as train_command
from allennlp.common.checks import ConfigurationError
from allennlp.common.plugins import import_plugins
from allennlp.common.util import import_module_and_submodules
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from tqdm import tqdm

from allennlp_deepspeed.checkpoint import start_record
from allennlp_deepspeed.engine.process import collectives, interruption, worker_failure
from allennlp_deepspeed.engine.process.interruption import TrainingInterrupted
from allennlp_deepspeed.engine.process.sequence_groups import read_by_groups
from allennlp_deepspeed.engine.process.single_process import as_single_process
from allennlp_deepspeed.launch import (
    error_messages,
    log_files,
    node_comparison,
    nodes,
    process_group,
    resumption,
    unmatched_patterns,
)
from allennlp_deepspeed.launch.agent import Node
from allennlp_deepspeed.launch.console_lines import announce_start_and_end
from allennlp_deepspeed.launch.directory_lock import DirectoryLock
from allennlp_deepspeed.launch.launcher_environment import ALLENNLP, LaunchedProcess
from allennlp_deepspeed.launch.serialization_directory import (
    SerializationDirectory,
    create_once,
)
from allennlp_deepspeed.reports.console_handler import (
    ConsoleSettings,
    disable_progress_bars_of_transformers,
    shown_on_console,
)
from allennlp_deepspeed.versions import differences

logger = logging.getLogger(__name__)


def run(
    node: Node,
    environment: Dict[str, str],
    arguments: Dict[str, Any],
    settings: Optional[ConsoleSettings],
) -> None:
    """
    Runs a worker that an agent has started. Exits with code 1 after any error.

    # Parameters

    node : `Node`, required.
    environment : `Dict[str, str]`, required.
        The environment variables of the agent.
    arguments : `Dict[str, Any]`, required.
        The arguments of AllenNLP's `train_model`.
    settings : `Optional[ConsoleSettings]`, required.
        `None` if the console shows the full log.
    """
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    # Until the training has handlers, and after it. What is ignored stays so, as with `nohup`.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The agent sends SIGTERM then.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        interruption.discard(signal.SIGHUP)
    process = _read_process(node)
    os.environ.update({k: v for k, v in environment.items() if not k.startswith("TORCHELASTIC")})
    set_up_process(process)
    devices = arguments["params"].as_dict(quiet=True)["distributed"]["cuda_devices"]
    if all(device == -1 for device in devices):
        # PyTorch's optimizers and pinned memory would create a context on the first GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _share_cores(node.num_workers)
    # Bars' default is a semaphore of the system's, which a worker that is killed leaves.
    tqdm.set_lock(threading.RLock())
    # A forked process has the random states of the one that it is forked from.
    random.seed()
    numpy.random.seed()
    try:
        with ExitStack() as stack:
            stack.enter_context(
                shown_on_console(settings and settings._replace(is_shown=process.local_rank == 0))
            )
            store = None
            if node.num_nodes == 1:
                store = dist.FileStore(os.path.join(node.directory, "training"))
            if settings is not None:
                disable_progress_bars_of_transformers()
            import_plugins()
            for package in arguments.get("include_package") or []:
                import_module_and_submodules(package)
            train_model = train_command.train_model.__wrapped__  # type: ignore[attr-defined]
            train(train_model, arguments, process, store)
    except BaseException as error:
        failure = worker_failure.report(error)
        if process.serves_other_nodes:
            worker_failure.wait_for_readers(failure)
        sys.exit(1)


def _share_cores(num_workers: int) -> None:
    """
    Divides PyTorch's threads among the workers of a node, unless the user has set their number. On
    a CPU, training with as many threads as cores in each worker may take many times as long,
    because they wait for each other's cores.
    """
    if num_workers > 1 and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}.intersection(os.environ):
        num_threads = max(1, torch.get_num_threads() // num_workers)
        torch.set_num_threads(num_threads)
        # DeepSpeed's operators, and processes that this worker starts, read the variable.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def set_up_process(process: LaunchedProcess) -> None:
    """Makes this process a worker. Must be called first."""
    os.environ.update(process.environment())
    worker_failure.start_reporting(error_messages.config_error_message, error_messages.log_to_files)


def train(
    train_model: Callable[..., Any],
    arguments: Dict[str, Any],
    process: Optional[LaunchedProcess],
    store: Optional[dist.Store] = None,
) -> Any:
    """
    Trains with a config that has been checked, in this process.

    # Parameters

    train_model : `Callable[..., Any]`, required.
        AllenNLP's.
    arguments : `Dict[str, Any]`, required.
        Its arguments.
    process : `Optional[LaunchedProcess]`, required.
        This process, one of several workers. `None` if it is the only one.
    store : `dist.Store`, optional (default = `None`)
        A store that outlives the workers, if that of the process group doesn't.
    """
    params = arguments["params"]
    config = params.as_dict(quiet=True)
    with ExitStack() as stack:
        stack.enter_context(log_files.tolerate_errors())
        directory = None
        if process is not None:
            if process_group.DUMP_VARIABLE not in os.environ:
                stack.callback(os.environ.pop, process_group.DUMP_VARIABLE, None)
            store_of_workers, directory = _join_process_group(config, arguments, process)
            store = store_of_workers if store is None else store
        is_leader = directory is None or directory.is_leader
        lock = DirectoryLock(arguments["serialization_dir"], store)
        with _raise_on_all_ranks():
            if is_leader:
                stack.enter_context(lock)
                if directory is not None:
                    directory.remove_stale_tokens()
        is_ours = stack.enter_context(create_once(store, lock))
        _resume_or_start(arguments, is_leader, is_ours)
        shows = process is None or process.rank == 0
        stack.enter_context(announce_start_and_end(arguments, shows))
        stack.enter_context(unmatched_patterns.named(config))
        if process is not None and directory is not None:
            size = config["trainer"].get("sequence_parallel_size", 1)
            if size > 1:
                read_by_groups(size)
            arguments["return_model"] = False
            spawning = stack.enter_context(ExitStack())
            become_worker = partial(_become_worker, spawning, process, directory)
            spawning.enter_context(as_single_process())
            spawn = SimpleNamespace(spawn=become_worker)
            stack.enter_context(mock.patch.object(train_command, "mp", spawn))
            stack.enter_context(directory.prepare_on_leader())
        try:
            result = train_model(**arguments)
        except TrainingInterrupted:
            if directory is not None:
                directory.wait_for_all()
            raise
        if is_leader:
            start_record.remove(arguments["serialization_dir"])
        if directory is not None:
            directory.wait_for_all()
        return result


def _read_process(node: Node) -> LaunchedProcess:
    """Returns the rank and addresses of this process."""
    local_rank = int(os.environ["LOCAL_RANK"])
    # A worker may have been killed while it wrote to that of the last start.
    name = f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return LaunchedProcess(
        launcher=ALLENNLP,
        rank=node.rank * node.num_workers + local_rank,
        local_rank=local_rank,
        world_size=node.num_nodes * node.num_workers,
        local_world_size=node.num_workers,
        address=node.address,
        port=node.port,
        store_file=os.path.join(node.directory, name) if node.num_nodes == 1 else "",
    )


def _join_process_group(
    config: Dict[str, Any], arguments: Dict[str, Any], process: LaunchedProcess
) -> Tuple[dist.Store, SerializationDirectory]:
    """Starts the process group, and checks that the nodes have the same config and versions."""
    os.register_at_fork(after_in_child=_exit_with_parent)
    distributed = config["distributed"]
    prefix = process_group.collectives_prefix(arguments["serialization_dir"])
    os.environ[process_group.DUMP_VARIABLE] = prefix
    store = process_group.start(
        process,
        distributed["cuda_devices"][process.local_rank],
        nodes.setting(distributed, "rendezvous_timeout"),
        nodes.setting(distributed, "timeout"),
    )
    _check_same_on_all_ranks(node_comparison.comparable_values(config, arguments))
    directory = SerializationDirectory(arguments["serialization_dir"])
    return store, directory


def _exit_with_parent() -> None:
    """
    Makes a process that a worker has forked, such as a data loader's, end when the worker is
    killed, instead of waiting for it forever.
    """
    # Linux takes the end of the thread that has forked it for the end of the parent.
    if threading.current_thread() is threading.main_thread():
        _prctl_pr_set_pdeathsig(signal.SIGKILL)


def _check_same_on_all_ranks(own: Dict[str, Any]) -> None:
    """
    Checks that values are the same on every rank.

    # Raises

    `ConfigurationError`
        On every rank, if they differ.
    """
    everyones = collectives.all_gather_object(
        (f"rank {dist.get_rank()} ({socket.gethostname()})", own)
    )
    lines = differences(everyones)
    if lines:
        raise ConfigurationError(
            "\n".join(["These must be the same on every node, but differ:", *lines])
        )


def _resume_or_start(arguments: Dict[str, Any], is_leader: bool, is_ours: bool) -> None:
    """Decides whether the training is resumed, and prepares its directory."""
    params, path = arguments["params"], arguments["serialization_dir"]
    is_automatic = resumption.is_automatic(params.as_dict(quiet=True))
    # The start that created the directory has removed what --force refers to.
    decides = is_leader and (is_automatic or (is_ours and not arguments.get("recover")))
    continues = False
    with _raise_on_all_ranks():
        if decides:
            force = bool(arguments.get("force")) and not is_ours
            continues = resumption.has_training(path, force)
    continues = any(collectives.all_gather_object(continues))
    with _raise_on_all_ranks():
        if decides and not continues:
            resumption.start_over(path, is_ours)
    if is_automatic or continues:
        arguments.update(recover=continues, force=False)
    with _raise_on_all_ranks():
        if is_leader and arguments.get("recover"):
            resumption.refuse_links(path)
            resumption.accept_changes(params, path)


@contextmanager
def _raise_on_all_ranks() -> Iterator[None]:
    """
    Context manager for code that one rank runs while others wait. Every rank must enter it.

    # Raises

    `PeerFailed`
        On every rank, if another one has raised an exception in it.
    """
    try:
        yield
    except Exception as error:
        collectives.gather_problems(f"{type(error).__name__}: {error}")
        raise
    problems = collectives.gather_problems(None)
    if problems:
        raise worker_failure.PeerFailed(problems[0])


def _become_worker(
    spawning: ExitStack,
    process: LaunchedProcess,
    directory: SerializationDirectory,
    train_worker: Callable[..., Any],
    args: Tuple[Any, ...],
    nprocs: int,
) -> None:
    """Replaces the `spawn` of AllenNLP's train command."""
    directory.wait_until_ready()
    # From here on AllenNLP is to know the other ranks.
    spawning.close()
    # The process group exists already.
    there = SimpleNamespace(init_process_group=_do_nothing, barrier=dist.barrier)
    own = inspect.signature(train_worker).bind(process.local_rank, *args).arguments
    own["params"]["trainer"]["cuda_device"] = own["distributed_device_ids"][process.local_rank]
    with mock.patch.object(train_command, "dist", there), directory.log_by_rank():
        train_worker(**own)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
