"""
Models DeepSpeed's configuration schema with pydantic, as the list of known keys.

DeepSpeed models some of its sections with pydantic. It reads the others as dictionaries and ignores
unknown keys in them. Each of those has a model here. The sections that can't work in an AllenNLP
trainer have any type: `unsupported_keys` has the reason.
"""

import inspect
from types import ModuleType
from typing import Annotated, Any, Callable, Dict, List, Optional

import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import AfterValidator
from pydantic.types import NonNegativeFloat, PositiveFloat, PositiveInt, StrictBool

from allennlp_deepspeed.config.key_validation import did_you_mean


def _one_of(*known: str, spelling: Callable[[str], str] = str) -> AfterValidator:
    """Validates a string that DeepSpeed normalizes to one `spelling` and looks up among `known`."""

    def check(value: Optional[str]) -> Optional[str]:
        if value is not None and spelling(value) not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return value

    return AfterValidator(check)


def _classes(module: ModuleType, base: type) -> Dict[str, type]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }


_TORCH_OPTIMIZERS = _classes(torch.optim, torch.optim.Optimizer)
_SCHEDULERS = {
    **{name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES},
    **_classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
}
# DeepSpeed steps its scheduler without the metric that this scheduler of PyTorch's needs.
del _SCHEDULERS["ReduceLROnPlateau"]

# Removed optimizers of DeepSpeed's, and their equivalents without compressed communication.
_FORMER_OPTIMIZERS = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}


def _check_optimizer_type(name: str) -> str:
    known = [*ds_config.DEEPSPEED_OPTIMIZERS, *_TORCH_OPTIMIZERS]
    if name.lower() in _FORMER_OPTIMIZERS:
        raise ValueError(
            "DeepSpeed has removed its optimizers with compressed gradients; write "
            f'"{_FORMER_OPTIMIZERS[name.lower()]}"'
        )
    if name.lower() in ds_config.DEEPSPEED_OPTIMIZERS or name in known:
        return name
    raise ValueError(f"must be an optimizer of DeepSpeed's or torch's; {did_you_mean(name, known)}")


def _check_scheduler_type(name: str) -> str:
    if name not in _SCHEDULERS:
        hint = did_you_mean(name, list(_SCHEDULERS))
        raise ValueError(f"must be a learning rate scheduler of DeepSpeed's or torch's; {hint}")
    return name


def scheduler_parameters(name: str) -> Dict[str, inspect.Parameter]:
    """Returns the valid `scheduler.params` of a type; empty if the type is unknown."""
    if name not in _SCHEDULERS:
        return {}
    parameters = inspect.signature(_SCHEDULERS[name]).parameters
    return {key: value for key, value in parameters.items() if key != "optimizer"}


class _Optimizer(DeepSpeedConfigModel):
    type: Annotated[str, AfterValidator(_check_optimizer_type)]
    params: Dict[str, Any] = {}
    legacy_fusion: bool = False


class _Scheduler(DeepSpeedConfigModel):
    type: Annotated[str, AfterValidator(_check_scheduler_type)]
    params: Dict[str, Any] = {}


# DeepSpeed doesn't convert the values of a section that it reads as a dictionary: there, the string
# "false" is true.
_Bool = Optional[StrictBool]
_Int = Optional[int]
_DTYPES = ("fp16", "float16", "half", "fp32", "float32", "float", "bf16", "bfloat16", "int8")
_DType = Annotated[
    Optional[str],
    _one_of(*_DTYPES, *(f"torch.{name}" for name in _DTYPES if "float" in name or name == "int8")),
]


class _TorchAutocast(DeepSpeedConfigModel):
    enabled: _Bool = None
    dtype: Annotated[Optional[str], _one_of("bf16", "bfloat16", "fp16", "float16", "half")] = None
    lower_precision_safe_modules: Optional[List[str]] = None


class _DataTypes(DeepSpeedConfigModel):
    grad_accum_dtype: _DType = None
    param_dtype: _DType = None
    buffer_dtype: _DType = None
    keep_in_fp32_modules: Optional[List[str]] = None


class _Aio(DeepSpeedConfigModel):
    block_size: _Int = None
    queue_depth: _Int = None
    intra_op_parallelism: _Int = None
    single_submit: _Bool = None
    overlap_events: _Bool = None
    use_gds: _Bool = None


class _ActivationCheckpointing(DeepSpeedConfigModel):
    partition_activations: _Bool = None
    number_checkpoints: Any = None
    contiguous_memory_optimization: _Bool = None
    synchronize_checkpoint_boundary: _Bool = None
    profile: _Bool = None
    cpu_checkpointing: _Bool = None


class _ParallelWrite(DeepSpeedConfigModel):
    pipeline_stage: _Bool = None


class _Writer(DeepSpeedConfigModel):
    type: Annotated[Optional[str], _one_of("MOCK", "PYTHON", "FAST", spelling=str.upper)] = None
    data_parallel: Annotated[
        Optional[str], _one_of("REPLICA", "SOCKET", "MACHINE", spelling=str.upper)
    ] = None
    decoupled: _Bool = None
    io_buffer_size: _Int = None
    io_buffer_double: _Bool = None
    io_multiplier: _Int = None
    show_statistics: _Bool = None


class _Checkpoint(DeepSpeedConfigModel):
    tag_validation: Annotated[
        Optional[str], _one_of("WARN", "IGNORE", "FAIL", spelling=str.upper)
    ] = None
    load_universal: _Bool = None
    use_node_local_storage: _Bool = None
    parallel_write: Optional[_ParallelWrite] = None
    checkpoint_serialization: _Bool = None
    writer: Optional[_Writer] = None


class _FlopsProfiler(DeepSpeedConfigModel):
    enabled: _Bool = None
    recompute_fwd_factor: Optional[float] = None
    profile_step: _Int = None
    module_depth: _Int = None
    top_modules: _Int = None
    detailed: _Bool = None
    output_file: Any = None


class _Timers(DeepSpeedConfigModel):
    throughput: Optional[DeepSpeedThroughputTimerConfig] = None


class Schema(DeepSpeedConfigModel):
    """Schema of a `ds_config.json`."""

    # Batch and step
    train_batch_size: Optional[PositiveInt] = None
    train_micro_batch_size_per_gpu: Optional[PositiveInt] = None
    gradient_accumulation_steps: Optional[PositiveInt] = None
    gradient_clipping: Optional[NonNegativeFloat] = None
    optimizer: Optional[_Optimizer] = None
    scheduler: Optional[_Scheduler] = None
    # Precision
    bf16: Optional[DeepSpeedBF16Config] = None
    fp16: Optional[DeepSpeedFP16Config] = None
    torch_autocast: Optional[_TorchAutocast] = None
    data_types: Optional[_DataTypes] = None
    # Sharding, offloading and communication
    zero_optimization: Optional[DeepSpeedZeroConfig] = None
    zero_allow_untested_optimizer: _Bool = None
    zero_force_ds_cpu_optimizer: _Bool = None
    aio: Optional[_Aio] = None
    communication_data_type: Annotated[
        Optional[str], _one_of("fp16", "bf16", "fp32", spelling=str.lower)
    ] = None
    comms_logger: Optional[CommsLoggerConfig] = None
    # Memory and checkpoints
    activation_checkpointing: Optional[_ActivationCheckpointing] = None
    checkpoint: Optional[_Checkpoint] = None
    # Reports
    tensorboard: Optional[TensorBoardConfig] = None
    comet: Optional[CometConfig] = None
    wandb: Optional[WandbConfig] = None
    csv_monitor: Optional[CSVConfig] = None
    steps_per_print: Optional[float] = None
    wall_clock_breakdown: _Bool = None
    memory_breakdown: _Bool = None
    dump_state: _Bool = None
    log_level: Annotated[
        Optional[str], _one_of("debug", "info", "warning", "error", "critical", spelling=str.lower)
    ] = None
    vocabulary_size: Optional[PositiveInt] = None
    flops_profiler: Optional[_FlopsProfiler] = None
    timers: Optional[_Timers] = None
    # Refused by `unsupported_keys` with any value, unless they are disabled
    autotuning: Any = None
    bfloat16: Any = None
    compile: Any = None
    data_efficiency: Any = None
    data_parallel_size: Any = None
    dataloader_drop_last: Any = None
    datastates_ckpt: Any = None
    disable_allgather: Any = None
    disable_python_gc: Any = None
    expert_parallel: Any = None
    gradient_allreduce_op: Any = None
    gradient_predivide_factor: Optional[PositiveFloat] = None
    hybrid_engine: Any = None
    managed_gradient_accumulation: Any = None
    pipeline: Any = None
    prescale_gradients: Any = None
    seq_parallel_communication_data_type: Any = None
    sequence_parallel_size: Any = None
    tensor_parallel: Any = None
    use_data_before_expert_parallelism: Any = None
    weight_quantization: Any = None
