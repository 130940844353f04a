"""
Runs the `allennlp` command, or Python, with real worker processes, under a time limit and without
leaving any.

The processes are forked from a server that has imported everything, because an import takes longer
than most of the runs. `subprocess_allennlp` is the same without that short cut.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence
from unittest import mock

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]

# The fork server finds the modules to preload, and the workers this package, through the
# environment.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
)
# Tests look for what AllenNLP logs, but for those of the console.
os.environ.setdefault("ALLENNLP_LOG_LEVEL", "INFO")
# Otherwise `argparse` looks in the file system for a translation of each word of its help.
os.environ["LANGUAGE"] = "C"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


# For a process to print where its threads are, and how many frames of each are read in a failure.
_SECONDS_FOR_STACKS = 0.3
_NUM_FRAMES = 6

_LINES_OF_DEFAULT_PLUGINS = tuple(
    f"Plugin {name} available"
    for name in ("allennlp_models", "allennlp_semparse", "allennlp_server")
)


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
        output = _without_outer_frames(self.output) if self.timed_out else self.output
        assert self.returncode == 0, output[-6000:]
        return self

    def lines(self) -> List[str]:
        """
        Returns the lines of the output without AllenNLP's of the plugins that it imports unasked.
        `evidence/requirements.txt` has one.
        """
        lines = self.output.splitlines()
        return [line for line in lines if not line.endswith(_LINES_OF_DEFAULT_PLUGINS)]


class ForkedProgram:
    """
    A program that has been started, in a process forked from the server. `wait_for_all` ends it.

    # Parameters

    main : `Callable[..., None]`
        What it does. The first argument is the path of its output.
    args : `Any`
        The others.
    """

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        descriptor, self._output_path = tempfile.mkstemp(prefix="allennlp-")
        os.close(descriptor)
        self._process = _context.Process(target=main, args=(self._output_path, *args))
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the parent, which is the session of its workers too."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def output(self) -> str:
        """What it has printed so far."""
        return Path(self._output_path).read_text(errors="replace")

    def wait_until_it_prints(self, text: str, time_limit: float = 60) -> None:
        """Fails if it ends or `time_limit` seconds are over before `text` is in its output."""
        deadline = time.monotonic() + time_limit
        while text not in self.output():
            assert self.is_running and time.monotonic() < deadline, self.output()[-6000:]
            time.sleep(0.01)

    def signal(self, signal_number: int) -> None:
        """Sends a signal to all of its processes, of which SIGSTOP and SIGKILL can't be handled."""
        _signal_session(self.pid, signal_number)

    def print_stacks(self) -> None:
        """Has each of its processes do so, one after another, to keep them apart."""
        for process in _session(self.pid, timeout=0):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
            time.sleep(_SECONDS_FOR_STACKS)

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    def end(self, timed_out: bool) -> Run:
        """Kills whatever it has left."""
        # Those that print on would bury their stacks.
        timeout = 0 if timed_out else 5
        processes = [str(process) for process in _session(self.pid, timeout)]
        self.signal(signal.SIGKILL)
        self._process.join()
        output = self.output()
        os.remove(self._output_path)
        assert self._process.exitcode is not None
        return Run(self._process.exitcode, output, processes, timed_out)


class Command(ForkedProgram):
    """
    An `allennlp` command that has been started.

    # Parameters

    arguments : `Any`
        What comes after `allennlp`.
    include_packages : `Sequence[str]`, optional (default = `("allennlp_deepspeed",)`)
    environment : `Dict[str, str]`, optional (default = `None`)
        Variables to set.
    enter : `Callable[[], None]`, optional (default = `None`)
        Called in the process of the command before anything else.
    """

    def __init__(
        self,
        *arguments: Any,
        include_packages: Sequence[str] = ("allennlp_deepspeed",),
        environment: Optional[Dict[str, str]] = None,
        enter: Optional[Callable[[], None]] = None,
    ) -> None:
        argv = ["allennlp", *map(str, arguments)]
        for package in include_packages:
            argv += ["--include-package", package]
        super().__init__(_main, argv, environment, enter)


class PythonCommand(ForkedProgram):
    """
    `python` with arguments, of which the first are "-m" and a module, or a script. Of all that it
    imports, the most is there.

    # Parameters

    arguments : `Any`
    cwd : `Path`, optional (default = the repository)
    environment : `Dict[str, str]`, optional (default = `None`)
    enter : `Callable[[], None]`, optional (default = `None`)
        Both as those of `Command`.
    """

    def __init__(
        self,
        *arguments: Any,
        cwd: Path = REPOSITORY,
        environment: Optional[Dict[str, str]] = None,
        enter: Optional[Callable[[], None]] = None,
    ) -> None:
        super().__init__(
            _run_python, [str(argument) for argument in arguments], cwd, environment, enter
        )


def wait_for_all(commands: Sequence[ForkedProgram], time_limit: float) -> List[Run]:
    """
    Waits for commands that need one another. After `time_limit` seconds in all, every process of
    those that are left prints its stacks and is killed.
    """
    deadline = time.monotonic() + time_limit
    for command in commands:
        command.join(max(0, deadline - time.monotonic()))
    late = [command for command in commands if command.is_running]
    for command in late:
        command.print_stacks()
    return [command.end(timed_out=command in late) for command in commands]


def allennlp(*arguments: Any, time_limit: float = 60, **kwargs: Any) -> Run:
    """
    Runs `allennlp {arguments}` with the packages included. After `time_limit` seconds every
    process of it prints its stacks and is killed. Other arguments are those of `Command`.
    """
    return wait_for_all([Command(*arguments, **kwargs)], time_limit)[0]


def python(*arguments: Any, time_limit: float = 60, **kwargs: Any) -> Run:
    """The same for a `PythonCommand`."""
    return wait_for_all([PythonCommand(*arguments, **kwargs)], time_limit)[0]


def subprocess_allennlp(*arguments: Any, time_limit: float = 120, **kwargs: Any) -> Run:
    """The installed `allennlp` command, as a user starts it. It has a fork server of its own."""
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
        processes = [str(process) for process in _session(process.pid)]
        _signal_session(process.pid, signal.SIGKILL)
    return Run(process.returncode, output, processes)


def _begin(
    output: str, environment: Optional[Dict[str, str]], enter: Optional[Callable[[], None]]
) -> None:
    """Leads a session, prints to a file, and prints its stacks there if it is told to."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` has ignored
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Forked workers inherit it.
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    if enter is not None:
        enter()
    os.environ.update(environment or {})


def _run_python(
    output: str,
    arguments: List[str],
    cwd: Path,
    environment: Optional[Dict[str, str]],
    enter: Optional[Callable[[], None]],
) -> None:
    _begin(output, environment, enter)
    os.chdir(cwd)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _main(
    output: str,
    argv: List[str],
    environment: Optional[Dict[str, str]],
    enter: Optional[Callable[[], None]],
) -> None:
    _begin(output, environment, enter)
    sys.argv = argv

    import allennlp.common.util
    import torch.multiprocessing
    from allennlp.__main__ import run

    from allennlp_deepspeed.launch import agent

    # This is a fork of a process that has imported everything already.
    forked = mock.patch.object(agent, "START_METHOD", "fork")
    # AllenNLP's own trainer has its workers started by this.
    fork = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    spawned = mock.patch.object(torch.multiprocessing, "spawn", fork)
    port = mock.patch.object(allennlp.common.util, "find_open_port", _find_port)
    with forked, spawned, port:
        try:
            run()
        except Exception:
            # Of which AllenNLP has its log files told. `multiprocessing` doesn't ask it.
            sys.excepthook(*sys.exc_info())
            sys.exit(1)


def _find_port() -> int:
    """
    A free one. The system gives none of these to a program that asks for any, as the workers of all
    trainings do, of which one could have it before the store of this one listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def _session(pid: Optional[int], timeout: float = 5) -> List[psutil.Process]:
    """The processes of a session, but for those that leave as soon as they see that others have."""
    processes: List[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (OSError, psutil.NoSuchProcess):
            pass
    _, alive = psutil.wait_procs(processes, timeout)
    return alive


def _without_outer_frames(output: str) -> str:
    """The output with the innermost frames of each stack that it has: where a thread waits."""
    lines: List[str] = []
    num_frames = 0
    for line in output.splitlines():
        num_frames = num_frames + 1 if line.startswith("  File ") else 0
        if num_frames <= _NUM_FRAMES:
            lines.append(line)
    return "\n".join(lines)


def _signal_session(pid: Optional[int], signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.killpg(pid, signal_number)
