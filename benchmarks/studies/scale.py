"""
Counts what grows with the number of workers: collectives, their bytes, files of a checkpoint.

Trains a small network with Adam in fp32 and two micro-batches a step, on 2 to 32 CPU workers of one
machine, and counts by PyTorch's hooks what each rank passes to collectives in a step without
logging, in one with logging, and in a save. The counts don't depend on the machine. Writes a table
to `benchmarks/results`. Twenty minutes on 2 cores.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from benchmarks.harness import report
from tests.support import workers
from tests.support.communication import CommunicationCounter, Traffic
from tests.support.side_by_side import Batch, Side

TIME_LIMIT = 900  # seconds, for all workers of a training
_WIDTH, _NUM_LAYERS, _STEPS = 64, 8, 4
_MICRO_BATCHES = 2
_VARIANTS: Dict[str, Any] = {
    "0": (0, {}),
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "3, hpZ of 2": (3, {"zero_hpz_partition_size": 2}),
}


class Network(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        layers = [[nn.Linear(_WIDTH, _WIDTH), nn.Tanh()] for _ in range(_NUM_LAYERS)]
        self.layers = nn.Sequential(*(module for pair in layers for module in pair))

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.layers(inputs).square().mean()}


def batches(rank: int) -> List[Batch]:
    generator = torch.Generator().manual_seed(rank)
    number = _STEPS * _MICRO_BATCHES
    return [{"inputs": torch.randn(2, _WIDTH, generator=generator)} for _ in range(number)]


class Count(TrainerCallback):
    """Counts in the last step of the epoch, and from there to the end of the save."""

    reads_gradients = False

    def __init__(self) -> None:
        super().__init__("")
        self._counter = CommunicationCounter()
        self._num_steps = 0
        self.step: Dict[str, Traffic] = {}

    def on_batch(self, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        self._num_steps += 1
        if self._num_steps == _STEPS - 1:
            self._counter.start()
        elif self._num_steps == _STEPS:
            self.step = self._counter.read(reset=True)

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.save = self._counter.read()
        self._counter.stop()


def measure(variant: str, world_size: int) -> Dict[str, Any]:
    """Trains and returns the counts of the ranks that have the most."""
    stage, zero = _VARIANTS[variant]

    def train(trainer: Any) -> Any:
        trainer.train()
        (count,) = [c for c in trainer._callbacks if isinstance(c, Count)]
        return count.step, count.save

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(workers, "TIME_LIMIT", TIME_LIMIT),
    ):
        side = Side(
            Network,
            batches,
            stage,
            world_size,
            zero=zero,
            optimizer=lambda parameters: torch.optim.Adam(parameters),
            callbacks=lambda: [Count()],
            checkpointer=DeepSpeedCheckpointer(directory),
            num_epochs=1,
            num_gradient_accumulation_steps=_MICRO_BATCHES,
            gradient_synchronization="step",
            log_every_num_steps=10**6,
        )
        counts = side.on_all_ranks(train, Path(directory))
        files = [p for p in Path(directory).glob("checkpoint_*/**/*") if p.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
    return {
        "variant": variant,
        "workers": world_size,
        "step": _most([step for step, _ in counts]),
        "save": _most([save for _, save in counts]),
        "files": len(files),
        "checkpoint_bytes": num_bytes,
    }


def _most(of_ranks: List[Dict[str, Traffic]]) -> Dict[str, List[int]]:
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for traffic in of_ranks:
        for name, each in traffic.items():
            calls[name] = max(calls[name], each.calls)
            num_bytes[name] = max(num_bytes[name], each.bytes)
    return {name: [calls[name], num_bytes[name]] for name in sorted(calls)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS), choices=list(_VARIANTS))


def run(settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    data: Dict[str, Any] = {**report.heading(max(settings.workers)), "rows": []}
    data["num_bytes"] = 4 * sum(p.numel() for p in Network().parameters())
    for variant in settings.variants:
        for world_size in settings.workers:
            data["rows"].append(measure(variant, world_size))
            print(json.dumps(data["rows"][-1]), flush=True)
            report.write(settings.output, "scale", data, text(data))
    report.show(text(data))


def text(data: Dict[str, Any]) -> str:
    """Returns the page with the table of all rows."""
    headings = ["stage", "workers", "in a step", "bytes of the weights", "in a save", "bytes"]
    headings += ["files", "bytes of the checkpoint"]
    rows = []
    for row in data["rows"]:
        in_step = ", ".join(f"{calls} {name}" for name, (calls, _) in row["step"].items())
        in_save = ", ".join(f"{calls} {name}" for name, (calls, _) in row["save"].items())
        step_bytes = sum(each for _, each in row["step"].values()) / data["num_bytes"]
        save_bytes = sum(each for _, each in row["save"].values())
        rows.append(
            [
                row["variant"],
                str(row["workers"]),
                in_step,
                f"{step_bytes:.2f}",
                in_save,
                f"{save_bytes:,}",
                str(row["files"]),
                f"{row['checkpoint_bytes']:,}",
            ]
        )
    return report.document(
        "What grows with the number of workers",
        f"{report.describe(data)} `python -m benchmarks scale` runs it again.",
        f"A network of {data['num_bytes'] // 4:,} parameters in fp32 with Adam and "
        f'{_MICRO_BATCHES} micro-batches in a step, `"gradient_synchronization": "step"`. Given '
        "are the collectives of the rank that has the most: in a step, with the bytes of their "
        "tensors in units of the bytes of the weights, and from there to the end of the training "
        "with the save of the only checkpoint.",
        report.table(headings, rows),
    )
