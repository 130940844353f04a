"""
Fork server of this package, which imports the workers' modules while the command that has started
it imports them, too. `multiprocessing`'s own server stays the user's.
"""

import ctypes
import itertools
import os
import re
import sys
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, Dict, Iterator, List
from unittest import mock

from allennlp_deepspeed_import_hook import process_setup, temporary_directory

_PRELOAD = "allennlp_deepspeed.launch.preload"

# A launcher has started a process with any of these for one worker.
_OF_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_TASKS_PER_NODE")

_server: Any = forkserver.ForkServer()

# In the text of a config or in overrides: the type of a trainer of this package.
_TYPE = re.compile(r"""type["']?\s*:\s*["']deepspeed""")

# Numbers of the servers' sockets: a server that has ended leaves its own.
_sockets = itertools.count()


def ensure_running() -> None:
    """Starts the fork server, unless it is running. Must be called in the main thread."""
    process_setup.prepare()
    _server.set_forkserver_preload([_PRELOAD])
    variables = {
        "ALLENNLP_DEEPSPEED_FORK_SERVER_OF": str(os.getpid()),
        # A GPU driver that has been initialized can't be used in a forked process; NVML can.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **_hidden_devices(),
    }
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(connection, "arbitrary_address", _socket_path),
    ):
        _server.ensure_running()


def _hidden_devices() -> Dict[str, str]:
    """
    Returns variables that hide the GPUs from the server while it imports, if PyTorch would count
    them by the driver. It doesn't use NVML in containers without it, on Jetson, and for parts of
    GPUs (MIG). DeepSpeed chooses its operators when it is imported.
    """
    has_nvml = not os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") and _has_nvml()
    if has_nvml or _load("libcuda.so.1") is None:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cuda"),
        "ALLENNLP_DEEPSPEED_HIDES": "CUDA_VISIBLE_DEVICES DS_ACCELERATOR",
    }


def _has_nvml() -> bool:
    nvml = _load("libnvidia-ml.so.1")
    return nvml is not None and nvml.nvmlInit_v2() == 0


def _load(library: str) -> Any:
    """Returns a library, `None` if it isn't installed. Loading a driver doesn't initialize it."""
    with suppress(OSError):
        return ctypes.CDLL(library)
    return None


def _socket_path(family: str) -> str:
    """
    Returns a path that the next process removes if this one is killed. It is no longer than one of
    `multiprocessing`, because the system limits the length.
    """
    return os.path.join(temporary_directory.path(), str(next(_sockets)))


@contextmanager
def forking_workers() -> Iterator[None]:
    """
    Context manager in which `multiprocessing`'s start method "forkserver" forks from this server.
    """
    connect = _server.connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        yield


def start_for_command() -> None:
    """
    Starts the fork server if this process is an `allennlp train` that will start workers of this
    package, judging by its arguments and the text of its config.
    """
    texts = _texts_of_training()
    if _is_command() and any("cuda_devices" in text for text in texts) and _is_ours(texts):
        # At a lower level, PyTorch warns with 20 lines of frames at each attempt to reach a store
        # that has ended.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        ensure_running()


def announce_import() -> None:
    """
    Prints on a terminal that the command imports AllenNLP, if it is `allennlp deepspeed` or a
    training with this package.
    """
    if sys.stderr is None or not sys.stderr.isatty() or not _is_command():
        return
    if sys.argv[1:2] == ["deepspeed"] or _is_ours(_texts_of_training()):
        print("Importing AllenNLP ...", file=sys.stderr, flush=True)


def _is_command() -> bool:
    """
    Returns whether this process was started as `allennlp`, by no launcher of workers. A process
    that `multiprocessing` or a library like it starts has the command's `sys.argv`, and imports its
    main module, but its own command line.
    """
    if any(name in os.environ for name in _OF_LAUNCHERS):
        return False
    program = sys.argv[0]
    if program == "-m":  # as long as Python looks for the module to run
        return "allennlp" in sys.orig_argv
    return os.path.basename(program) == "allennlp" and program in sys.orig_argv


def _texts_of_training() -> List[str]:
    """Returns the arguments of `allennlp train`, a config's text in place of its path."""
    return [_text_of(each) for each in sys.argv[1:]] if "train" in sys.argv[1:] else []


def _is_ours(texts: List[str]) -> bool:
    return any(map(_TYPE.search, texts))


def _text_of(argument: str) -> str:
    """Returns the text of the file that an argument names, or the argument itself."""
    with suppress(OSError, ValueError):
        if os.path.isfile(argument):
            return Path(argument).read_text()
    return argument
