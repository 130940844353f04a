import argparse
import json
import logging
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Dict, Iterator, List, Optional

import psutil
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from allennlp_deepspeed.commands.memory_estimate import Estimate, Estimator, PlacementEstimate
from allennlp_deepspeed.launch import failures

_WIDTH = 130  # characters, if the output isn't a terminal

_NOTE = (
    "Model states and DeepSpeed's buffers only. Activations, the model's own buffers, what an "
    "operation takes for a moment, CUDA itself and fragmentation come on top: leave room for them. "
    "Buffers have the sizes of 'reduce_bucket_size', 'stage3_prefetch_bucket_size' and "
    "'stage3_max_reuse_distance' in 'zero_optimization', and of the 'buffer_*' of NVMe."
)


class EstimateMemory:
    """Command `allennlp deepspeed estimate`: estimates the memory of a model before training."""

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Print how many bytes the weights, gradients and optimizer states of a config's model "
            "take on each rank, at each ZeRO stage and with each offload, which of these fit, and "
            "the 'deepspeed_config' of the fastest that does. Needs no GPU and no compiler, "
            "and reads no pretrained weights."
        )
        subparser = parser.add_parser("estimate", description=description, help=description)
        add_config(subparser)
        subparser.add_argument(
            "--workers",
            type=_positive,
            help="how many to train with (default: as many as the config names)",
        )
        subparser.add_argument(
            "--gpu-memory",
            type=_bytes,
            help="memory of each GPU, as 80GB or 40GiB (default: that of this machine's, if it has "
            "one)",
        )
        subparser.add_argument(
            "--cpu-memory",
            type=_bytes,
            help="memory of each node (default: that of this machine)",
        )
        subparser.add_argument(
            "--nvme-memory",
            type=_bytes,
            help="space on the NVMe device of each node (default: what is free at the config's "
            "'nvme_path', or in the current folder if it names none that is on this machine)",
        )
        subparser.add_argument(
            "--json", action="store_true", help="print everything as JSON, in bytes"
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        with only_warnings():
            estimator = Estimator(failures.read(args.param_path, args.overrides), args.workers)
            estimate = estimator.estimate(
                gpu_memory=args.gpu_memory or _gpu_memory(),
                cpu_memory=args.cpu_memory or psutil.virtual_memory().total,
                nvme_memory=args.nvme_memory or _free_space(estimator.nvme_paths),
            )
        if args.json:
            print(json.dumps(_values(estimate), indent=2))
        else:
            _print(estimate)


def add_config(subparser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that reads a config as 'allennlp train' does."""
    subparser.add_argument("param_path", type=str, help="the config file of the training")
    subparser.add_argument(
        "-o",
        "--overrides",
        type=str,
        default="",
        help="a JSON structure with changes to the config, as for 'allennlp train'",
    )


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
        f"Largest module, whole on each worker at stage 3: {size.largest_module:,} "
        f"({estimate.largest_module or 'the model'})"
    )
    console.print(
        f"Precision: {estimate.precision}. Optimizer: {estimate.optimizer}. Workers: "
        f"{estimate.workers}, {estimate.workers_per_node} on each node."
    )
    console.print(_table(estimate))
    for placement in estimate.placements:
        if placement.problem is not None:
            console.print(f"Stage {placement.placement.name}: {placement.problem}")
    console.print(_NOTE)
    _print_advice(console, estimate)


def _table(estimate: Estimate) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ZeRO stage", no_wrap=True)
    table.add_column("device")
    for heading in ("weights", "gradients", "optimizer", "buffers", "of a rank", "of a node"):
        table.add_column(heading, justify="right")
    table.add_column("fits")
    for placement in estimate.placements:
        _add_rows(table, placement, estimate)
    return table


def _add_rows(table: Table, placement: PlacementEstimate, estimate: Estimate) -> None:
    fits = {None: "", True: "yes", False: "no"}[placement.fits]
    name, states = placement.placement.name, placement.states
    if states is None:
        table.add_row(name, "not possible", *[""] * 6, fits)
        return
    rows = {"GPU": states.gpu, "CPU": states.cpu, "NVMe": states.nvme}
    if estimate.device_type == "cpu":
        # The model trains on the device that it would be offloaded to.
        rows = {"CPU": states.gpu + states.cpu, "NVMe": states.nvme}
    for label, kinds in rows.items():
        if name == "" and kinds.total == 0:
            continue
        numbers = [kinds.weights, kinds.gradients, kinds.optimizer, kinds.buffers]
        numbers += [kinds.total, kinds.total * estimate.workers_per_node]
        table.add_row(name, label, *map(_format_bytes, numbers), fits)
        name = fits = ""


def _print_advice(console: Console, estimate: Estimate) -> None:
    if estimate.device_type == "cpu":
        console.print("The config's workers are on the CPU. For GPUs give --gpu-memory.")
        return
    if estimate.gpu_memory is None:
        console.print("To see what fits, give --gpu-memory: this machine has no GPU.")
        return
    memory = (
        f"{_format_bytes(estimate.gpu_memory)} on each GPU, and "
        f"{_format_bytes(estimate.cpu_memory)} of memory and "
        f"{_format_bytes(estimate.nvme_memory)} on NVMe on each node"
    )
    first = estimate.first_fitting
    if first is None:
        console.print(
            f"Nothing fits into {memory}. More workers divide what stage 3 has on each, and a "
            "smaller 'reduce_bucket_size' has smaller buffers."
        )
        return
    console.print(f"The fastest that fits into {memory}, in the section of the trainer:")
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


def _bytes(text: str) -> int:
    try:
        # A number without a unit would be bytes, which is never intended.
        num_bytes = TypeAdapter(ByteSize).validate_python("" if text.isdigit() else text)
    except ValidationError:
        num_bytes = ByteSize(0)
    if num_bytes <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' must be a size such as 80GB, 40GiB or 40960MB")
    return int(num_bytes)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' must be a number of workers, 1 or more")
    return int(text)
