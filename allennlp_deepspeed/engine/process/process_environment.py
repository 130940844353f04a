"""
Prepares a process for DeepSpeed: the environment variables that it reads, and the process group of
training in a single process. (`launch/process_group.py` initializes that of several workers.)
"""

import importlib
import os
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, Optional
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.deepspeed_api import (
    CPU_Accelerator,
    CUDA_Accelerator,
    get_accelerator,
    set_accelerator,
)
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.process import deepspeed_logging, network_interfaces
from allennlp_deepspeed.engine.process.single_process import as_single_process

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class SharedContext:
    """
    Context that is entered once for all of its users in the process, which may leave it in any
    order.

    # Parameters

    enter : `Callable[..., ContextManager[None]]`, required.
    """

    def __init__(self, enter: Callable[..., ContextManager[None]]) -> None:
        self._enter = enter
        self._undo = ExitStack()
        self.num_users = 0

    @contextmanager
    def used(self, *args: Any) -> Iterator[None]:
        """Context manager of one user. `args` are those of `enter`, if it is the first one."""
        if self.num_users == 0:
            self._undo.enter_context(self._enter(*args))
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
            if self.num_users == 0:
                self._undo.close()


def process_environment(device: torch.device, local_rank: int) -> ContextManager[None]:
    """
    Context manager that provides a process group and the variables of DeepSpeed's launcher. It may
    be nested; the last exit tears the environment down.

    # Parameters

    device : `torch.device`, required.
        The device of this worker.
    local_rank : `int`, required.
        The worker's rank on its node.
    """
    return _environment.used(device, local_rank)


@contextmanager
def _set_up_environment(device: torch.device, local_rank: int) -> Iterator[None]:
    with ExitStack() as undo:
        use_accelerator(device)
        _skip_shared_memory_all_reduce()
        undo.enter_context(deepspeed_logging.log_through_allennlp())
        if not dist.is_initialized():
            names = network_interfaces.VARIABLES
            undo.callback(_restore_environment, {n: os.environ.get(n) for n in names})
            network_interfaces.select_loopback()
            # Its store is in memory, so that it needs no port.
            dist.init_process_group(
                backend="gloo" if device.type == "cpu" else "nccl",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                # Without it, NCCL makes barriers on the first GPU.
                device_id=None
                if device.type == "cpu"
                else torch.device(device.type, device_index(device, local_rank)),
            )
            undo.callback(_destroy_process_group)
            undo.enter_context(as_single_process())
        undo.callback(_restore_environment, {n: os.environ.get(n) for n in _LAUNCHER_VARIABLES})
        # `LOCAL_RANK` is the device's index, which DeepSpeed reads it as.
        values = (dist.get_rank(), device_index(device, local_rank), dist.get_world_size())
        os.environ.update(dict(zip(_LAUNCHER_VARIABLES, map(str, values))))
        undo.enter_context(_restore_global_state())
        yield


_environment = SharedContext(_set_up_environment)


def _destroy_process_group() -> None:
    # DeepSpeed's function, because it also resets the groups that it derived from this one. Its
    # process group isn't initialized if DeepSpeed has not started yet.
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def use_accelerator(device: torch.device) -> None:
    """
    Sets DeepSpeed's accelerator. By default it is the best device that DeepSpeed finds, but
    AllenNLP trains on the one that the config names.
    """
    if get_accelerator().device_name() != device.type:
        if _environment.num_users > 0:
            # Its process group is for that device.
            raise ConfigurationError(
                f"Another trainer of this process still uses '{get_accelerator().device_name()}': "
                f"call its `close()` before constructing one on '{device.type}', or use the same "
                "'cuda_device' for both."
            )
        set_accelerator(CPU_Accelerator() if device.type == "cpu" else CUDA_Accelerator())


@contextmanager
def _restore_global_state() -> Iterator[None]:
    """
    Context manager that restores the global state of DeepSpeed and PyTorch that engines change, and
    leave changed when they are destroyed (`DeepSpeedWrappedModel.tear_down`).
    """
    try:
        with (
            mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
            internals.without_autocast(),
        ):
            yield
    finally:
        deepspeed.comm.configure(enabled=False)
        deepspeed.comm.reset_log()
        if deepspeed.checkpointing.is_configured():
            deepspeed.checkpointing.reset()
            internals.disable_activation_checkpointing()


def _skip_shared_memory_all_reduce() -> None:
    """
    Prevents DeepSpeed from compiling an all-reduce for inference, which training never calls.

    Without this workaround, each training on CPUs needs a C++ compiler and takes two minutes more
    on its first start. With PyTorch before 2.14 it waits forever for the lock of a worker that was
    killed during the compilation.

    Works around DeepSpeed 0.19.8: on CPUs, it compiles at its start an all-reduce for inference,
    which training never calls. This needs a compiler, and can take minutes. Gone when
    `build_shm_op` is not called by the constructor of `TorchBackend`.
    """
    # Even to check for this operator, DeepSpeed runs the compiler to find which ones it could
    # build. As an attribute of `deepspeed.comm`, `torch` is PyTorch.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    internals.disable_shared_memory_all_reduce(backend)


def device_index(device: torch.device, local_rank: int) -> int:
    return local_rank if device.index is None else device.index


def _restore_environment(values: Dict[str, Optional[str]]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
