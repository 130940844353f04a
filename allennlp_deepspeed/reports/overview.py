"""
What a training is going to do, in about ten lines.
"""

import collections
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.engine.shards import whole_shape
from allennlp_deepspeed.processes.worker_device import memory_size
from allennlp_deepspeed.reports.reported_training import ReportedTraining

Lines = List[Tuple[str, str]]

_FP32 = torch.float32.itemsize
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "torch_autocast": 4}


def overview(trainer: ReportedTraining, keys: Mapping[str, Any], serialization_dir: str) -> Lines:
    """
    # Parameters

    trainer : `ReportedTraining`
        Which is about to begin.
    keys : `Mapping[str, Any]`
        The trainer's arguments, by name.
    serialization_dir : `str`

    # Returns

    `List[Tuple[str, str]]`
        What each line is about, and what it says.
    """
    config = trainer.resolved_config
    lines = [
        ("workers", _workers(trainer)),
        ("engine", f"ZeRO stage {config.zero_stage}, {_precision(config)}"),
        ("parameters", _parameters(trainer.engine)),
        ("batch", _batch(trainer)),
        ("optimizer", _optimizer(trainer)),
        ("gradients", _gradients(config, keys)),
        ("saving memory", _saving_memory(config, keys)),
        ("model states", _model_states(trainer)),
        ("checkpoints", _checkpoints(trainer, serialization_dir)),
    ]
    return [line for line in lines if line[1]]


def as_text(title: str, lines: Lines) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name.ljust(width)}  {text}" for name, text in lines)])


def as_table(title: str, lines: Lines) -> Group:
    """The same for a terminal."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    return Group(Text(title, style="bold"), table)


def _workers(trainer: ReportedTraining) -> str:
    device = trainer.cuda_device
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the CPU"
    if len(trainer.hosts) == 1:
        return f"one process on {name}"
    hosts = collections.Counter(trainer.hosts)
    where = "" if len(hosts) == 1 else f" of {', '.join(f'{h} ({n})' for h, n in hosts.items())}"
    return f"{len(trainer.hosts)} on {name}{where}"


def _precision(config: ResolvedConfig) -> str:
    return {"torch_autocast": "autocast by PyTorch"}.get(config.precision, config.precision)


def _parameters(engine: DeepSpeedEngine) -> str:
    counts = {True: 0, False: 0}
    for parameter in engine.module.parameters():
        counts[parameter.requires_grad] += whole_shape(parameter).numel()
    return f"{counts[True]:,} trained, {counts[False]:,} frozen"


def _batch(trainer: ReportedTraining) -> str:
    config, workers = trainer.resolved_config, trainer.num_readers
    steps = config.num_gradient_accumulation_steps
    size = config.engine_config.get("train_micro_batch_size_per_gpu")
    if not isinstance(size, int) or not trainer.has_fixed_batch_size:
        return f"micro-batches of no fixed size, accumulation {steps}, workers {workers}"
    return (
        f"micro-batch {size} × accumulation {steps} × workers {workers} "
        f"= {size * steps * workers} instances a step"
    )


def _optimizer(trainer: ReportedTraining) -> str:
    rates = sorted({group["lr"] for group in trainer.optimizer.param_groups})
    rate = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
    schedule = trainer.schedule_name
    text = f"{type(trainer.optimizer).__name__}, learning rate {rate}"
    return f"{text}, {'no schedule' if schedule is None else f'schedule {schedule}'}"


def _gradients(config: ResolvedConfig, keys: Mapping[str, Any]) -> str:
    clipping = config.engine_config.get("gradient_clipping")
    texts = [f"clipped to a norm of {clipping:g}" if clipping else "not clipped"]
    if dist.get_world_size() > 1:
        setting = keys["gradient_synchronization"]
        mode = {
            "auto": "when it takes least",
            "boundary": "once a step",
            "micro_batch": "after each micro-batch",
            "1": "once a step",
            "0": "after each micro-batch",
        }.get(
            f"{setting:g}" if isinstance(setting, (int, float)) else str(setting),
            "in part once a step, in part after each micro-batch",
        )
        if config.num_gradient_accumulation_steps == 1 and not keys.get("grad_cache"):
            mode = "once a step"
        texts.append(f"reduced {mode} (gradient_synchronization {setting})")
    if config.reduce_within is not None:
        texts.append(f"within {config.reduce_within} workers first")
    if keys.get("grad_cache"):
        texts.append("cached (grad_cache)")
    return ", ".join(texts)


def _saving_memory(config: ResolvedConfig, keys: Mapping[str, Any]) -> str:
    texts = []
    zero = config.engine_config.get("zero_optimization", {})
    for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        device = (zero.get(key) or {}).get("device", "none")
        if device != "none":
            texts.append(f"{what} on {device}")
    checkpointed = keys.get("activation_checkpointing")
    if checkpointed:
        texts.append(f"activations recomputed in {', '.join(map(str, checkpointed))}")
    for key in ("sequence_parallel_size", "sequence_tiling", "torch_compile"):
        if keys.get(key) not in (None, 1, False):
            texts.append(key if isinstance(keys[key], (bool, dict)) else f"{key} {keys[key]}")
    return ", ".join(texts) or "nothing offloaded, activations kept"


def _model_states(trainer: ReportedTraining) -> str:
    states = states_in_memory(trainer.engine, trainer.optimizer, trainer.resolved_config)
    there_is = memory_size(trainer.cuda_device)
    where = "GPU" if trainer.cuda_device.type == "cuda" else "machine"
    parts = ", ".join(f"{name} {decimal(size)}" for name, size in states.items() if size)
    total = decimal(sum(states.values()))
    return f"about {total} a worker ({parts}); the {where} has {decimal(there_is)}"


def states_in_memory(
    engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, config: ResolvedConfig
) -> Dict[str, int]:
    """
    About the bytes of this rank, on any device: of weights what there is, of the rest what there
    will be. `allennlp deepspeed estimate` counts more exactly, before there are workers.
    """
    parameters = list(engine.module.parameters())
    trained = sum(whole_shape(p).numel() for p in parameters if p.requires_grad)
    shares = dist.get_world_size() if config.zero_stage >= 2 else 1
    weights = [getattr(p, "ds_tensor", p) for p in parameters]
    stepped = [t for group in optimizer.param_groups for t in group["params"]]
    own = trained // dist.get_world_size() if config.zero_stage >= 1 else trained
    kept = _num_states(optimizer) * own * _FP32
    return {
        "weights": _bytes(weights),
        "gradients": trained * _BYTES[config.precision] // shares,
        "optimizer": kept + _bytes(stepped, besides=weights),
    }


def _num_states(optimizer: torch.optim.Optimizer) -> int:
    """Numbers that it keeps for each parameter, by what its group says: most have one kind."""
    group: Dict[str, Any] = max(optimizer.param_groups, key=lambda g: len(g["params"]))
    if "betas" in group:
        return 1 if "lion" in type(optimizer).__name__.lower() else 2
    return 1 if group.get("momentum") or "initial_accumulator_value" in group else 0


def _bytes(tensors: Iterable[torch.Tensor], besides: Sequence[torch.Tensor] = ()) -> int:
    """Storage that several share counts once."""
    seen = {_storage(tensor)[0] for tensor in besides}
    return sum(size for pointer, size in set(map(_storage, tensors)) if pointer not in seen)


def _storage(tensor: torch.Tensor) -> Tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _checkpoints(trainer: ReportedTraining, serialization_dir: str) -> str:
    checkpointer = trainer.checkpointer
    if checkpointer is None:
        return "none"
    keys = checkpointer.keys
    times = ["each epoch"] if keys["save_completed_epochs"] else []
    if keys["save_every_num_batches"] is not None:
        times.append(f"every {keys['save_every_num_batches']} steps")
    if keys["save_every_num_seconds"] is not None:
        times.append(f"every {keys['save_every_num_seconds']:g} s")
    kept = keys["keep_most_recent_by_count"]
    texts = [f"in {serialization_dir}", f"after {' and '.join(times)}" if times else "never saved"]
    if kept is not None:
        texts.append(f"the newest {kept} are kept")
    return ", ".join(texts)
