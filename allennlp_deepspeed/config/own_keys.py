"""
Declares this package's config keys: type, default, documentation, and whether a resumed run may
change them. The check before training, the constructors of the trainer and of the checkpointer,
`--recover` and docs/reference.md all use these declarations.
"""

import inspect
import json
import re
from functools import partial
from typing import Annotated, Any, Dict, List, Literal, Optional, Union

from allennlp.common.checks import ConfigurationError
from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from allennlp_deepspeed.config.grad_cache_settings import GradCacheSettings
from allennlp_deepspeed.config.keys import FORMER_KEYS, OBJECT, Key
from allennlp_deepspeed.config.sequence_tiling import SequenceTiling
from allennlp_deepspeed.config.torch_compile_settings import TorchCompile


def _check_patterns(name: str, patterns: Any) -> None:
    for pattern in patterns if isinstance(patterns, list) else []:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"'trainer.{name}' has {json.dumps(pattern)}, which is no regular expression: "
                f"{error}."
            ) from None


# A timeout. Finite, because C++ doesn't accept infinity.
_Seconds = Annotated[PositiveFloat, Field(le=10**9)]

_Patterns = Annotated[List[str], Field(min_length=1)]


TRAINER_KEYS: Dict[str, Key] = {
    "deepspeed_config": Key(
        OBJECT,
        default="zero_2",
        doc="A preset's name, a preset with changes, or "
        "[DeepSpeed's schema](https://www.deepspeed.ai/docs/config-json) as it is.",
        may_change=(
            "activation_checkpointing",
            "gradient_accumulation_steps",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
        ),
    ),
    "optimizer": Key(
        OBJECT,
        default=None,
        doc='As in AllenNLP, whose `"adam"` it is if neither this nor `deepspeed_config` says '
        'anything. Not given if the latter has an `"optimizer"` section. With offload, '
        "DeepSpeed's optimizer for the CPU takes its place where there is one.",
    ),
    "num_gradient_accumulation_steps": Key(
        Union[PositiveInt, Literal["auto"], None],
        default=None,
        doc="Micro-batches in an optimizer step. `null` takes DeepSpeed's "
        "`gradient_accumulation_steps`, which is 1 if it isn't set either. "
        '`"auto"` needs a `global_batch_size`.',
        advice='must be an integer, at least 1, or "auto"',
        may_change=True,
    ),
    "global_batch_size": Key(
        Optional[PositiveInt],
        default=None,
        doc='With `"num_gradient_accumulation_steps": "auto"`: the instances of an optimizer step, '
        "of all workers. The first step finds the largest micro-batch that fits into memory, and "
        "the rest is accumulation, with the numbers of one batch of this size. For models that say "
        "over how many instances or tokens their loss is a mean "
        "([global batches](global_batch.md)).",
        advice="must be an integer, at least 1",
        may_change=True,
    ),
    "gradient_synchronization": Key(
        Literal["auto", "step", "micro_batch"],
        default="auto",
        doc="When gradients are reduced across the workers, with several micro-batches in a step; "
        'the numbers are the same. `"step"`: once an optimizer step, at every ZeRO stage; each '
        'worker accumulates an unsharded gradient until then. `"micro_batch"`, for stages 2 and '
        "3: with each micro-batch, which leaves a shard of the gradient on each worker, and "
        'multiplies the traffic. `"auto"` is `"step"` if an unsharded gradient fits into half of '
        'the memory that the first step has left free on every worker, else `"micro_batch"`.',
        advice='must be "auto", "step" (formerly "boundary") or "micro_batch"; shares and regular '
        "expressions are no longer possible",
        may_change=True,
    ),
    "grad_cache": Key(
        Optional[GradCacheSettings],
        default=None,
        doc="Trains a [contrastive model](contrastive.md) on batches whose activations don't fit "
        'into memory, with the gradient of the whole batch: `{"chunk_size": 32}` encodes as many '
        "examples at a time, on each worker. A number for each argument of `encode`, as "
        '`{"query": 64, "document": 16}`, or `"auto"`, the largest that fits.',
        advice='must be an object, such as {"chunk_size": 32}',
        may_change=True,
    ),
    "resume": Key(
        Optional[Literal["auto"]],
        default=None,
        doc='`"auto"`: the same command starts the training, or continues it if the serialization '
        "directory has a checkpoint of it, with `--recover` or without. For queues that start a "
        "job again, and for torchrun's `--max-restarts`.",
        advice='must be "auto" or null',
        may_change=True,
    ),
    "log_every_num_steps": Key(
        Optional[PositiveInt],
        default=None,
        doc="After how many optimizer steps the host waits for the device to read the losses. At "
        "these steps the progress bar is updated, the workers tell each other of a signal or a "
        "NaN, which ends training, and `save_every_num_seconds` is asked. `null` for about once a "
        "second. The metrics of an epoch are the same with any number.",
        advice="write a number of optimizer steps, at least 1, or leave it out for about once a "
        "second.",
        may_change=True,
    ),
    "grad_norm": Key(
        Union[bool, NonNegativeFloat, None],
        default=None,
        doc="A number is DeepSpeed's `gradient_clipping`. A number or `true` has `batch_grad_norm` "
        "reported to callbacks, the norm of the whole gradient over all workers before clipping.",
        advice="must be a number above 0 to clip to, true to report the norm without clipping, or "
        "false",
    ),
    "grad_clipping": Key(
        Optional[NonNegativeFloat],
        default=None,
        doc="Applied after the norm has been clipped, to each element of the gradient that the "
        "optimizer steps with.",
    ),
    "use_amp": Key(
        Optional[bool],
        default=None,
        doc="Computes in bf16 where the device can, else in fp16, unless `deepspeed_config` "
        "already names a precision. On CPU too. `null` leaves it to `deepspeed_config`; "
        "`false` is fp32.",
        advice="must be true, false or null",
    ),
    "grad_scaling": Key(
        bool,
        default=True,
        doc="`false` trains in fp16 with a loss scale of 1.",
        advice="must be true or false",
    ),
    "moving_average": Key(
        OBJECT,
        default=None,
        doc="Kept on the fp32 weights, each worker on its shard.",
    ),
    "reshard_after_micro_batch": Key(
        Union[bool, Literal["auto"]],
        default="auto",
        doc="At ZeRO stage 3, with several micro-batches in a step: whether parameters are sharded "
        "again after each micro-batch, and gathered for the next. `false` leaves them gathered on "
        "each worker until the step ends, as FSDP2's `set_reshard_after_backward(False)`; the "
        'numbers are the same. `"auto"` is `false` if all parameters fit into half of the memory '
        "that the first two steps have left free on every worker, else `true`.",
        advice='must be true, false or "auto"',
        may_change=True,
    ),
    "sequence_parallel_size": Key(
        PositiveInt,
        default=1,
        doc="How many neighbouring workers share each sequence, of which each holds a part "
        "([Ulysses](https://arxiv.org/abs/2309.14509)). They read the same data, and count as one "
        'worker wherever instances are counted. For models with causal attention, `"causal_lm"` '
        "([long sequences](long_sequences.md)).",
        advice="must be an integer, at least 1",
        may_change=True,
    ),
    "sequence_tiling": Key(
        Optional[SequenceTiling],
        default=None,
        doc='`{"modules": ["mlp$"], "num_tiles": 8}`: the modules whose names match one of the '
        "regular expressions compute so many parts of a sequence one after the other, and again "
        "in the backward pass. For modules that compute each position by itself, as feed-forward "
        "layers do ([long sequences](long_sequences.md)).",
        advice='must have "modules", regular expressions for the names of modules, such as '
        '["mlp$"], and "num_tiles", a number',
        may_change=True,
    ),
    "activation_checkpointing": Key(
        Optional[_Patterns],
        default=None,
        doc='Regular expressions for names of modules, such as `["transformer_model.encoder.layer"'
        "]`. Of these only the inputs are kept, and the rest is computed again in the backward "
        "pass.",
        advice="must be a list of regular expressions for the names of modules, such as "
        '["transformer_model.encoder.layer"].',
        check=partial(_check_patterns, "activation_checkpointing"),
        may_change=True,
    ),
    "torch_compile": Key(
        Union[bool, TorchCompile, None],
        default=None,
        doc="`true`, or arguments of [`torch.compile`](https://docs.pytorch.org/docs/stable/"
        "generated/torch.compile.html): `backend`, `mode`, `dynamic`, `fullgraph`, `options`, "
        "`recompile_limit`. Compiles the model's forward pass, and what follows from it for the "
        "backward pass; at ZeRO stage 3 each module that `zero_optimization.leaf_module` names. "
        "[What stays outside](compile.md).",
        advice="must be true, or an object with arguments of `torch.compile`, such as "
        '{"mode": "max-autotune", "dynamic": true}',
        may_change=True,
    ),
    "checkpointer": Key(
        OBJECT,
        default={"type": "deepspeed"},
        doc="[Its keys](#trainercheckpointer). `null` saves no checkpoints.",
        may_change=True,
    ),
}
"""The keys under "trainer" that are new, or that mean more than in AllenNLP."""

CHECKPOINTER_KEYS: Dict[str, Key] = {
    "save_completed_epochs": Key(
        bool, default=True, doc="Whether to save a checkpoint at the end of each epoch."
    ),
    "save_every_num_batches": Key(
        Optional[PositiveInt],
        default=None,
        doc="Saves a checkpoint after so many optimizer steps.",
    ),
    "save_every_num_seconds": Key(
        Optional[NonNegativeFloat],
        default=None,
        doc="Saves a checkpoint after so many seconds by the clock of rank 0, which decides for "
        "all workers when they read the losses.",
    ),
    "keep_most_recent_by_count": Key(
        Optional[NonNegativeInt],
        default=2,
        doc="How many checkpoints to keep. `null` here and for the next keeps all.",
    ),
    "keep_most_recent_by_age": Key(
        Optional[NonNegativeFloat],
        default=None,
        doc="Keeps those younger than so many seconds as well.",
    ),
    "save_on_preemption": Key(
        bool,
        default=False,
        doc="Whether a training that ends because of a SIGTERM first saves a checkpoint, after the "
        "optimizer step that it is in. Not on Ctrl-C.",
    ),
    "async_save": Key(
        bool,
        default=False,
        doc="Whether training waits only for a copy in CPU memory, from which the files are "
        "written while it goes on. It needs the memory for what a worker saves, once more.",
    ),
    "exclude_frozen_parameters": Key(
        bool,
        default=False,
        doc="Whether parameters that aren't trained are left out of checkpoints, which then hold "
        "as little as LoRA's adapters. Recovery takes them from the model as it is constructed "
        "again, and refuses to continue unless they are the same to the last bit.",
    ),
    "on_corrupt": Key(
        Literal["error", "previous"],
        default="error",
        doc="What recovery does if a file of the newest checkpoint is missing or damaged: "
        '`"error"`, or `"previous"` to rename it to `....corrupt` and continue from the newest '
        "that is intact.",
    ),
}
"""The keys under "checkpointer", except its "type"."""

DISTRIBUTED_KEYS: Dict[str, Key] = {
    "timeout": Key(
        _Seconds,
        default=600,
        doc="How long a collective waits for ranks that don't enter it, in seconds, of gloo's and "
        "NCCL's process groups alike. Then the training ends.",
        advice="must be a number of seconds above 0",
    ),
    "rendezvous_timeout": Key(
        _Seconds,
        default=300,
        doc="How long the start waits for nodes that haven't come, in seconds.",
        advice="must be a number of seconds above 0",
    ),
    "shutdown_timeout": Key(
        _Seconds,
        default=120,
        doc="How long workers have to leave after SIGTERM or Ctrl-C, in seconds, saving a "
        "checkpoint included. Then they are killed.",
        advice="must be a number of seconds above 0",
    ),
    "max_restarts": Key(
        Annotated[int, Field(ge=0)],
        default=0,
        doc="How often all workers are restarted when one of them fails, to continue from the "
        "newest checkpoint. What the config is to blame for, and a step that fails twice, ends "
        "the training.",
        advice="must be a whole number from 0 on",
    ),
    "min_nodes": Key(
        Optional[PositiveInt],
        default=None,
        doc="Trains on any number of nodes from this one to `num_nodes`: a node that is lost is "
        "taken out, and one that joins is taken in ([elastic nodes](several_machines.md"
        "#elastic-nodes)). Needs a `global_batch_size` and a shared serialization directory. If "
        "unset, all nodes have to be there.",
        advice="must be an integer, at least 1",
    ),
    "rendezvous_endpoint": Key(
        Optional[Annotated[str, Field(pattern=r"^[^:/]+:\d+$")]],
        default=None,
        doc="`host:port` of a store in which the nodes meet, as torchrun's `--rdzv-endpoint`, "
        "instead of one on node 0 at `primary_address` and `primary_port`.",
        advice='must be "host:port"',
    ),
}
"""The keys under "distributed" that AllenNLP doesn't have."""

ALLENNLP_DISTRIBUTED_KEYS: Dict[str, Key] = {
    "cuda_devices": Key(
        Annotated[List[int], Field(min_length=1)],
        default=None,
        doc="",
        advice="must be a list of a GPU's number for each worker of a node, such as [0, 1], or of "
        "-1 for the CPU",
    ),
    "ddp_accelerator": Key(OBJECT, default=None, doc=""),
    "num_nodes": Key(PositiveInt, default=1, doc="", advice="must be an integer, at least 1"),
    "primary_address": Key(Optional[str], default=None, doc="", advice="must be a string"),
    "primary_port": Key(
        Optional[Annotated[int, Field(ge=0, lt=2**16)]],
        default=None,
        doc="",
        advice="must be an integer from 1 to 65535",
    ),
}
"""AllenNLP's keys under "distributed", which AllenNLP doesn't check."""

NEW_TRAINER_KEYS: List[str] = [
    name
    for name in TRAINER_KEYS
    if name not in inspect.signature(GradientDescentTrainer.from_partial_objects).parameters
]
"""The keys that AllenNLP's own trainer would ignore silently."""

# AllenNLP's keys that divide the work among workers and micro-batches, and the number of epochs.
_MAY_CHANGE = (
    r"distributed(\..*)?|trainer\.(cuda_device|num_epochs)"
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
