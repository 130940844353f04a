"""
Imports the public names of DeepSpeed that this package uses, so that only this module changes when
a release moves one. Private attributes are in `engine/internals.py`.
"""

from deepspeed import zero
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfigError, DtypeEnum
from deepspeed.runtime.config import DeepSpeedConfig as EngineConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.torch_autocast import get_comm_dtype
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_set_local_fp32_param,
    set_z3_leaf_module,
    z3_leaf_module,
    z3_leaf_parameter,
)
from deepspeed.utils.torch import is_functorch_transforming

__all__ = [
    "BF16_Optimizer",
    "CPU_Accelerator",
    "CUDA_Accelerator",
    "DEEPSPEED_OPTIMIZERS",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOptimizer",
    "DtypeEnum",
    "EngineConfig",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "FusedAdam",
    "GatheredParameters",
    "OffloadDeviceEnum",
    "PartitionedParameterCoordinator",
    "ZERO_OPTIMIZATION",
    "accelerator_name",
    "get_accelerator",
    "get_comm_dtype",
    "installed_ops",
    "is_functorch_transforming",
    "lr_schedules",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_set_local_fp32_param",
    "set_accelerator",
    "set_z3_leaf_module",
    "unregister_external_parameter",
    "z3_leaf_module",
    "z3_leaf_parameter",
    "zero",
]
