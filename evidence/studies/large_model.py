"""
The peak memory of a worker that constructs and trains a model that is partitioned from the start.

Trains a transformer classifier of some 200 million parameters for a few steps through
`allennlp train`: with `gradient_descent` in one process, and at ZeRO stage 3, constructed
partitioned, in one process and on two and four workers over gloo. Each worker tells the peak of its
memory from before the model is constructed until after the last step; see
`evidence.harness.memory`. For all of them `MALLOC_MMAP_THRESHOLD_` has glibc give tensors back to
the system as soon as they are freed: it would keep many of them between those that stay. Losses are
compared first.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import torch
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from evidence import report
from evidence.harness import training
from evidence.harness.memory import PeakMemory

TIME = "10 minutes"

WIDTH = 1024
NUM_STEPS = 3
TOLERANCE = 1e-3  # relative, of the losses

# When a worker imports this, it hasn't constructed the model yet.
_memory = PeakMemory(torch.device("cpu"))
_memory.start()


@TrainerCallback.register("report_peak_memory")
class ReportPeakMemory(TrainerCallback):
    """Writes the peak of this worker's memory, after the last step, to `memory_{rank}.json`."""

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._losses: List[float] = []

    @override
    def on_batch(
        self, trainer, batch_inputs, batch_outputs, *args: Any, is_training: bool, **kwargs: Any
    ) -> None:
        if is_training:
            self._losses.extend(float(outputs["loss"]) for outputs in batch_outputs)
            _memory.stop()

    @override
    def on_end(self, trainer, *args: Any, **kwargs: Any) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        parameters = trainer.model.parameters()
        measured = {
            "bytes": _memory.bytes,
            "losses": self._losses,
            "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        }
        path = os.path.join(self.serialization_dir, f"memory_{rank}.json")
        Path(path).write_text(json.dumps(measured))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=16)


def run(settings: argparse.Namespace) -> None:
    variants = [(1, False), (1, True), (2, True), (4, True)]
    rows = [measure(settings.layers, *variant) for variant in variants]
    _compare_losses(rows)
    for row in rows:
        row["bytes_per_parameter"] = row["bytes"] / row["num_parameters"]
        row["ratio"] = row["bytes"] / rows[1]["bytes"]
    data = {**report.heading(4), "rows": rows}
    settings.page.write(data, text(data))


def config(directory: Path, num_layers: int, num_workers: int, sharded: bool) -> Dict[str, Any]:
    """Has the same two instances in each step of each worker, so that the losses are the same."""
    trainer: Dict[str, Any] = {"callbacks": ["report_peak_memory"], "checkpointer": None}
    others: Dict[str, Any] = {}
    if sharded:
        others["type"] = "deepspeed"
        trainer["type"] = "deepspeed"
        trainer["deepspeed_config"] = {
            "type": "zero_3",
            "zero_optimization": {
                # DeepSpeed would keep all parameters whole from the forward pass to the backward
                # pass, since they are fewer than a billion.
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 0,
                "reduce_bucket_size": WIDTH**2,
                # In the step, gradients are flattened so many at a time.
                "sub_group_size": 12 * WIDTH**2,
            },
        }
    pairs = [("one two three four", "a"), ("five six seven", "b")]
    return training.config(
        directory,
        [pair for _ in range(NUM_STEPS) for pair in pairs for _ in range(num_workers)],
        batch_size=2,
        num_workers=num_workers,
        trainer=trainer,
        **training.transformer(WIDTH, num_layers, dropout_prob=0.0),
        **others,
    )


def measure(num_layers: int, num_workers: int, sharded: bool) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        values = config(out.parent, num_layers, num_workers, sharded)
        include = ("--include-package", __name__)
        training.train(values, out, *include, MALLOC_MMAP_THRESHOLD_="1000000")
        ranks = [json.loads(file.read_text()) for file in out.glob("memory_*.json")]
    assert len(ranks) == num_workers
    return {
        "trainer": "zero_3" if sharded else "gradient_descent",
        "num_workers": num_workers,
        "num_parameters": ranks[0]["num_parameters"],
        "bytes": max(rank["bytes"] for rank in ranks),
        "losses": ranks[0]["losses"],
    }


def _compare_losses(rows: List[Dict[str, Any]]) -> None:
    for row in rows:
        for actual, expected in zip(row["losses"], rows[0]["losses"], strict=True):
            if not math.isclose(actual, expected, rel_tol=TOLERANCE):
                raise SystemExit(f"The losses differ: {json.dumps(rows, indent=1)}")


def text(data: Dict[str, Any]) -> str:
    rows = [
        [
            f"`{row['trainer']}`",
            str(row["num_workers"]),
            report.megabytes(row["bytes"]),
            f"{row['bytes_per_parameter']:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in data["rows"]
    ]
    num_parameters = data["rows"][0]["num_parameters"]
    headings = ("", "workers", "peak of a worker, MB", "bytes a parameter", "to one process")
    return report.document(
        "Memory to construct and train a large model",
        f"`python -m evidence large_model`: a transformer of {num_parameters:,} parameters in "
        f"fp32 with Adam.\n{report.describe(data)}",
        report.table(headings, rows),
    )
