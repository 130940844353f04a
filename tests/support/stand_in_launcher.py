"""
A stand-in for launchers that need a cluster: starts processes on this machine with the environment
that the real one gives them, passes signals on, and ends all if one fails.

    python -m tests.support.stand_in_launcher srun 2 COMMAND...    # two processes
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Callable, Dict, List

Environment = Dict[str, str]


def srun(rank: int, size: int) -> Environment:
    """Slurm 23, a step of a job. Those without STEP are of the allocation, which has more tasks."""
    return {
        "SLURM_JOB_ID": str(4_000_000 + os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "64",
        "SLURM_JOB_NODELIST": "node[001-016]",
        "SLURM_STEP_NODELIST": "node001",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def environment(rank: int, size: int) -> Environment:
    """PyTorch's `env://`, by hand."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": os.environ["PORT_OF_ENVIRONMENT"],
    }


_LAUNCHERS: Dict[str, Callable[[int, int], Environment]] = {
    "srun": srun,
    "environment": environment,
}


def _find_port() -> int:
    """
    A free one, as `tests.support.command` finds it: none that the system gives to a program that
    asks for any.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def main(name: str, size: int, command: List[str]) -> int:
    os.environ["PORT_OF_ENVIRONMENT"] = str(_find_port())
    processes = [
        subprocess.Popen(command, env={**os.environ, **_LAUNCHERS[name](rank, size)})
        for rank in range(size)
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: [p.send_signal(number) for p in processes])
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            break
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        process.wait()
    return failed[0] if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
