"""
Has DeepSpeed bring up an engine in fp16 on any CPU, for tests of what is to train on a GPU. By
itself it does only on CPUs that have instructions for it; PyTorch computes in it on all of them.
"""

from typing import List
from unittest import mock

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

_do_sanity_check = DeepSpeedEngine._do_sanity_check
_supported_dtypes = CPU_Accelerator.supported_dtypes


def _check_other_types(engine: DeepSpeedEngine) -> None:
    # Not always: Muon too asks for it, and would step in another precision than on this CPU.
    with mock.patch.object(CPU_Accelerator, "is_fp16_supported", lambda self: True):
        _do_sanity_check(engine)


def _supported_dtypes_and_fp16(accelerator: CPU_Accelerator) -> List[torch.dtype]:
    """Those of gradients that are reduced."""
    return list({*_supported_dtypes(accelerator), torch.float16})


CPU_Accelerator.supported_dtypes = _supported_dtypes_and_fp16  # type: ignore[method-assign]
DeepSpeedEngine._do_sanity_check = _check_other_types  # type: ignore[method-assign]
