"""
Runs the `allennlp` command with real worker processes, under a time limit and without leaving any.

The processes are forked from a server that has imported everything, because an import takes longer
than most of the runs. `subprocess_allennlp` is the same without that short cut.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence
from unittest import mock

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]

# The fork server finds the modules to preload, and the workers this package, through the
# environment.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


class Run(NamedTuple):
    """
    What a command left: its exit code (negative for a signal), stdout and stderr as one, the
    processes of its session that were still there after it, and whether it had to be stopped after
    the time limit.
    """

    returncode: int
    output: str
    processes: List[str]
    timed_out: bool = False

    def check(self) -> "Run":
        assert self.returncode == 0, self.output[-6000:]
        return self


def allennlp(
    *arguments: Any,
    time_limit: float = 60,
    include_packages: Sequence[str] = ("allennlp_deepspeed",),
    environment: Optional[Dict[str, str]] = None,
) -> Run:
    """
    Runs `allennlp {arguments}` with the packages included. After `time_limit` seconds every
    process of it prints its stacks and is killed.
    """
    argv = ["allennlp", *map(str, arguments)]
    for package in include_packages:
        argv += ["--include-package", package]
    with tempfile.NamedTemporaryFile(mode="r", prefix="allennlp-", errors="replace") as output:
        process = _context.Process(target=_main, args=(argv, output.name, environment or {}))
        process.start()
        process.join(time_limit)
        timed_out = process.is_alive()
        if timed_out:
            _signal_session(process.pid, signal.SIGUSR1)
            time.sleep(1)
        processes = _session(process.pid)
        # Whatever the command has left goes with it.
        _signal_session(process.pid, signal.SIGKILL)
        process.join()
        return Run(process.exitcode, output.read(), processes, timed_out)


def subprocess_allennlp(*arguments: Any, time_limit: float = 120, **kwargs: Any) -> Run:
    """The installed `allennlp` command, as a user starts it."""
    process = subprocess.Popen(
        [shutil.which("allennlp", path=os.path.dirname(sys.executable)), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **kwargs,
    )
    try:
        output, _ = process.communicate(timeout=time_limit)
    finally:
        processes = _session(process.pid)
        _signal_session(process.pid, signal.SIGKILL)
    return Run(process.returncode, output, processes)


def _main(argv: List[str], output: str, environment: Dict[str, str]) -> None:
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = argv
    # Forked workers inherit it.
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)

    import torch.multiprocessing
    from allennlp.__main__ import run

    # AllenNLP looks through all directories of modules again for each package that it includes.
    unchanged = mock.patch.object(importlib, "invalidate_caches")
    with unchanged, mock.patch.object(torch.multiprocessing, "spawn", fork_workers):
        run()


def fork_workers(function, args=(), nprocs=1, **kwargs):
    """`torch.multiprocessing.spawn`, with workers forked instead of started anew."""
    from torch.multiprocessing import start_processes

    return start_processes(function, args, nprocs, start_method="fork", **kwargs)


def _session(pid: Optional[int]) -> List[str]:
    """The processes of a session, but for those that leave as soon as they see that others have."""
    processes: List[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (OSError, psutil.NoSuchProcess):
            pass
    _, alive = psutil.wait_procs(processes, timeout=5)
    return [str(process) for process in alive]


def _signal_session(pid: Optional[int], signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.killpg(pid, signal_number)
