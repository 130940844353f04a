"""
Workers that have everything imported when they start: they are forked by `multiprocessing`'s fork
server, which imports `preload` while the command that has started it imports the same.
"""

import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import List
from unittest import mock

from allennlp_deepspeed.announcements import with_quiet_imports

_PRELOAD = "allennlp_deepspeed.launch.preload"

# By any of which a process knows that a launcher has started it for one worker.
_OF_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_TASKS_PER_NODE")


def ensure_running() -> None:
    """Starts the fork server, if it isn't running. To be called by the main thread."""
    multiprocessing.set_forkserver_preload([_PRELOAD])
    variables = {
        "ALLENNLP_DEEPSPEED_FORK_SERVER_OF": str(os.getpid()),
        # The driver of a GPU, once initialized, could not be used in a forked process: NVML can.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with with_quiet_imports(), mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()


def start_for_command() -> None:
    """
    Starts the fork server if this process is an `allennlp train` that is going to start workers, as
    far as its words and its config's text tell. To be called first thing.
    """
    if not any(name in os.environ for name in _OF_LAUNCHERS) and _starts_workers(sys.argv):
        ensure_running()


def _starts_workers(argv: List[str]) -> bool:
    is_command = os.path.basename(argv[0]) == "allennlp" or argv[0].endswith("allennlp/__main__.py")
    return is_command and "train" in argv[1:] and any(map(_names_workers, argv[1:]))


def _names_workers(word: str) -> bool:
    with suppress(OSError, ValueError):
        if os.path.isfile(word):
            word = Path(word).read_text()
    return "cuda_devices" in word
