"""
Starts `multiprocessing`'s fork server, which imports the workers' modules while the command that
has started it imports them, too.
"""

import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import List
from unittest import mock

from allennlp_deepspeed_import_hook import process_setup

_PRELOAD = "allennlp_deepspeed.launch.preload"

# A launcher has started a process with any of these for one worker.
_OF_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_TASKS_PER_NODE")


def ensure_running() -> None:
    """Starts the fork server, unless it is running. Must be called in the main thread."""
    process_setup.prepare()
    multiprocessing.set_forkserver_preload([_PRELOAD])
    variables = {
        "ALLENNLP_DEEPSPEED_FORK_SERVER_OF": str(os.getpid()),
        # A GPU driver that has been initialized can't be used in a forked process; NVML can.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()


def start_for_command() -> None:
    """
    Starts the fork server if this process is an `allennlp train` that will start workers of this
    package, judging by its arguments and the text of its config.
    """
    if not any(name in os.environ for name in _OF_LAUNCHERS) and _starts_workers(sys.argv):
        # At a lower level, PyTorch warns with 20 lines of frames at each attempt to reach a store
        # that has ended.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        ensure_running()


def _starts_workers(argv: List[str]) -> bool:
    is_command = os.path.basename(argv[0]) == "allennlp" or argv[0].endswith("allennlp/__main__.py")
    if not is_command or "train" not in argv[1:]:
        return False
    texts = [_text_of(argument) for argument in argv[1:]]
    return all(any(word in text for text in texts) for word in ("cuda_devices", "deepspeed"))


def _text_of(argument: str) -> str:
    """Returns the text of the file that an argument names, or the argument itself."""
    with suppress(OSError, ValueError):
        if os.path.isfile(argument):
            return Path(argument).read_text()
    return argument
