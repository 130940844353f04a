"""
A training by a command of its own, whose workers tell a study what they measure.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from evidence import REPOSITORY
from evidence.real.recorder import ENVIRONMENT_VARIABLE, Cell, Result


class Figures(NamedTuple):
    """
    # Parameters

    first_step : `float`
        Seconds from the command until the first optimizer step was made.
    last_step : `float`
        Seconds from the checkpoint after the last optimizer step to the end of the command.
    results : `List[Result]`
        Of each rank.
    """

    first_step: float
    last_step: float
    results: List[Result]


class Command:
    """
    A command that trains. It starts at once, and waits after its warm-up and after each timed
    segment for its turn. To be used as a context manager: at its end none of its processes is left.

    # Parameters

    arguments : `List[str]`
    cell : `Cell`
        Its `output` and its `address` don't exist yet.
    time_limit : `float`
        In seconds.
    """

    def __init__(self, arguments: List[str], cell: Cell, time_limit: float) -> None:
        Path(cell.output).mkdir()
        self._name = Path(cell.output).name
        self._log = Path(f"{cell.output}.log")
        self._deadline = time.monotonic() + time_limit
        self._world_size = cell.world_size
        self._connections: Dict[int, Connection] = {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(cell.address)
        self._server.listen()
        self._server.settimeout(1)
        self._start = time.time()
        self._process = subprocess.Popen(
            arguments,
            # Not the repository, where this package is a plugin of AllenNLP's own trainer, too.
            cwd=cell.data,
            env=_environment(cell),
            stdout=self._log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_warm(self) -> None:
        while len(self._connections) < self._world_size:
            connection = Connection(self._retry(self._accept))
            self._connections[connection.recv()] = connection
        self._first_step = self._receive() - self._start
        self._receive()

    def time_segment(self) -> float:
        """Has the command make the optimizer steps of one segment. Returns their seconds."""
        self._connections[0].send("go")
        return self._receive()

    def finish(self) -> Figures:
        """Has the command make its last steps, save a checkpoint and end."""
        self._connections[0].send("go")
        results = [self._receive(rank) for rank in range(self._world_size)]
        returncode = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        if returncode:
            raise RuntimeError(f"The command of {self._name} failed.\n{self._output()}")
        return Figures(self._first_step, time.time() - results[0].end, results)

    def _accept(self) -> Optional[int]:
        with contextlib.suppress(TimeoutError):
            return self._server.accept()[0].detach()
        return None

    def _receive(self, rank: int = 0) -> Any:
        connection = self._connections[rank]
        self._retry(lambda: connection.poll(1))
        try:
            return connection.recv()
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)  # for its last messages
            raise RuntimeError(
                f"A worker of {self._name} has ended too early.\n{self._output()}"
            ) from None

    def _retry(self, get: Callable[[], Any]) -> Any:
        """Calls `get`, which waits for a second at most, until it returns something."""
        while not (got := get()):
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"The command of {self._name} has ended too early.\n{self._output()}"
                )
            if time.monotonic() > self._deadline:
                raise TimeoutError(
                    f"The command of {self._name} wasn't done in time.\n{self._output()}"
                )
        return got

    def _output(self) -> str:
        return self._log.read_text(errors="replace")[-9000:]

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *args: Any) -> None:
        self._server.close()
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)


def _environment(cell: Cell) -> Dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "HF_HOME": tempfile.gettempdir(),
        ENVIRONMENT_VARIABLE: json.dumps(cell._asdict()),
    }
