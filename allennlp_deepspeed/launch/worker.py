"""Worker process that trains one rank."""

import os
import random
import signal
import sys
import threading
from contextlib import ExitStack
from typing import Any, Dict, Optional

import numpy
import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from tqdm import tqdm

from allennlp_deepspeed.engine.process import interruption, worker_failure
from allennlp_deepspeed.launch import error_messages, train_function
from allennlp_deepspeed.launch.agent import Node
from allennlp_deepspeed.launch.launcher_environment import ALLENNLP, LaunchedProcess
from allennlp_deepspeed.reports.console_handler import (
    ConsoleSettings,
    disable_progress_bars_of_transformers,
    shown_on_console,
)


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
            train_function.train(arguments, process, store)
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
