"""
Train function for the "deepspeed" trainer. AllenNLP's own starts its workers itself, after it has
made the vocabulary. Here each worker runs all of it: the leader of each serialization directory
creates the directory and the vocabulary, all construct and run the train loop, and the leader
archives the model.
"""

import logging
import os
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch.distributed as dist
from allennlp.commands.train import TrainModel
from allennlp.common import Params
from allennlp.common import logging as common_logging
from allennlp.common import util as common_util
from allennlp.common.checks import ConfigurationError
from allennlp.common.plugins import import_plugins
from allennlp.data import Vocabulary
from allennlp.models import Model, archival
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training.util import make_vocab_from_params
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from allennlp_deepspeed.checkpoint import start_record, vocabulary_files
from allennlp_deepspeed.engine.process import collectives, worker_failure
from allennlp_deepspeed.engine.process.interruption import TrainingInterrupted
from allennlp_deepspeed.engine.process.sequence_groups import read_by_groups
from allennlp_deepspeed.engine.process.single_process import as_single_process
from allennlp_deepspeed.launch import (
    log_files,
    node_comparison,
    nodes,
    process_group,
    resumption,
    unmatched_patterns,
)
from allennlp_deepspeed.launch.config_warnings import warnings_about
from allennlp_deepspeed.launch.console_lines import announce_start_and_end, is_command
from allennlp_deepspeed.launch.launcher_environment import LaunchedProcess
from allennlp_deepspeed.launch.serialization_directory import SerializationDirectory
from allennlp_deepspeed.versions import differences

logger = logging.getLogger(__name__)

Arguments = Dict[str, Any]


def train(
    arguments: Arguments, process: Optional[LaunchedProcess], store: Optional[dist.Store] = None
) -> Optional[Model]:
    """
    Trains with a config that has been checked, in this process.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        The arguments of AllenNLP's `train_model`.
    process : `Optional[LaunchedProcess]`, required.
        This process, one of several workers. `None` if it is the only one.
    store : `dist.Store`, optional (default = `None`)
        A store that outlives the workers, if that of the process group doesn't.

    # Returns

    `Optional[Model]`
        The trained model of a single process, which isn't one of several workers. `None` if
        `dry_run` is set.
    """
    params, path = arguments["params"], arguments["serialization_dir"]
    common_logging.FILE_FRIENDLY_LOGGING = bool(arguments.get("file_friendly_logging"))
    with ExitStack() as stack:
        stack.enter_context(log_files.errors_of_threads(process is not None or is_command()))
        if process is not None:
            import_plugins()
            for package in arguments.get("include_package") or []:
                common_util.import_module_and_submodules(package)
            if process_group.DUMP_VARIABLE not in os.environ:
                stack.callback(os.environ.pop, process_group.DUMP_VARIABLE, None)
            store_of_workers = _join_process_group(arguments, process)
            store = store_of_workers if store is None else store
        directory = SerializationDirectory(path, store)
        _resume_or_start(arguments, directory, stack)
        stack.enter_context(unmatched_patterns.named(params.as_dict(quiet=True)))
        if directory.is_leader:
            stack.enter_context(directory.recording_vocabulary())
        shows = process is None or process.rank == 0
        # Reading the data of a vocabulary may take any time.
        with _raise_on_all_ranks(partial(collectives.wait_for_ranks, "directory is ready")):
            if directory.is_leader:
                _create_directory(arguments, directory)
            if shows:
                for warning in warnings_about(params.as_dict(quiet=True)):
                    logger.warning("%s.", warning)
            stack.enter_context(announce_start_and_end(arguments, shows))
            tokens = {} if process is None else _make_vocabulary(arguments, directory)
        try:
            model = _train_rank(arguments, process, directory, tokens)
        except TrainingInterrupted:
            directory.wait_for_all()
            raise
        if directory.is_leader:
            start_record.remove(path)
        directory.wait_for_all()
        return model


def _join_process_group(arguments: Arguments, process: LaunchedProcess) -> dist.Store:
    """Starts the process group, and checks that the nodes have the same config and versions."""
    config = arguments["params"].as_dict(quiet=True)
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
    name = f"rank {process.rank} ({socket.gethostname()})"
    own = node_comparison.comparable_values(config, arguments)
    lines = differences(collectives.all_gather_object((name, own)))
    if lines:
        raise ConfigurationError(
            "\n".join(["These must be the same on every node, but differ:", *lines])
        )
    return store


def _exit_with_parent() -> None:
    """
    Makes a process that a worker has forked, such as a data loader's, end when the worker is
    killed, instead of waiting for it forever.
    """
    # Linux takes the end of the thread that has forked it for the end of the parent.
    if threading.current_thread() is threading.main_thread():
        _prctl_pr_set_pdeathsig(signal.SIGKILL)


def _resume_or_start(
    arguments: Arguments, directory: SerializationDirectory, stack: ExitStack
) -> None:
    """Locks the directory, and decides whether its training is resumed."""
    is_automatic = resumption.is_automatic(arguments["params"].as_dict(quiet=True))
    if directory.is_ours:
        # The start that created the directory has removed what --force refers to.
        arguments["force"] = False
    continues = False
    with _raise_on_all_ranks():
        if directory.is_leader:
            stack.enter_context(directory.lock)
            directory.remove_stale_tokens()
            if is_automatic or (directory.is_ours and not arguments.get("recover")):
                continues = resumption.has_training(
                    arguments["serialization_dir"], bool(arguments.get("force"))
                )
    continues = any(collectives.all_gather_object(continues))
    if is_automatic or continues:
        arguments.update(recover=continues, force=False)


def _create_directory(arguments: Arguments, directory: SerializationDirectory) -> None:
    params, path = arguments["params"], arguments["serialization_dir"]
    recover = bool(arguments.get("recover"))
    archival.verify_include_in_archive(params.get("include_in_archive"))
    if recover:
        resumption.refuse_links(path)
        resumption.accept_changes(params, path)
    elif resumption.is_automatic(params.as_dict(quiet=True)) or directory.is_ours:
        resumption.start_over(path, directory.is_ours)
    directory.create(params, recover, bool(arguments.get("force")))
    log_files.prepare(path)


def _make_vocabulary(arguments: Arguments, directory: SerializationDirectory) -> Dict[str, str]:
    """
    Has the leader make the vocabulary from all data, because each worker reads a part of them.
    Returns its special tokens, as far as this rank knows them.
    """
    params, names = arguments["params"], ("padding_token", "oov_token")
    if directory.is_leader and not arguments.get("recover"):
        with as_single_process():
            vocabulary = make_vocab_from_params(
                params.duplicate(),
                arguments["serialization_dir"],
                print_statistics=bool(arguments.get("dry_run")),
            )
        return {name: getattr(vocabulary, f"_{name}") for name in names}
    section = params.get("vocabulary", {})
    if directory.is_leader and section.get("type") == "from_pretrained_transformer":
        # Its tokens are the tokenizer's, and files don't have them. It reads no data.
        vocabulary = Vocabulary.from_params(section.duplicate())
        return {name: getattr(vocabulary, f"_{name}") for name in names}
    return {name: section[name] for name in names if name in section}


def _train_rank(
    arguments: Arguments,
    process: Optional[LaunchedProcess],
    directory: SerializationDirectory,
    tokens: Dict[str, str],
) -> Optional[Model]:
    """Constructs the train loop, runs it, and archives the model."""
    params, path = arguments["params"], arguments["serialization_dir"]
    params.pop("evaluation", None)
    include_in_archive = params.pop("include_in_archive", None)
    distributed = params.params.pop("distributed", None)
    accelerator = None
    if process is not None:
        params["vocabulary"] = {
            "type": "from_files",
            "directory": os.path.join(path, vocabulary_files.DIRECTORY),
            **collectives.all_gather_object(tokens)[directory.leader],
        }
        log_files.prepare(path, directory.worker_name, is_shown=process.local_rank == 0)
        accelerator = _configure_worker(params, distributed, process)
    common_util.prepare_environment(params)
    train_loop = TrainModel.from_params(
        params=params,
        serialization_dir=path,
        local_rank=0 if process is None else process.local_rank,
        ddp_accelerator=accelerator,
    )
    if arguments.get("dry_run"):
        return None
    archive = partial(archival.archive_model, path, include_in_archive=include_in_archive)
    try:
        metrics = train_loop.run()
    except (KeyboardInterrupt, common_util.SigTermReceived):
        if directory.is_leader:
            best_weights = train_loop.trainer.get_best_weights_path()
            if best_weights is None:
                logger.info("Interrupted: no best model has been saved. No model archive created.")
            else:
                logger.info(
                    "Interrupted. Attempting to create a model archive using the current best "
                    "epoch weights."
                )
                archive(weights=best_weights)
        raise
    if directory.is_leader:
        train_loop.finish(metrics)
        archive()
    return train_loop.model if process is None else None


def _configure_worker(
    params: Params, distributed: Dict[str, Any], process: LaunchedProcess
) -> Optional[DdpAccelerator]:
    """Sets what AllenNLP's objects read of the rank, and returns the accelerator of the config."""
    device = int(distributed["cuda_devices"][process.local_rank])
    rank: Any = {"local_rank": process.local_rank, "world_size": process.world_size}
    os.environ["ALLENNLP_PROCS_PER_NODE"] = str(process.local_world_size)
    params["trainer"].update(cuda_device=device, distributed=True, **rank)
    size = params["trainer"].get("sequence_parallel_size", 1)
    if size > 1:
        read_by_groups(size)
    section = Params(distributed).get("ddp_accelerator")  # a name, or an object
    if section is None:
        return None
    return DdpAccelerator.from_params(section, cuda_device=device, **rank)


@contextmanager
def _raise_on_all_ranks(
    gather_problems: Callable[[Optional[str]], List[str]] = collectives.gather_problems,
) -> Iterator[None]:
    """
    Context manager for code that the leaders run while the other ranks wait. Every rank must enter
    it.

    # Parameters

    gather_problems : `Callable[[Optional[str]], List[str]]`, optional
        Waits for all ranks, and returns their problems. By default it is a collective.

    # Raises

    `PeerFailed`
        On every rank, if another one has raised an exception in it.
    """
    try:
        yield
    except BaseException as error:
        gather_problems(f"{type(error).__name__}: {error}")
        raise
    problems = gather_problems(None)
    if problems:
        raise worker_failure.PeerFailed(problems[0])
