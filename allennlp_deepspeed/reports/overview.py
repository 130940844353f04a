"""
Summarizes the settings of a training in about ten lines.
"""

import collections
import os
import re
from typing import Any, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from allennlp.training.callbacks import WandBCallback
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.lifecycle.model_state_memory import (
    ModelSize,
    ModelStates,
    model_states,
    optimizer_bytes,
)
from allennlp_deepspeed.engine.process.worker_device import memory_size

Lines = List[Tuple[str, str]]


def overview(trainer: Any, keys: Mapping[str, Any], serialization_dir: str) -> Lines:
    """
    Returns the lines of the overview.

    # Parameters

    trainer : `DeepSpeedTrainer`
        A trainer that is about to start.
    keys : `Mapping[str, Any]`
        The trainer's arguments, by name.
    serialization_dir : `str`

    # Returns

    `List[Tuple[str, str]]`
        The title and the text of each line.
    """
    config = trainer.resolved_config
    lines = [
        ("workers", _workers(trainer)),
        ("engine", f"ZeRO stage {config.zero_stage}, {_precision(config)}"),
        ("parameters", _parameters(trainer.engine)),
        ("batch", _batch(trainer)),
        ("optimizer", _optimizer(trainer)),
        ("gradients", _gradients(trainer, keys)),
        ("model states", _model_states(trainer, keys)),
        ("memory", _memory(trainer, config, keys)),
        ("checkpoints", _checkpoints(trainer, serialization_dir)),
        ("W&B", _run_of_wandb(trainer)),
    ]
    return [line for line in lines if line[1]]


def as_table(title: str, lines: Lines) -> Group:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    return Group(Text(title, style="bold"), table)


def _workers(trainer: Any) -> str:
    device = trainer.cuda_device
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the CPU"
    if dist.get_world_size() == 1:
        return f"1 on {name}"
    hosts = collections.Counter(trainer.directories.hosts)
    where = "" if len(hosts) == 1 else f" of {', '.join(f'{h} ({n})' for h, n in hosts.items())}"
    return f"{dist.get_world_size()} on {name}{where}"


def _precision(config: ResolvedConfig) -> str:
    if config.precision == "torch_autocast":
        return f"autocast to {config.engine_config['torch_autocast']['dtype']}"
    return config.precision


def _parameters(engine: DeepSpeedEngine) -> str:
    size = ModelSize.from_model(engine.module)
    return f"{sum(size.trainable):,} trainable, {sum(size.frozen):,} frozen"


def _batch(trainer: Any) -> str:
    config, workers = trainer.resolved_config, trainer.data_parallel_size
    if config.finds_micro_batch_size:
        num_instances = config.engine_config["train_batch_size"]
        return (
            f"global batch {num_instances}, {workers} workers, micro-batch size found in the "
            "first step"
        )
    steps = config.num_gradient_accumulation_steps
    size = config.engine_config.get("train_micro_batch_size_per_gpu")
    if not isinstance(size, int) or not trainer.has_fixed_batch_size:
        return f"micro-batches of varying size, accumulation {steps}, workers {workers}"
    return (
        f"micro-batch {size} × accumulation {steps} × workers {workers} "
        f"= global batch {size * steps * workers}"
    )


def _optimizer(trainer: Any) -> str:
    # An optimizer with relative steps, as "huggingface_adafactor", has no learning rate.
    rates = sorted({g["lr"] for g in trainer.optimizer.param_groups if g["lr"] is not None})
    if not rates:
        return f"{type(trainer.optimizer).__name__}, learning rate set by the optimizer"
    rate = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
    scheduler = trainer.learning_rate_scheduler
    peak = _peak_learning_rate(scheduler, trainer.optimizer)
    texts = [type(trainer.optimizer).__name__]
    begins = trainer.progress.total_batches_completed_at_start == 0
    if begins and peak is not None and peak > rates[-1]:
        texts.append(f"learning rate {rate}, warming up to {peak:g}")
    elif rates[-1] > 0 or scheduler is None:
        texts.append(f"learning rate {rate}")
    texts.append("no schedule" if scheduler is None else f"schedule {type(scheduler).__name__}")
    return ", ".join(texts)


def _peak_learning_rate(scheduler: Any, optimizer: torch.optim.Optimizer) -> Optional[float]:
    """Returns the learning rate that a schedule warms up to, `None` if it is unknown."""
    # DeepSpeed's schedules have one of these, and overwrite the optimizer's learning rate.
    rates = getattr(scheduler, "max_lrs", None) or getattr(scheduler, "org_lrs", None)
    if re.search("Warmup|PolynomialDecay|SlantedTriangular", type(scheduler).__name__):
        rates = rates or [group.get("initial_lr", 0.0) for group in optimizer.param_groups]
    return max(rates) if rates else None


def _gradients(trainer: Any, keys: Mapping[str, Any]) -> str:
    config = trainer.resolved_config
    clipping = config.engine_config.get("gradient_clipping")
    texts = [f"norm clipped to {clipping:g}"] if clipping else []
    if keys.get("grad_clipping"):
        texts.append(f"values clipped to ±{keys['grad_clipping']:g}")
    texts = texts or ["not clipped"]
    if dist.get_world_size() > 1:
        is_set_by_key = config.accumulates or keys.get("grad_cache")
        texts.append(_reduction(trainer, keys) if is_set_by_key else "reduced once per step")
        if trainer.averages_each_pass:
            texts.append("averaged after each backward pass for a callback")
    if keys.get("grad_cache"):
        texts.append("gradient caching")
    return ", ".join(texts)


def _reduction(trainer: Any, keys: Mapping[str, Any]) -> str:
    is_once_a_step = trainer.reduces_once_a_step
    setting = keys["gradient_synchronization"]
    key = f" (gradient_synchronization {setting})"
    if is_once_a_step is None:
        return f"reduced once per step if memory allows{key}"
    mode = "once per step" if is_once_a_step else "after each micro-batch"
    # "auto" decides at stages 2 and 3 only, and not where a callback reads gradients.
    return f"reduced {mode}{'' if setting == 'auto' else key}"


def _memory(trainer: Any, config: ResolvedConfig, keys: Mapping[str, Any]) -> str:
    device = trainer.cuda_device
    place = "GPU memory" if device.type == "cuda" else "CPU memory on this node"
    return f"{decimal(memory_size(device))} {place}; {_saving_memory(config, keys)}"


def _saving_memory(config: ResolvedConfig, keys: Mapping[str, Any]) -> str:
    texts = []
    zero = config.engine_config.get("zero_optimization", {})
    for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        device = (zero.get(key) or {}).get("device", "none")
        if device != "none":
            texts.append(f"{what} on {device}")
    checkpointed = keys.get("activation_checkpointing")
    if checkpointed:
        texts.append(f"activation checkpointing in {', '.join(map(str, checkpointed))}")
    for key in ("sequence_parallel_size", "sequence_tiling", "torch_compile"):
        if keys.get(key) not in (None, 1, False):
            texts.append(key if isinstance(keys[key], (bool, dict)) else f"{key} {keys[key]}")
    return ", ".join(texts) or "no offload, no activation checkpointing"


def _model_states(trainer: Any, keys: Mapping[str, Any]) -> str:
    """Describes the size of the model states, as counted by `allennlp deepspeed estimate`."""
    states = _estimate_states(trainer, keys)
    is_gpu = trainer.cuda_device.type == "cuda"
    places = {"the GPU": states.gpu, "the CPU": states.cpu, "NVMe": states.nvme}
    if not is_gpu:
        # The model trains on the device that it would be offloaded to.
        places = {"the CPU": states.gpu + states.cpu, "NVMe": states.nvme}
    texts = []
    for place, kinds in places.items():
        sizes = {name: getattr(kinds, name) for name in ("weights", "gradients", "optimizer")}
        if total := sum(sizes.values()):
            listed = ", ".join(f"{name} {decimal(size)}" for name, size in sizes.items() if size)
            texts.append(f"{decimal(total)} on {place} ({listed})")
    text = f"about {', '.join(texts)} per worker"
    if not is_gpu:
        text = text.replace(" on the CPU", "", 1)
    # On a CPU only the part of a buffer that is used takes memory.
    if is_gpu and (buffers := states.gpu.buffers + states.cpu.buffers):
        text += f", buffers {decimal(buffers)} (reduce_bucket_size and others)"
    return text


def _estimate_states(trainer: Any, keys: Mapping[str, Any]) -> ModelStates:
    """Returns the model states of this rank, including those that aren't allocated yet."""
    config, size = trainer.resolved_config, ModelSize.from_model(trainer.engine.module)
    optimizer = trainer.optimizer
    states = optimizer_bytes(type(optimizer), optimizer.param_groups[0], size)
    reduces_once_a_step = keys["gradient_synchronization"] == "step"
    return model_states(size, states, config, dist.get_world_size(), reduces_once_a_step)


def _checkpoints(trainer: Any, serialization_dir: str) -> str:
    checkpointer = trainer.checkpointer
    if checkpointer is None or trainer.engine.zero_nvme_offload_optimizer():
        return "none"
    keys = checkpointer.keys
    times = ["after each epoch"] if keys["save_completed_epochs"] else []
    if keys["save_every_num_batches"] is not None:
        times.append(f"every {keys['save_every_num_batches']} steps")
    if keys["save_every_num_seconds"] is not None:
        times.append(f"every {keys['save_every_num_seconds']:g} s")
    if checkpointer.save_on_preemption:
        times.append("on SIGTERM or Ctrl-C")
    if not times:
        return "none"
    text = f"saved to {os.path.join(serialization_dir, '')} {' and '.join(times)}"
    count, age = keys["keep_most_recent_by_count"], keys["keep_most_recent_by_age"]
    if count is None and age is None:
        return text
    text += f", newest {max(1, count or 0)} kept"
    if count == 0:
        text += " (keep_most_recent_by_count 0: a run resumes from it)"
    if age is not None:
        text += f", and those of the last {age:g} s"
    if keys["keep_best_by_count"] is not None:
        text += f", and the best {keys['keep_best_by_count']}"
    return text


def _run_of_wandb(trainer: Any) -> str:
    """Returns the address of the run, or without a network its directory."""
    for callback in trainer.callbacks:
        run = getattr(callback.wandb, "run", None) if isinstance(callback, WandBCallback) else None
        if run is not None:
            return str(run.url or run.dir)
    return ""
