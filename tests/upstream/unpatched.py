"""
Runs upstream code as it is, in a process that hasn't imported this package, which patches some of
it on import.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Callable

import pytest

TIME_LIMIT = 60  # seconds, for one function

_STANDARD_ERROR = 2


def worked_around_by(workaround: str) -> Callable[[Callable[[], bool]], Callable[..., None]]:
    """
    Makes a test of a function that shows a fault of upstream code, and returns whether it is still
    there. The test fails if it isn't.

    # Parameters

    workaround : `str`
        What works around it, within `allennlp_deepspeed`. Its docstring has a paragraph that begins
        with "Works around".
    """

    def decorate(shows_fault: Callable[[], bool]) -> Callable[..., None]:
        name = shows_fault.__name__.removeprefix("test_").replace("_", " ")

        def test(unpatched: Unpatched) -> None:
            message = f'"{name}" is fixed upstream: remove {workaround}'
            assert unpatched.run(shows_fault) is True, message

        # Not `functools.wraps`: pytest would look at the arguments of what is wrapped.
        test.__name__, test.__module__ = shows_fault.__name__, shows_fault.__module__
        test.__doc__ = shows_fault.__doc__
        test.shows_fault = shows_fault  # type: ignore[attr-defined]
        return pytest.mark.upstream(test)

    return decorate


class Unpatched:
    """
    A process for all tests of a session, because it takes long to import what they need. It has a
    process group of its own, and DeepSpeed computes on the CPU.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, connection = context.Pipe()
        self._process = context.Process(target=_serve, args=(connection,), daemon=True)
        self._process.start()
        connection.close()  # so that the pipe ends with the process

    def run(self, function: Callable[[], Any]) -> Any:
        """
        # Parameters

        function : `Callable[[], Any]`
            One that was given to `worked_around_by`. What it returns is pickled.
        """
        self._connection.send((function.__module__, function.__name__))
        try:
            result, error = self._connection.recv()
        except EOFError:
            pytest.fail("The process that runs upstream code has ended; see its output.")
        if error is not None:
            pytest.fail(f"What shows the fault has failed itself:\n{error}", pytrace=False)
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join(TIME_LIMIT)
        self._process.kill()  # if it hasn't ended


def _serve(connection: Connection) -> None:
    _set_up()
    while True:
        try:
            module, name = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(TIME_LIMIT, exit=True, file=_STANDARD_ERROR)
        try:
            function = getattr(_imported(module), name).shows_fault
            assert "allennlp_deepspeed" not in sys.modules
            answer = function(), None
        except BaseException:
            answer = None, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
        _take_back()


def _imported(name: str) -> ModuleType:
    if name not in sys.modules:
        importlib.import_module(name)
    return sys.modules[name]


def _set_up() -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    torch.set_num_threads(1)
    accelerator = CPU_Accelerator()
    accelerator.is_fp16_supported = lambda: True  # whatever this CPU is
    set_accelerator(accelerator)
    # Otherwise it would be compiled.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo")


def _take_back() -> None:
    """What engines leave in the process, which the next function is not to find."""
    import deepspeed
    import torch
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    deepspeed.comm.configure(enabled=False)
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=False)
    torch.nn.functional.linear = torch._C._nn.linear
    gc.collect()
