"""
Runs commands on simulated GPUs and reads what these have logged.
"""

import json
import os
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence
from unittest import mock

from tests.support.command import (
    REPOSITORY,
    Command,
    ForkedProgram,
    PythonCommand,
    Run,
    subprocess_allennlp,
    wait_for_all,
)

Event = Dict[str, Any]

TIME_LIMIT = 120
"""Seconds for a training, of which most are for its processes to begin."""


class Machine:
    """
    Machine with simulated GPUs.

    # Parameters

    libraries : `Path`
        The directory that `build` has written.
    """

    def __init__(self, libraries: Path) -> None:
        self._libraries = libraries
        self._server: Any = None

    def environment(self, log: Path, num_devices: int = 2, has_nvml: bool = True) -> Dict[str, str]:
        """
        The variables of a process on this machine.

        # Parameters

        log : `Path`
            A directory for what the devices log.
        num_devices : `int`
        has_nvml : `bool`
            Containers without the capability "utility" have none.
        """
        log.mkdir(exist_ok=True)
        paths = [self._libraries, *([self._libraries / "nvml"] if has_nvml else [])]
        return {
            "LD_PRELOAD": str(self._libraries / "libsimulated_gpus.so"),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, paths)),
            "SIMULATED_GPUS": str(num_devices),
            "SIMULATED_GPUS_DIRECTORY": str(log),
            # What a kernel was to write is zero, and not what was there before.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        }

    def allennlp(
        self,
        *arguments: Any,
        log: Path,
        variables: Optional[Dict[str, str]] = None,
        time_limit: float = TIME_LIMIT,
        **kwargs: Any,
    ) -> Run:
        """
        Runs `allennlp` in a process forked from a server of this machine that has imported
        everything. `variables` are set in addition, and `kwargs` are those of `environment`.
        """
        environment = {**self.environment(log, **kwargs), **(variables or {})}
        return self._run(partial(Command, include_packages=()), arguments, time_limit, environment)

    def python(self, *arguments: Any, log: Path, time_limit: float = 3 * TIME_LIMIT) -> Run:
        """Runs `python` with arguments in such a process."""
        return self._run(PythonCommand, arguments, time_limit, self.environment(log))

    @contextmanager
    def forks(self) -> Iterator[None]:
        """Context manager in which commands run in processes forked from this machine's server."""
        if self._server is None:
            self._server = forkserver.ForkServer()
            self._server.set_forkserver_preload(["tests.support.preload"])
            preloaded = self.environment(self._libraries / "log")
            nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            with mock.patch.dict(os.environ, {**preloaded, **nvml}):
                self._server.ensure_running()
        connect = self._server.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            yield

    def _run(
        self,
        program: Callable[..., ForkedProgram],
        arguments: Sequence[Any],
        time_limit: float,
        environment: Dict[str, str],
    ) -> Run:
        with self.forks():
            started = program(*arguments, environment=environment, enter=_show_devices)
        return wait_for_all([started], time_limit)[0]

    def installed_allennlp(
        self,
        *arguments: Any,
        log: Path,
        variables: Optional[Dict[str, str]] = None,
        time_limit: float = 3 * TIME_LIMIT,
        **kwargs: Any,
    ) -> Run:
        """The same for the installed command, which has a fork server of its own."""
        environment = {**os.environ, **self.environment(log, **kwargs), **(variables or {})}
        if not variables or "CUDA_VISIBLE_DEVICES" not in variables:
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # which other tests may have set
        return subprocess_allennlp(
            *arguments, time_limit=time_limit, cwd=REPOSITORY, env=environment
        )


def _show_devices() -> None:
    del os.environ["CUDA_VISIBLE_DEVICES"]  # which the server's imports were not to see


def events(log: Path, *names: str) -> List[Event]:
    """The events that the devices have logged, of all processes one after another."""
    lines = [
        json.loads(line)
        for path in sorted(log.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line["event"] in names]
