"""
Declares this package's config keys, each once: type, default, documentation, and whether a resumed
run may change it. The check before training, the constructors of the trainer and of the
checkpointer, `--recover` and docs/reference.md all use these declarations.
"""

import inspect
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Dict, List, Literal, Optional, Sequence, TypeVar, Union

import torch
from allennlp.common import Lazy
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import DataLoader
from allennlp.models import Model
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.checkpointer import Checkpointer
from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.key_validation import FORMER_KEYS, Key, check_values, declared_keys
from allennlp_deepspeed.config.structured_keys import (
    GradCacheSettings,
    SequenceTiling,
    TorchCompile,
)

T = TypeVar("T")

# An object as in AllenNLP, or one that is constructed after the engine, as from a config file.
MaybeLazy = Union[T, Lazy[T], None]

# A timeout. Finite, because C++ doesn't accept infinity.
_Seconds = Annotated[PositiveFloat, Field(le=10**9)]

_Patterns = Annotated[List[str], Field(min_length=1)]


def _check_patterns(name: str, patterns: Any) -> None:
    for pattern in patterns if isinstance(patterns, list) else []:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"'trainer.{name}' has {json.dumps(pattern)}, which is no regular expression: "
                f"{error}."
            ) from None


def _check_cuda_devices(devices: List[int]) -> None:
    if min(devices) < 0 <= max(devices):
        raise ConfigurationError(
            f"'distributed.cuda_devices' is {json.dumps(devices)}, but workers on GPUs and on the "
            "CPU can't train together: write a GPU index for each worker, or -1 for each."
        )


def _check_validation_metric(value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(n, str) and re.match("[+-].", n) for n in names):
        raise ConfigurationError(
            f"'trainer.validation_metric' is {json.dumps(value)}: must be the name of a metric "
            'after "+" or "-", such as "+accuracy" or "-loss", or a list of such names.'
        )


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """The trainer's keys that DeepSpeed's configuration depends on."""

    num_gradient_accumulation_steps: Annotated[
        Union[PositiveInt, Literal["auto"], None],
        Key(
            "The number of micro-batches in an optimizer step. `null` means DeepSpeed's "
            '`gradient_accumulation_steps`, or 1 if that is unset too. `"auto"` needs a '
            "`global_batch_size`.",
            advice='must be an integer, at least 1, or "auto"',
            may_change=True,
        ),
    ] = None
    global_batch_size: Annotated[
        Optional[PositiveInt],
        Key(
            "The number of instances in an optimizer step, over all workers. Needs "
            '`"num_gradient_accumulation_steps": "auto"`: the trainer then finds the '
            "largest micro-batch that fits into memory ([automatic micro-batch "
            "size](global_batch.md)).",
            advice="must be an integer, at least 1",
            may_change=True,
        ),
    ] = None
    gradient_synchronization: Annotated[
        Literal["auto", "step", "micro_batch"],
        Key(
            "When gradients are reduced, if a step has several micro-batches. Results don't "
            'depend on it. `"step"` reduces once per optimizer step. Each worker accumulates an '
            'unsharded gradient until then. `"micro_batch"`, at stages 2 and 3, reduces in each '
            'backward pass. This takes less memory and more communication. `"auto"` becomes '
            '`"step"` if an unsharded gradient fits after the first step, otherwise '
            '`"micro_batch"` ([communication](communication.md#gradient-accumulation)).',
            advice='must be "auto", "step" (formerly "boundary") or "micro_batch"; shares and '
            "regular "
            "expressions are no longer possible",
            may_change=True,
        ),
    ] = "auto"
    grad_norm: Annotated[
        Union[NonNegativeFloat, bool, None],
        Key(
            "A number is DeepSpeed's `gradient_clipping`: gradients are clipped to this norm. "
            "`true` reports the norm without clipping. In both cases callbacks get "
            "`batch_grad_norm`, the norm of the gradient over all workers before clipping.",
            advice="must be a number above 0 to clip to, true to report the norm without clipping, "
            "or "
            "false",
        ),
    ] = None
    use_amp: Annotated[
        Optional[bool],
        Key(
            "`true` trains in mixed precision. If sections `bf16`, `fp16` or "
            '`torch_autocast` of `deepspeed_config` have `"enabled": "auto"`, it enables the first '
            "of "
            "those sections that works on the device, in this order. Without such a section, it "
            "trains "
            "with `torch_autocast` to bf16 ([all "
            "cases](configuration.md#batch-size-gradient-clipping-mixed-precision)). `null` "
            "leaves the precision to `deepspeed_config`. `false` means fp32, and is refused if "
            "`deepspeed_config` enables another precision.",
            advice="must be true, false or null",
        ),
    ] = None
    grad_scaling: Annotated[
        bool,
        Key(
            "`false` trains in fp16 with a constant loss scale of 1.",
            advice="must be true or false",
        ),
    ] = True
    half_precision_autocast: Annotated[
        Union[bool, Literal["auto"]],
        Key(
            'Whether the forward pass runs under autocast with `bf16` and `fp16`. With `"auto"`, '
            "modules that are made for half precision compute in the dtype of their weights, as "
            "with "
            "DeepSpeed alone: those of transformers (`PreTrainedModel`), `torch.nn.Transformer*`, "
            "and "
            "models with the trait `computes_in_weights_dtype` of `TrainingTraits`. The rest runs "
            "under autocast, because AllenNLP's modules create fp32 tensors. `true` runs all of it "
            "under autocast, `false` none of it.",
            advice='must be true, false or "auto"',
            may_change=True,
        ),
    ] = "auto"
    moving_average: Annotated[
        MaybeLazy[MovingAverage],
        Key(
            "As in AllenNLP. It averages the fp32 weights. Each worker averages its own shard.",
            type=Any,
        ),
    ] = None
    reshard_after_micro_batch: Annotated[
        Union[bool, Literal["auto"]],
        Key(
            "Whether parameters are resharded after each micro-batch, at ZeRO stage 3 with "
            "several micro-batches in a step. `false` leaves them gathered on each worker until "
            "the step ends, like FSDP2's `set_reshard_after_backward(False)`. Results don't "
            'depend on it. `"auto"` becomes `false` if all parameters fit after the first two '
            "steps, otherwise `true`. "
            "Unless it is `true`, validation and the test set gather parameters once for all "
            'batches, also in a single process; `"auto"` does so in the same memory '
            "([communication](communication.md#gathering-parameters-reshard_after_micro_batch)).",
            advice='must be true, false or "auto"',
            may_change=True,
        ),
    ] = "auto"
    sequence_parallel_size: Annotated[
        PositiveInt,
        Key(
            "The number of consecutive ranks that share each sequence "
            "([Ulysses](https://arxiv.org/abs/2309.14509)). These ranks read the same data, and "
            'count as one worker in batch sizes. Only for `"causal_lm"` ([long '
            "sequences](long_sequences.md)).",
            advice="must be an integer, at least 1",
            may_change=True,
        ),
    ] = 1
    sequence_tiling: Annotated[
        Optional[Dict[str, Any]],
        Key(
            'With `{"modules": ["mlp$"], "num_tiles": 8}`, modules whose names match a '
            "regular expression compute a sequence in 8 parts, one after the other, and "
            "recompute them in the backward pass. Only for modules that process positions "
            "independently, such as feed-forward layers ([long "
            "sequences](long_sequences.md)).",
            advice='must have "modules", regular expressions for the names of modules, such as '
            '["mlp$"], and "num_tiles", a number',
            may_change=True,
            type=Optional[SequenceTiling],
        ),
    ] = None
    torch_compile: Annotated[
        Union[bool, Dict[str, Any], None],
        Key(
            "`true`, or arguments of "
            "[`torch.compile`](https://docs.pytorch.org/docs/stable/generated/torch.compile.html): "
            "`backend`, `mode`, `dynamic`, `fullgraph`, `options`, `recompile_limit`. "
            "Compiles the forward and backward pass of the model. At stage 3 it compiles "
            "only the modules that `zero_optimization.leaf_module` names ([compiled "
            "models](compile.md)).",
            advice="must be true, or an object with arguments of `torch.compile`, such as "
            '{"mode": "max-autotune", "dynamic": true}',
            may_change=True,
            type=Union[bool, TorchCompile, None],
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainerArguments(EngineKeys):
    """
    The arguments of [`DeepSpeedTrainer`](../training/trainer.py). Keys without documentation are
    those whose values AllenNLP refuses only after it has read the data.

    # Raises

    `ConfigurationError`
        If a value is invalid.
    """

    model: Model
    data_loader: DataLoader
    validation_data_loader: Optional[DataLoader] = None
    serialization_dir: Union[str, os.PathLike, None] = None
    cuda_device: Annotated[
        Union[int, torch.device, None],
        Key(advice="must be the index of a GPU, or -1 for the CPU", type=Optional[int]),
    ] = None
    learning_rate_scheduler: MaybeLazy[LearningRateScheduler] = None
    momentum_scheduler: MaybeLazy[MomentumScheduler] = None
    distributed: bool = False
    local_rank: int = 0
    world_size: int = 1
    enable_default_callbacks: Annotated[bool, Key(advice="must be true or false")] = True
    run_confidence_checks: Annotated[bool, Key(advice="must be true or false")] = True
    ddp_accelerator: Optional[DdpAccelerator] = None
    deepspeed_config: Annotated[
        Any,
        Key(
            "The name of a [preset](configuration.md#presets), a preset with changes, or a "
            "config in [DeepSpeed's schema](https://www.deepspeed.ai/docs/config-json).",
            may_change=(
                "",  # another preset by its name alone
                "type",
                "activation_checkpointing",
                "gradient_accumulation_steps",
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "zero_optimization",
            ),
        ),
    ] = "zero_2"
    optimizer: Annotated[
        Union[torch.optim.Optimizer, Lazy[Optimizer], None],
        Key(
            "As in AllenNLP; `adam` if unset here and in `deepspeed_config`. Must be unset if "
            "`deepspeed_config` has an `optimizer` section. With offload, `adam`, `adamw`, "
            "`adagrad` and `sgd` use [PyTorch's fused kernels](large_models.md#optimizer).",
            type=Any,
        ),
    ]
    grad_cache: Annotated[
        Optional[Dict[str, Any]],
        Key(
            "Gradient caching for a [contrastive model](contrastive.md): computes the gradient "
            'of a batch whose activations don\'t fit into memory. `{"chunk_size": 32}` encodes '
            "32 examples at a time on each worker. `chunk_size` may also be an object with a "
            'number for each argument of `encode`, such as `{"query": 64, "document": 16}`, or '
            '`"auto"`, the largest number that fits.',
            advice='must be an object, such as {"chunk_size": 32}',
            may_change=True,
            type=Optional[GradCacheSettings],
        ),
    ] = None
    resume: Annotated[
        Optional[Literal["auto"]],
        Key(
            'With `"auto"` and without `--recover`, a run resumes if the serialization '
            "directory has a checkpoint of the run. If not, the run starts from the beginning. Use "
            '`"auto"` in job queues that '
            "start the same command again, and with torchrun's `--max-restarts`.",
            advice='must be "auto" or null',
            may_change=True,
        ),
    ] = None
    log_every_num_steps: Annotated[
        Optional[PositiveInt],
        Key(
            "The number of optimizer steps after which the host waits for the device and reads "
            "the losses. At the same time the progress bar is updated, the workers tell each other "
            "about signals (SIGTERM, Ctrl-C) and NaN losses, and the trainer checks "
            "`save_every_num_seconds`. `null` means about once a second. The metrics of an epoch "
            "don't depend on it.",
            advice="write a number of optimizer steps, at least 1, or remove the key for about "
            "once a "
            "second.",
            may_change=True,
        ),
    ] = None
    validate_every_num_batches: Annotated[
        Optional[PositiveInt],
        Key(
            "Also validates within an epoch, after each multiple of this number of optimizer "
            "steps. `patience`, the best weights and a schedule such as `reduce_on_plateau` then "
            "count validations instead of epochs, and training itself stays the same ([validation "
            "within epochs](configuration.md#validation-within-epochs)).",
            advice="must be a number of optimizer steps, at least 1",
            may_change=True,
        ),
    ] = None
    grad_clipping: Annotated[
        Optional[NonNegativeFloat],
        Key("Clips each element of the gradient to this absolute value, after clipping by norm."),
    ] = None
    activation_checkpointing: Annotated[
        Optional[_Patterns],
        Key(
            "Regular expressions for names of modules, such as "
            '`["transformer_model.encoder.layer"]`. Only the inputs of these modules are '
            "stored; the backward pass recomputes the rest "
            "([activations](large_models.md#gradient-checkpointing)).",
            advice="must be a list of regular expressions for the names of modules, such as "
            '["transformer_model.encoder.layer"].',
            check=partial(_check_patterns, "activation_checkpointing"),
            may_change=True,
        ),
    ] = None
    checkpointer: Annotated[
        MaybeLazy[Checkpointer],
        Key(
            "[Its keys](#trainercheckpointer). `null` saves no checkpoints.",
            may_change=True,
            default={"type": "deepspeed"},
            type=Any,
        ),
    ] = None
    num_epochs: Annotated[
        Annotated[PositiveInt, Field(lt=2**31)],
        Key(advice="must be an integer from 1 to 2147483647"),
    ] = 20
    patience: Annotated[
        Optional[PositiveInt],
        Key(advice="must be an integer, at least 1, or null"),
    ] = None
    validation_metric: Annotated[
        Union[str, List[str]],
        Key(check=_check_validation_metric, type=Any),
    ] = "-loss"
    no_grad: Annotated[
        Optional[List[str]],
        Key(
            advice="must be a list of regular expressions for the names of parameters, such as "
            '["text_field_embedder"]',
            check=partial(_check_patterns, "no_grad"),
        ),
    ] = None
    callbacks: Annotated[
        Optional[Sequence[Union[TrainerCallback, Lazy[TrainerCallback]]]],
        Key(advice='must be a list, such as [{"type": "tensorboard"}]', type=Optional[List[Any]]),
    ] = None

    def __post_init__(self) -> None:
        errors = ConfigErrors()
        check_values("trainer", TRAINER_KEYS, vars(self), errors)
        errors.raise_any()

    def allennlp_arguments(self) -> Dict[str, Any]:
        """Returns the arguments of AllenNLP's trainer, by name."""
        names = inspect.signature(GradientDescentTrainer.__init__).parameters
        return {name: value for name, value in vars(self).items() if name in names}


@dataclass(frozen=True, kw_only=True)
class CheckpointerArguments:
    """
    The arguments of [`DeepSpeedCheckpointer`](../checkpoint/checkpointer.py).

    # Raises

    `ConfigurationError`
        If a value is invalid.
    """

    serialization_dir: Union[str, os.PathLike]
    save_completed_epochs: Annotated[
        bool,
        Key("Saves a checkpoint at the end of each epoch."),
    ] = True
    save_every_num_batches: Annotated[
        Optional[PositiveInt],
        Key("Saves a checkpoint after this number of optimizer steps."),
    ] = None
    save_every_num_seconds: Annotated[
        Optional[NonNegativeFloat],
        Key(
            "Saves a checkpoint after this time, by the clock of rank 0. The time is checked "
            "when the host reads the losses."
        ),
    ] = None
    keep_most_recent_by_count: Annotated[
        Optional[NonNegativeInt],
        Key(
            "The number of newest checkpoints to keep; 0 keeps the newest, too. If this and "
            "`keep_most_recent_by_age` are `null`, all checkpoints are kept."
        ),
    ] = 2
    keep_most_recent_by_age: Annotated[
        Optional[NonNegativeFloat],
        Key(
            "Keeps checkpoints that are younger than this number of seconds, in addition to "
            "those that `keep_most_recent_by_count` keeps."
        ),
    ] = None
    keep_best_by_count: Annotated[
        Optional[PositiveInt],
        Key(
            "The number of checkpoints with the best `validation_metric` to keep, in addition to "
            "the newest. These are checkpoints of an epoch's end or of a step of "
            "`validate_every_num_batches`, where their own weights have been validated. Of equal "
            "ones the earlier is the better, and NaN is never among the best."
        ),
    ] = None
    save_on_preemption: Annotated[
        bool,
        Key(
            "On SIGTERM or Ctrl-C, saves a checkpoint after the current optimizer step, before "
            "training ends. A second signal ends training at once."
        ),
    ] = False
    async_save: Annotated[
        bool,
        Key(
            "Copies the checkpoint to CPU memory, and writes the files from this copy "
            "while training continues. The copy takes as much CPU memory as the worker's "
            "files."
        ),
    ] = False
    exclude_frozen_parameters: Annotated[
        bool,
        Key(
            "Leaves frozen parameters out of checkpoints, which are then small with LoRA. A "
            "resumed run uses the frozen parameters of the newly constructed model, and is "
            "refused unless they are bitwise the same."
        ),
    ] = False
    on_corrupt: Annotated[
        Literal["error", "previous"],
        Key(
            'What to do if a file of the newest checkpoint is missing or damaged. `"error"` '
            'ends with an error. `"previous"` appends `.corrupt` to the checkpoint\'s name, and '
            "resumes from the newest intact checkpoint."
        ),
    ] = "error"

    def __post_init__(self) -> None:
        errors = ConfigErrors()
        check_values("trainer.checkpointer", CHECKPOINTER_KEYS, vars(self), errors)
        errors.raise_any()


@dataclass(frozen=True, kw_only=True)
class DistributedKeys:
    """The keys under "distributed". AllenNLP has those without documentation, unchecked."""

    timeout: Annotated[
        _Seconds,
        Key(
            "The number of seconds that a collective of gloo or NCCL waits for the other "
            "ranks before training ends with an error. Where ranks wait for one that reads data or "
            "archives, it is the time without a heartbeat, at least 30 seconds.",
            advice="must be a number of seconds above 0",
        ),
    ] = 600
    rendezvous_timeout: Annotated[
        _Seconds,
        Key(
            "The number of seconds that nodes wait for missing nodes at a start.",
            advice="must be a number of seconds above 0",
        ),
    ] = 300
    shutdown_timeout: Annotated[
        _Seconds,
        Key(
            "The number of seconds after SIGTERM or Ctrl-C in which workers must exit, "
            "including the time to save a checkpoint. Workers that are still running "
            "after this time are killed.",
            advice="must be a number of seconds above 0",
        ),
    ] = 120
    max_restarts: Annotated[
        Annotated[int, Field(ge=0)],
        Key(
            "The maximum number of restarts in a run. When a worker fails, all workers are "
            "restarted from the newest checkpoint. Training ends without a restart after an "
            "error in the config, or if the same step fails twice "
            "([restarts](several_machines.md#restarts)).",
            advice="must be an integer, at least 0",
        ),
    ] = 0
    cuda_devices: Annotated[
        Optional[List[int]],
        Key(
            advice="must be a list with the GPU index of each worker of a node, such as [0, 1], or "
            "-1 for the CPU, such as [-1, -1]",
            check=_check_cuda_devices,
            type=Annotated[List[int], Field(min_length=1)],
        ),
    ] = None
    ddp_accelerator: Annotated[
        Any,
        Key(),
    ] = None
    num_nodes: Annotated[
        PositiveInt,
        Key(advice="must be an integer, at least 1"),
    ] = 1
    primary_address: Annotated[
        Optional[str],
        Key(advice="must be a string"),
    ] = None
    primary_port: Annotated[
        Optional[Annotated[int, Field(ge=0, lt=2**16)]],
        Key(advice="must be an integer from 1 to 65535"),
    ] = None


_OF_TRAINER = declared_keys(TrainerArguments)

TRAINER_KEYS = {name: key for name, key in _OF_TRAINER.items() if key.doc}
"""The keys under "trainer" that are new, or that mean more than in AllenNLP."""

INHERITED_TRAINER_KEYS = {name: key for name, key in _OF_TRAINER.items() if not key.doc}
"""
The keys under "trainer" whose values AllenNLP refuses only after it has read the data, and mostly
without their names.
"""

CHECKPOINTER_KEYS = declared_keys(CheckpointerArguments)
"""The keys under "checkpointer", except its "type"."""

DISTRIBUTED_KEYS = declared_keys(DistributedKeys)
"""The keys under "distributed"."""

NEW_TRAINER_KEYS: List[str] = [
    name
    for name in TRAINER_KEYS
    if name not in inspect.signature(GradientDescentTrainer.from_partial_objects).parameters
]
"""The keys that AllenNLP's own trainer would ignore silently."""

# AllenNLP's keys that divide the work among workers and micro-batches, the number of epochs, and
# the metric that compares them.
_MAY_CHANGE = (
    r"type|distributed(\..*)?|trainer\.(cuda_device|num_epochs|validation_metric)"
    r"|(validation_)?data_loader\.(batch_sampler\.)?batch_size"
)


def may_change(path: str) -> bool:
    """
    Returns whether a resumed run may change a key.

    # Parameters

    path : `str`, required.
        The full path of the key, such as "trainer.grad_cache.chunk_size".
    """
    if path in FORMER_KEYS:
        return True
    trainer, name, *rest = [*path.split("."), ""][:3]
    key = TRAINER_KEYS.get(name) if trainer == "trainer" else None
    if key is None:
        return re.fullmatch(_MAY_CHANGE, path) is not None
    return key.may_change if isinstance(key.may_change, bool) else rest[0] in key.may_change
