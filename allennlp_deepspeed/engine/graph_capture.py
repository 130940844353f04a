"""
The question of an optimizer whether its step is recorded in a graph of a GPU's.
"""

from contextlib import ExitStack, contextmanager
from typing import Iterator
from unittest import mock

from deepspeed.runtime.engine import DeepSpeedEngine

# That of PyTorch 2.11 is the second.
_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")


@contextmanager
def no_check_on_cpu(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Within it the optimizer of an engine on the CPU doesn't ask. On GPUs it does.

    Mends PyTorch 2.14.1: each optimizer step looks for GPUs, and where there are none it looks for
    their driver again each time. Gone when a step on the CPU doesn't count devices.
    """
    optimizer = engine.basic_optimizer
    with ExitStack() as undo:
        if engine.device.type == "cpu":
            for name in _CHECKS:
                if hasattr(optimizer, name):
                    undo.enter_context(mock.patch.object(optimizer, name, lambda: None))
        yield
