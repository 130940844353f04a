import argparse
import json
import logging
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, Dict, Iterator, List, Optional

import psutil
import torch
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from allennlp_deepspeed.commands.memory_estimate import Estimate, Estimator, PlacementEstimate
from allennlp_deepspeed.engine.lifecycle.model_state_memory import (
    CUDA_CONTEXT,
    NCCL_COMMUNICATOR,
    Bytes,
)
from allennlp_deepspeed.launch import error_messages

_WIDTH = 140  # characters, if the output isn't a terminal
_KINDS = {"weights", "gradients", "optimizer", "buffers"}

_NOTE = (
    "Model states, DeepSpeed's buffers, moving averages, copies for 'async_save' and parameters "
    "that are gathered to save them are counted{of_gpus}. Leave room for activations, the "
    "model's own buffers, temporary tensors and fragmentation. At stages 1 to 3 "
    "buffers include 'reduce_bucket_size' elements, which DeepSpeed allocates in full (twice with "
    "'overlap_comm'): all trainable parameters, at most 5e8, if it is unset. At stage 3 they also "
    "include gathered parameters, "
    "limited by 'stage3_prefetch_bucket_size' and 'stage3_max_reuse_distance', and on NVMe "
    "'buffer_count' times 'buffer_size'. These keys are in "
    "'trainer.deepspeed_config.zero_optimization'."
)


def run(args: argparse.Namespace) -> None:
    """Estimates the memory of a model before training."""
    with only_warnings():
        estimator = Estimator(error_messages.read(args.param_path, args.overrides), args.workers)
        estimate = estimator.estimate(
            gpu_memory=args.gpu_memory or _gpu_memory(),
            cpu_memory=args.cpu_memory or psutil.virtual_memory().total,
            nvme_memory=args.nvme_memory or _free_space(estimator.nvme_paths),
        )
    if args.json:
        print(json.dumps(_values(estimate), indent=2))
    else:
        _print(estimate)


@contextmanager
def only_warnings() -> Iterator[None]:
    """
    Context manager that disables log lines below WARNING. AllenNLP and the resolution of a config,
    which runs once per placement, would log pages at level INFO.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(disabled)


def _values(estimate: Estimate) -> Dict[str, Any]:
    size, first = estimate.size, estimate.first_fitting
    return {
        **asdict(estimate),
        "size": {
            "trainable": sum(size.trainable),
            "frozen": sum(size.frozen),
            "largest_parameter": size.largest_parameter,
            "largest_module": size.largest_module,
        },
        "deepspeed_config": None if first is None else first.deepspeed_config,
    }


def _print(estimate: Estimate) -> None:
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    size = estimate.size
    trainable, frozen = sum(size.trainable), sum(size.frozen)
    console.print(f"Parameters: {size.total:,} ({trainable:,} trainable, {frozen:,} frozen)")
    console.print(f"Largest parameter: {size.largest_parameter:,} ({estimate.largest_parameter})")
    console.print(
        f"Largest module (gathered at stage 3): {size.largest_module:,} "
        f"({estimate.largest_module or 'the model'})"
    )
    console.print(
        f"Precision: {estimate.precision}. Optimizer: {estimate.optimizer}. Workers: "
        f"{estimate.workers} ({estimate.workers_per_node} per node)."
    )
    console.print(_table(estimate))
    for placement in estimate.placements:
        if placement.problem is not None:
            console.print(f"Stage {placement.placement.name}: {placement.problem}")
    of_gpus = (
        f", and for each GPU {_format_bytes(CUDA_CONTEXT)} for the CUDA context and, with several "
        f"workers, {_format_bytes(NCCL_COMMUNICATOR)} for NCCL's buffers"
    )
    console.print(_NOTE.format(of_gpus="" if estimate.device_type == "cpu" else of_gpus))
    _print_advice(console, estimate)


def _table(estimate: Estimate) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ZeRO stage", no_wrap=True)
    table.add_column("device")
    counted = [
        kinds
        for placement in estimate.placements
        if placement.states is not None
        for kinds in (placement.states.gpu, placement.states.cpu)
    ]
    # The others are of what only some configs have.
    kinds = [
        kind.name
        for kind in fields(Bytes)
        if kind.name in _KINDS or any(getattr(each, kind.name) for each in counted)
    ]
    for heading in (*kinds, "per rank", "per node"):
        table.add_column(heading, justify="right")
    table.add_column("fits")
    for placement in estimate.placements:
        _add_rows(table, placement, estimate, kinds)
    return table


def _add_rows(
    table: Table, placement: PlacementEstimate, estimate: Estimate, kinds: List[str]
) -> None:
    fits = {None: "", True: "yes", False: "no"}[placement.fits]
    name, states = placement.placement.name, placement.states
    if states is None:
        table.add_row(name, "not possible", *[""] * (len(kinds) + 2), fits)
        return
    rows = {"GPU": states.gpu, "CPU": states.cpu, "NVMe": states.nvme}
    if estimate.device_type == "cpu":
        # The model trains on the device that it would be offloaded to.
        rows = {"CPU": states.gpu + states.cpu, "NVMe": states.nvme}
    for label, on_device in rows.items():
        if name == "" and on_device.total == 0:
            continue
        numbers = [getattr(on_device, kind) for kind in kinds]
        numbers += [on_device.total, on_device.total * estimate.workers_per_node]
        table.add_row(name, label, *map(_format_bytes, numbers), fits)
        name = fits = ""


def _print_advice(console: Console, estimate: Estimate) -> None:
    if estimate.device_type == "cpu":
        console.print("The config trains on the CPU. For GPUs add --gpu-memory.")
        return
    if estimate.gpu_memory is None:
        console.print("This machine has no GPU: add --gpu-memory to see what fits.")
        return
    memory = (
        f"{_format_bytes(estimate.gpu_memory)} per GPU, {_format_bytes(estimate.cpu_memory)} CPU "
        f"memory and {_format_bytes(estimate.nvme_memory)} NVMe per node"
    )
    first = estimate.first_fitting
    if first is None:
        console.print(
            f"Nothing fits into {memory}. Stage 3 needs less memory per worker with more workers; "
            "a smaller 'reduce_bucket_size' makes buffers smaller."
        )
        return
    console.print(f"Fastest configuration that fits into {memory}; write in 'trainer':")
    value = json.dumps(first.deepspeed_config)
    console.print(f'"deepspeed_config": {value}', soft_wrap=True)


def _format_bytes(num_bytes: int) -> str:
    return decimal(num_bytes) if num_bytes else "0"


def _gpu_memory() -> Optional[int]:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def _free_space(folders: List[str]) -> int:
    """
    Returns the least free space in bytes among the directories that exist on this machine, or else
    the current directory's.
    """
    there = [folder for folder in folders if os.path.isdir(folder)] or [os.curdir]
    return min(shutil.disk_usage(folder).free for folder in there)
