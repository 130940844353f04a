"""
DeepSpeed's configuration schema as one model, put together from DeepSpeed's models and constants.

DeepSpeed models some of its sections with pydantic; it reads the others as dictionaries, where it
ignores what it does not know. Here each of those gets a model too, with the keys and the types
that DeepSpeed's constants give.
"""

import dataclasses
import difflib
import inspect
from types import ModuleType
from typing import Annotated, Any, Callable, Dict, List, Optional, Type

import torch
from deepspeed.autotuning import constants as autotuning
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.datastates.config import DATASTATES_CHECKPOINTING
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling import constants as profiling
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import constants as ds
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.activation_checkpointing import config as activation_checkpointing
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.data_pipeline import constants as data_pipeline
from deepspeed.runtime.model_checkpointing import constants as checkpointing
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO, AIO_DEFAULT_DICT
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from deepspeed.utils.config import TIMERS, TIMERS_THROUGHPUT, DeepSpeedThroughputTimerConfig
from deepspeed.utils.logging import log_levels
from pydantic import AfterValidator, Field, create_model, model_validator
from pydantic.types import NonNegativeFloat, PositiveFloat, PositiveInt, StrictBool


def nearest(name: str, known: List[str]) -> Optional[str]:
    """The known name that is most like one that isn't, `None` if none is like it."""
    spellings = {spelling.lower(): spelling for spelling in known}
    return next(map(spellings.get, difflib.get_close_matches(name.lower(), spellings, n=1)), None)


def did_you_mean(
    name: str, known: List[str], page: str = "https://www.deepspeed.ai/docs/config-json"
) -> str:
    """
    The end of a message about an unknown name: the nearest known one, all of a short list, or the
    `page` that has them.
    """
    meant = nearest(name, known)
    if meant:
        return f'did you mean "{meant}"?'
    if len(known) <= 20:
        return f"the known ones are {', '.join(sorted(known))}"
    return f"see {page} for the known ones"


def _one_of(*known: str, spelling: Callable[[str], str] = str.lower) -> Any:
    """The type of a string that DeepSpeed folds to one `spelling` and looks up among `known`."""

    def check(value: str) -> str:
        if spelling(value) not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return value

    return Annotated[str, AfterValidator(check)]


def _section(name: str, **types: Any) -> Type[DeepSpeedConfigModel]:
    """A model for a section that DeepSpeed reads as a dictionary, each key of a given type."""
    # DeepSpeed takes the values of such a section as they are: there, the string "false" is true.
    types = {key: StrictBool if type_ is bool else type_ for key, type_ in types.items()}
    fields: Dict[str, Any] = {key: (Optional[type_], None) for key, type_ in types.items()}
    return create_model(name, __base__=DeepSpeedConfigModel, **fields)


def _types(defaults: Dict[str, Any]) -> Dict[str, Any]:
    """The type of each key, from DeepSpeed's default value for it. `None` tells nothing."""
    return {key: Any if value is None else type(value) for key, value in defaults.items()}


def _defaults(constants: ModuleType, prefix: str) -> Dict[str, Any]:
    """The keys `PREFIX_KEY` of a module of constants, with their values `PREFIX_KEY_DEFAULT`."""
    return {
        key: getattr(constants, f"{name}_DEFAULT")
        for name, key in vars(constants).items()
        if name.startswith(prefix) and hasattr(constants, f"{name}_DEFAULT")
    }


def _dtypes(*dtypes: ds_config.DtypeEnum) -> Any:
    return _one_of(*(name for dtype in dtypes for name in dtype._all_values[1:]), spelling=str)


def _classes(module: ModuleType, base: type) -> Dict[str, type]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }


def optimizer_types() -> List[str]:
    """What `optimizer.type` can be. DeepSpeed takes its own names in any case."""
    return [*ds_config.DEEPSPEED_OPTIMIZERS, *_classes(torch.optim, torch.optim.Optimizer)]


# What DeepSpeed used to have, and what does the same without compressing what it communicates.
_FORMER_OPTIMIZERS = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}


def _check_optimizer_type(name: str) -> str:
    known = optimizer_types()
    if name.lower() in _FORMER_OPTIMIZERS:
        raise ValueError(
            "DeepSpeed no longer has optimizers that compress gradients; write "
            f'"{_FORMER_OPTIMIZERS[name.lower()]}"'
        )
    if name.lower() in ds_config.DEEPSPEED_OPTIMIZERS or name in known:
        return name
    raise ValueError(f"must be an optimizer of DeepSpeed's or torch's; {did_you_mean(name, known)}")


def _schedulers() -> Dict[str, type]:
    schedulers = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    # DeepSpeed steps its scheduler without the metric that this one of torch's needs.
    del schedulers["ReduceLROnPlateau"]
    return {
        **{name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES},
        **schedulers,
    }


def scheduler_types() -> List[str]:
    """What `scheduler.type` can be."""
    return list(_schedulers())


def scheduler_parameters(name: str) -> Dict[str, inspect.Parameter]:
    """What `scheduler.params` can hold for a type of scheduler, or the known one most like it."""
    schedulers = _schedulers()
    scheduler = schedulers.get(name) or schedulers.get(nearest(name, list(schedulers)) or "")
    parameters = inspect.signature(scheduler).parameters if scheduler else {}
    return {key: value for key, value in parameters.items() if key != "optimizer"}


def _check_scheduler_type(name: str) -> str:
    if name not in scheduler_types():
        hint = did_you_mean(name, scheduler_types())
        raise ValueError(f"must be a learning rate scheduler of DeepSpeed's or torch's; {hint}")
    return name


class _OptimizerSection(DeepSpeedConfigModel):
    type: Annotated[str, AfterValidator(_check_optimizer_type)]
    params: Dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = ds.LEGACY_FUSION_DEFAULT

    @model_validator(mode="after")
    def check_params(self) -> "_OptimizerSection":
        if ds.MAX_GRAD_NORM in self.params:
            raise ValueError(
                f'"params.{ds.MAX_GRAD_NORM}" is refused by DeepSpeed; write "grad_norm" in the '
                f'trainer, or "{ds.GRADIENT_CLIPPING}" beside this section'
            )
        return self


# What DeepSpeed's other schedules with a warmup have in the place of its shares.
_OF_COSINE = {
    "warmup_max_lr": "it rises to the learning rate of the optimizer: write that there",
    "warmup_min_lr": 'write "warmup_min_ratio", a share of the optimizer\'s learning rate',
    "warmup_ratio": 'write "warmup_num_steps", in optimizer steps',
}


class _SchedulerSection(DeepSpeedConfigModel):
    type: Annotated[str, AfterValidator(_check_scheduler_type)]
    params: Dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def check_params(self) -> "_SchedulerSection":
        known = list(scheduler_parameters(self.type))
        for name in self.params:
            if name not in known:
                hint = _OF_COSINE.get(name) if self.type == "WarmupCosineLR" else None
                hint = hint or did_you_mean(name, known)
                raise ValueError(f'"params.{name}" is no parameter of {self.type}; {hint}')
        return self


_Checkpoint = _section(
    "_Checkpoint",
    **{
        ds.CHECKPOINT_TAG_VALIDATION: _one_of(
            *ds.CHECKPOINT_TAG_VALIDATION_MODES, spelling=str.upper
        ),
        ds.LOAD_UNIVERSAL_CHECKPOINT: bool,
        ds.USE_NODE_LOCAL_STORAGE_CHECKPOINT: bool,
        ds.CHECKPOINT_PARALLEL_WRITE: _section(
            "_ParallelWrite", **{ds.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE: bool}
        ),
        checkpointing.CHECKPOINT_SERIALIZATION: bool,
        checkpointing.CHECKPOINT_WRITER: _section(
            "_Writer",
            **{
                checkpointing.CHECKPOINT_WRITER_TYPE: _one_of(
                    *checkpointing.CHECKPOINT_WRITER_TYPES, spelling=str.upper
                ),
                checkpointing.CHECKPOINT_DATA_PARALLEL: _one_of(
                    *checkpointing.CHECKPOINT_DATA_PARALLEL_UNITS, spelling=str.upper
                ),
                checkpointing.CHECKPOINT_WRITER_DECOUPLED: bool,
                checkpointing.CHECKPOINT_IO_BUFFER_SIZE: int,
                checkpointing.CHECKPOINT_IO_BUFFER_DOUBLE: bool,
                checkpointing.CHECKPOINT_IO_MULTIPLIER: int,
                checkpointing.CHECKPOINT_IO_STATISTICS: bool,
            },
        ),
    },
)

Schema = _section(
    "Schema",
    **{
        # Batch and step
        ds.TRAIN_BATCH_SIZE: PositiveInt,
        ds.TRAIN_MICRO_BATCH_SIZE_PER_GPU: PositiveInt,
        ds.GRADIENT_ACCUMULATION_STEPS: PositiveInt,
        ds.GRADIENT_CLIPPING: NonNegativeFloat,
        ds.OPTIMIZER: _OptimizerSection,
        ds.SCHEDULER: _SchedulerSection,
        # Precision
        ds.BFLOAT16: DeepSpeedBF16Config,
        ds.FP16: DeepSpeedFP16Config,
        ds.TORCH_AUTOCAST: _section(
            "_TorchAutocast",
            **{
                ds.TORCH_AUTOCAST_ENABLED: bool,
                ds.TORCH_AUTOCAST_DTYPE: _dtypes(
                    ds_config.DtypeEnum.bf16, ds_config.DtypeEnum.fp16
                ),
                ds.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES: List[str],
            },
        ),
        ds.DATA_TYPES: _section(
            "_DataTypes",
            **{
                ds.GRAD_ACCUM_DTYPE: _dtypes(*ds_config.DtypeEnum),
                ds.PARAM_DTYPE: _dtypes(*ds_config.DtypeEnum),
                ds.BUFFER_DTYPE: _dtypes(*ds_config.DtypeEnum),
                ds.KEEP_IN_FP32_MODULES: List[str],
            },
        ),
        # Sharding, offloading and communication
        ZERO_OPTIMIZATION: DeepSpeedZeroConfig,
        ds.ZERO_ALLOW_UNTESTED_OPTIMIZER: bool,
        ds.ZERO_FORCE_DS_CPU_OPTIMIZER: bool,
        AIO: _section("_Aio", **_types(AIO_DEFAULT_DICT)),
        ds.COMMUNICATION_DATA_TYPE: _one_of("fp16", "bf16", "fp32"),
        ds.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE: _one_of("fp16", "bf16", "fp32"),
        ds.PRESCALE_GRADIENTS: bool,
        ds.GRADIENT_PREDIVIDE_FACTOR: PositiveFloat,
        ds.GRADIENT_ALLREDUCE_OP: _one_of(*ds.GRADIENT_ALLREDUCE_OP_SUPPORTED),
        ds.DISABLE_ALLGATHER: bool,
        "comms_logger": CommsLoggerConfig,
        # Memory, compilation, checkpoints
        activation_checkpointing.ACT_CHKPT: _section(
            "_ActivationCheckpointing", **_types(activation_checkpointing.ACT_CHKPT_DEFAULT)
        ),
        "compile": CompileConfig,
        ds.DISABLE_PYTHON_GC: bool,
        "weight_quantization": WeightQuantConfig,
        ds.CHECKPOINT: _Checkpoint,
        DATASTATES_CHECKPOINTING: Any,
        # Reports
        **{key: field.annotation for key, field in DeepSpeedMonitorConfig.model_fields.items()},
        ds.STEPS_PER_PRINT: float,
        ds.WALL_CLOCK_BREAKDOWN: bool,
        ds.MEMORY_BREAKDOWN: bool,
        ds.DUMP_STATE: bool,
        ds.LOG_LEVEL: _one_of(*log_levels),
        ds.VOCABULARY_SIZE: PositiveInt,
        profiling.FLOPS_PROFILER: _section(
            "_FlopsProfiler", **_types(_defaults(profiling, "FLOPS_PROFILER_"))
        ),
        TIMERS: _section("_Timers", **{TIMERS_THROUGHPUT: DeepSpeedThroughputTimerConfig}),
        # Known, but of no use in an AllenNLP trainer: see `config_support`
        autotuning.AUTOTUNING: _section(
            "_Autotuning", model_info=Any, **_types(_defaults(autotuning, "AUTOTUNING_"))
        ),
        data_pipeline.DATA_EFFICIENCY: _section(
            "_DataEfficiency",
            **_types(_defaults(data_pipeline, "DATA_EFFICIENCY_")),
            **{data_pipeline.DATA_SAMPLING: Any, data_pipeline.DATA_ROUTING: Any},
        ),
        ds.DATALOADER_DROP_LAST: bool,
        ds.MANAGED_GRADIENT_ACCUMULATION: bool,
        ds_config.EXPERT_PARALLEL: _section(
            "_ExpertParallel", **{field.name: Any for field in dataclasses.fields(AutoEPConfig)}
        ),
        ds.USE_DATA_BEFORE_EXPERT_PARALLEL: bool,
        "hybrid_engine": ds_config.HybridEngineConfig,
        "pipeline": Any,
        "sequence_parallel_size": PositiveInt,
        "data_parallel_size": PositiveInt,
        "tensor_parallel": TPTrainingConfig,
    },
)
