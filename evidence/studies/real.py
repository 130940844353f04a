"""
How fast real models train beside what people would write with other libraries.

- `lora`: adapters of SmolLM2-135M; TRL's `SFTTrainer` with DeepSpeed, and a bare DeepSpeed loop.
- `classifier`: MiniLM for classification; transformers' `Trainer` with DeepSpeed, and AllenNLP's
  own trainer with `DistributedDataParallel`, which shards nothing at any stage.
- `bi_encoder`: MiniLM with large batches; sentence-transformers' trainer with its cached loss,
  which shards nothing either.

Each tool is started by the command that its users start. The commands then make the same steps in
turn, while the others wait. Losses of all micro-batches have to be the same before anything is
written. `--tiny` trains models of a few thousand parameters, to see that everything runs.
`evidence/requirements.txt` has the tools.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import torch

from evidence import report
from evidence.harness.commands import Command
from evidence.harness.losses import largest_difference
from evidence.real.recorder import Cell

TIME = "30 minutes"

OURS, DDP = "ours", "gradient_descent"
# Of the tools, those that this package's requirements have.
NEED_NO_PACKAGE = ("bare", "trainer", DDP)
OPTIMIZER = {"type": "adamw", "lr": 1e-5, "weight_decay": 0.0}
# The default optimizer of transformers' trainers is fused, too.
FUSED = {"optimizer": {**OPTIMIZER, "type": "fused_adamw"}}


class Subject(NamedTuple):
    """
    # Parameters

    others : `List[str]`
        The tools beside ours.
    accumulation : `List[int]`
    sizes : `Dict[str, int]`
        Fields of a `Cell`.
    tiny : `Dict[str, int]`
        The same with `--tiny`.
    trainer : `Dict[str, Any]`
        Further keys of our trainer.
    unit : `str`
        What is counted in a second.
    """

    others: List[str]
    accumulation: List[int]
    sizes: Dict[str, int]
    tiny: Dict[str, int]
    trainer: Dict[str, Any]
    unit: str = "samples"


SUBJECTS = {
    "lora": Subject(
        others=["trl", "bare"],
        accumulation=[1, 8],
        sizes={"batch_size": 1, "max_length": 128},
        tiny={"batch_size": 2, "max_length": 16},
        trainer={"checkpointer": {"exclude_frozen_parameters": True}},
        unit="tokens",
    ),
    "classifier": Subject(
        others=["trainer", DDP],
        accumulation=[1, 8],
        sizes={"batch_size": 8, "max_length": 48},
        tiny={"batch_size": 2, "max_length": 8},
        trainer=FUSED,
    ),
    "bi_encoder": Subject(
        others=["sentence-transformers"],
        # A large batch is one of many chunks.
        accumulation=[1],
        sizes={"batch_size": 64, "max_length": 32, "chunk_size": 16},
        tiny={"batch_size": 8, "max_length": 8, "chunk_size": 4},
        trainer=FUSED,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 2, 3])
    parser.add_argument("--accumulation", nargs="+", type=int, choices=(1, 8), default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5, help="timed segments of each tool")
    parser.add_argument(
        "--time-limit", type=float, default=1200.0, help="seconds for all tools of one cell"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--keep", action="store_true", help="keep the other results that the output has"
    )


def run(settings: argparse.Namespace) -> None:
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    heading = report.heading(
        world_size, "transformers", "accelerate", "peft", "trl", "sentence-transformers"
    )
    rows = settings.page.keep(heading).get("rows", []) if settings.keep else []
    for name in settings.models:
        subject = SUBJECTS[name]
        with tempfile.TemporaryDirectory(prefix="real-") as directory:
            for stage, accumulation in product(settings.stages, settings.accumulation):
                if accumulation in subject.accumulation:
                    cell = (name, stage, accumulation)
                    rows = [row for row in rows if _cell_of(row) != cell]
                    rows += measure(*cell, settings, world_size, directory)
                    rows.sort(key=lambda row: (list(SUBJECTS).index(row["model"]), _cell_of(row)))
                    data = {**heading, "rows": rows}
                    settings.page.write(data, text(data))


def _cell_of(row: Dict[str, Any]) -> Tuple[str, int, int]:
    return row["model"], row["zero_stage"], row["accumulation"]


def measure(
    name: str,
    stage: int,
    accumulation: int,
    settings: argparse.Namespace,
    world_size: int,
    directory: str,
) -> List[Dict[str, Any]]:
    """
    Returns a row for each tool.

    # Parameters

    directory : `str`
        The pretrained model that is written there is used for all cells of `name`.

    # Raises

    `RuntimeError`
        If losses differ.
    """
    subject = SUBJECTS[name]
    missing = [tool for tool in subject.others if not _is_installed(tool)]
    tools = [tool for tool in (OURS, *subject.others) if tool not in missing]
    sizes = subject.tiny if settings.tiny else subject.sizes
    with tempfile.TemporaryDirectory(dir=directory) as outputs, ExitStack() as stack:
        cell = Cell(
            data=directory,
            output="",
            address="",
            world_size=world_size,
            stage=stage,
            accumulation=accumulation,
            # At stage 3 DeepSpeed plans the releases of parameters in the second.
            warmup=3,
            num_segments=settings.rounds,
            # A step of MiniLM with one pass takes less than a second.
            steps=4 if accumulation == 1 and "chunk_size" not in sizes else 1,
            **sizes,
        )
        import_module(f"evidence.real.{name}").prepare(cell, settings.tiny)
        commands = {}
        for tool in tools:
            output = f"{outputs}/{tool}"
            own = cell._replace(output=output, address=f"{output}.socket")
            command = Command(_arguments(name, tool, own), own, settings.time_limit)
            commands[tool] = stack.enter_context(command)
            command.wait_until_warm()
        seconds: Dict[str, List[float]] = {tool: [] for tool in tools}
        for i in range(settings.rounds):
            for tool in tools if i % 2 == 0 else reversed(tools):
                seconds[tool].append(commands[tool].time_segment())
        figures = {tool: command.finish() for tool, command in commands.items()}
    key = {"model": name, "zero_stage": stage, "accumulation": accumulation, "unit": subject.unit}
    losses = {tool: [r.losses for r in figures[tool].results] for tool in tools}
    samples = cell.batch_size * world_size * accumulation * cell.steps
    if subject.unit == "tokens":
        samples *= cell.max_length
    rows = [
        {
            **key,
            "tool": tool,
            "per_second": samples / statistics.median(seconds[tool]),
            "seconds": seconds[tool],
            "ratios": [other / own for own, other in zip(seconds[OURS], seconds[tool])],
            "peak_memory": max(result.peak_memory for result in figures[tool].results),
            "first_step": figures[tool].first_step,
            "last_step": figures[tool].last_step,
            "checkpoint_seconds": figures[tool].results[0].checkpoint_seconds,
            "checkpoint_bytes": figures[tool].results[0].checkpoint_bytes,
            "loss_difference": largest_difference(
                f"{tool} ({name}, stage {stage}, accumulation {accumulation})",
                _means(losses[tool]),
                _means(losses[OURS]),
                OURS,
                accumulation,
            ),
        }
        for tool in tools
    ]
    return rows + [{**key, "tool": tool, "skipped": "not installed"} for tool in missing]


def _is_installed(tool: str) -> bool:
    return tool in NEED_NO_PACKAGE or find_spec(tool.replace("-", "_")) is not None


def _means(losses: List[List[float]]) -> List[List[float]]:
    """Of the ranks: some tools report a rank's own part, others the global loss."""
    return [[statistics.fmean(of_ranks) for of_ranks in zip(*losses)]]


def _arguments(name: str, tool: str, cell: Cell) -> List[str]:
    """The command of a tool."""
    module = f"evidence.real.{name}"
    if tool not in (OURS, DDP):
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={cell.world_size}"]
        return [sys.executable, "-m", *launcher, "-m", module, tool]
    path = Path(f"{cell.output}.json")
    path.write_text(json.dumps(training_config(name, tool, cell)))
    packages = ["evidence.real.allennlp_steps", module]
    if tool == OURS:
        packages.insert(0, "allennlp_deepspeed")
    arguments = [argument for package in packages for argument in ("--include-package", package)]
    return ["allennlp", "train", str(path), "-s", f"{cell.output}/run", *arguments]


def training_config(name: str, tool: str, cell: Cell) -> Dict[str, Any]:
    """The config of ours or of AllenNLP's own trainer."""
    from evidence.real import data

    trainer: Dict[str, Any] = {
        "optimizer": OPTIMIZER,
        "num_gradient_accumulation_steps": cell.accumulation,
        "grad_norm": 1.0,
        "num_epochs": 1,
        "callbacks": ["record_real_steps"],
    }
    if tool == OURS:
        zero = {"zero_optimization": {"stage": cell.stage}}
        trainer.update(type="deepspeed", deepspeed_config=zero, **SUBJECTS[name].trainer)
        if cell.chunk_size:
            chunks = dict.fromkeys(("query", "document"), cell.chunk_size)
            trainer["grad_cache"] = {"chunk_size": chunks}
    config = {
        **import_module(f"evidence.real.{name}").config(cell),
        "train_data_path": data.in_turn(cell),
        "data_loader": {
            "batch_size": cell.batch_size,
            "batches_per_epoch": cell.total * cell.accumulation,
        },
        "trainer": trainer,
    }
    devices = list(range(cell.world_size)) if torch.cuda.is_available() else [-1] * cell.world_size
    if cell.world_size > 1:
        config["distributed"] = {"cuda_devices": devices}
        if tool == DDP:
            # The embedder's pooler isn't used.
            ddp = {"type": "torch", "find_unused_parameters": True}
            config["distributed"]["ddp_accelerator"] = ddp
    else:
        trainer["cuda_device"] = devices[0]
    return config


def text(data: Dict[str, Any]) -> str:
    headings = (
        "stage",
        "accumulation",
        "tool",
        "a second",
        "ours is faster by",
        "quartiles",
        "peak MB",
        "first step, s",
        "after the last step, s",
        "checkpoint, s",
        "checkpoint, MB",
        "losses differ by",
    )
    blocks = []
    for model in dict.fromkeys(row["model"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["model"] == model]
        blocks += [
            f"## {model}",
            f"{rows[0]['unit'].capitalize()} a second.",
            report.table(headings, map(_cells, rows)),
        ]
    return report.document(
        "Real models beside other tools",
        f"{report.describe(data)}\nHow the figures are made: [NOTES.md](../NOTES.md#real-models).",
        *blocks,
    )


def _cells(row: Dict[str, Any]) -> List[str]:
    key = [str(row["zero_stage"]), str(row["accumulation"]), row["tool"]]
    if "skipped" in row:
        return [*key, row["skipped"], *[""] * 8]
    is_ours = row["tool"] == OURS
    return [
        *key,
        f"{row['per_second']:.1f}",
        "" if is_ours else f"{statistics.median(row['ratios']):.2f}×",
        "" if is_ours else report.spread(report.quartiles(row["ratios"])),
        f"{row['peak_memory'] / 1e6:.0f}",
        f"{row['first_step']:.1f}",
        f"{row['last_step']:.1f}",
        f"{row['checkpoint_seconds']:.2f}",
        report.megabytes(row["checkpoint_bytes"]),
        f"{row['loss_difference']:.0e}",
    ]
