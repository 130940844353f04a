"""
Has launchers, such as torchrun, start the `allennlp` command without its imports.

What a launcher starts is `python -m tests.support.launching`, which needs nothing but the standard
library. It hands its environment and its arguments to the test, which runs the command with them in
a process forked from one that has imported everything, on the same of the hosts of
`tests/support/hosts.py`, and ends as that one does.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

ADDRESS = "TESTS_LAUNCHING_ADDRESS"

# What a launcher is to start, after Python's `-m`.
MODULE = "tests.support.launching"


class LaunchedCommands:
    """
    Runs the commands of processes that launchers start. A context.

    # Parameters

    directory : `Path`
        For their output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener = Listener(os.path.join(tempfile.mkdtemp(), "socket"), "AF_UNIX", backlog=16)
        self._processes: List[Any] = []
        self._connections: List[Connection] = []
        self._outputs: List[Path] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "LaunchedCommands":
        from tests.support.command import _context

        # Starts the server, whose imports take longer than a launcher's processes may.
        first = _context.Process(target=int)
        first.start()
        first.join()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *args: Any) -> None:
        from tests.support.command import _signal_session

        self._listener.close()
        for connection in self._connections:
            # What the launcher has started ends with it.
            connection.close()
        for process in self._processes:
            _signal_session(process.pid, signal.SIGKILL)
            process.join()

    def output(self) -> str:
        """Of all commands, and of their workers."""
        return "\n".join(path.read_text(errors="replace") for path in self._outputs)

    def run(
        self,
        launcher: Sequence[Any],
        time_limit: float = 60,
        environment: Optional[Dict[str, str]] = None,
    ) -> "subprocess.CompletedProcess[str]":
        """
        Runs a launcher, whose arguments include `MODULE` and what comes after `allennlp`. After
        `time_limit` seconds it is killed, and so is what it has left, in any case.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                list(map(str, launcher)),
                env={**os.environ, **(environment or {}), ADDRESS: str(self._listener.address)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(time_limit)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            return subprocess.CompletedProcess(launcher, process.returncode, output.read())

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        from tests.support.command import _context, _main, _signal_session
        from tests.support.hosts import enter

        self._connections.append(connection)
        pid, arguments, environment = connection.recv()
        with self._lock:
            output = self._directory / f"output_{len(self._outputs)}"
            output.touch()
            self._outputs.append(output)
            process = _context.Process(
                target=_main, args=(str(output), arguments, environment, partial(enter, pid))
            )
            process.start()
            self._processes.append(process)
        while process.is_alive():
            try:
                while connection.poll(0.1):
                    # Of a launcher, to its process.
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, connection.recv())  # type: ignore[arg-type]
            except (EOFError, OSError):
                # It has been killed.
                _signal_session(process.pid, signal.SIGKILL)
                process.join()
                return
        with suppress(OSError):
            connection.send(process.exitcode)


def main() -> None:
    with Client(os.environ[ADDRESS], "AF_UNIX") as connection:
        connection.send((os.getpid(), ["allennlp", *sys.argv[1:]], dict(os.environ)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: connection.send(int(number)))
        try:
            code = connection.recv()
        except EOFError:  # the test has ended
            sys.exit(1)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
