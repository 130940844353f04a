"""
How much memory a worker needs to construct and train a model that is partitioned from the start.

`python -m benchmarks.large_model` trains a transformer classifier of some 200 million parameters
for a few steps through `allennlp train`: with `gradient_descent` in one process, and at ZeRO stage
3, constructed partitioned, in one process and on two and four workers over gloo. Each worker tells
the peak of its memory from before the model is constructed until after the last step; see
`benchmarks.memory`. For all of them `MALLOC_MMAP_THRESHOLD_` has glibc give tensors back to the
system as soon as they are freed: it would keep many of them between those that stay. Losses are
compared first. Prints a table and writes it to
`benchmarks/results/large_model.json` and `.md`.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import torch
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import figures
from benchmarks.memory import PeakMemory

REPOSITORY = Path(__file__).resolve().parent.parent
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

    @overrides
    def on_batch(
        self, trainer, batch_inputs, batch_outputs, *args: Any, is_training: bool, **kwargs: Any
    ) -> None:
        if is_training:
            self._losses.extend(float(outputs["loss"]) for outputs in batch_outputs)
            _memory.stop()

    @overrides
    def on_end(self, trainer, *args: Any, **kwargs: Any) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        parameters = trainer.model.parameters()
        report = {
            "bytes": _memory.bytes,
            "losses": self._losses,
            "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        }
        path = os.path.join(self.serialization_dir, f"memory_{rank}.json")
        Path(path).write_text(json.dumps(report))


def config(data: Path, num_layers: int, num_workers: int, sharded: bool) -> Dict[str, Any]:
    trainer: Dict[str, Any] = {
        "optimizer": {"type": "adam", "lr": 1e-5},
        "num_epochs": 1,
        "callbacks": ["report_peak_memory"],
        "checkpointer": None,
    }
    if sharded:
        trainer.update(
            type="deepspeed",
            deepspeed_config={
                "type": "zero_3",
                "zero_optimization": {
                    # DeepSpeed would keep all parameters whole from the forward pass to the
                    # backward pass, since they are fewer than a billion.
                    "stage3_max_reuse_distance": 0,
                    "stage3_prefetch_bucket_size": 0,
                    "reduce_bucket_size": WIDTH**2,
                    # In the step, gradients are flattened so many at a time.
                    "sub_group_size": 12 * WIDTH**2,
                },
            },
        )
    experiment: Dict[str, Any] = {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "train_data_path": str(data),
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": WIDTH}}
            },
            "seq2seq_encoder": {
                "type": "pytorch_transformer",
                "input_dim": WIDTH,
                "num_layers": num_layers,
                "feedforward_hidden_dim": 4 * WIDTH,
                "num_attention_heads": 16,
                "dropout_prob": 0.0,
            },
            "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": WIDTH},
        },
        "data_loader": {"batch_size": 2},
        "trainer": trainer,
    }
    if sharded:
        experiment["type"] = "deepspeed"
    if num_workers > 1:
        experiment["distributed"] = {"cuda_devices": [-1] * num_workers}
    else:
        trainer["cuda_device"] = -1
    return experiment


def measure(num_layers: int, num_workers: int, sharded: bool) -> Dict[str, Any]:
    """Trains on the same two instances in each worker, so that the losses are the same."""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data.jsonl"
        pairs = [("one two three four", "a"), ("five six seven", "b")]
        lines = [
            {"text": text, "label": label}
            for _ in range(NUM_STEPS)
            for text, label in pairs
            for _ in range(num_workers)
        ]
        data.write_text("\n".join(map(json.dumps, lines)))
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config(data, num_layers, num_workers, sharded)))
        out = Path(directory) / "out"
        subprocess.run(
            ["allennlp", "train", path, "-s", out, "--include-package", "benchmarks.large_model"],
            check=True,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
            capture_output=True,
        )
        reports = [json.loads(file.read_text()) for file in out.glob("memory_*.json")]
    assert len(reports) == num_workers
    return {
        "trainer": "zero_3" if sharded else "gradient_descent",
        "num_workers": num_workers,
        "num_parameters": reports[0]["num_parameters"],
        "bytes": max(report["bytes"] for report in reports),
        "losses": reports[0]["losses"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    num_layers = parser.parse_args().layers
    rows = [
        measure(num_layers, num_workers, sharded)
        for num_workers, sharded in [(1, False), (1, True), (2, True), (4, True)]
    ]
    _compare_losses(rows)
    for row in rows:
        row["bytes_per_parameter"] = row["bytes"] / row["num_parameters"]
        row["ratio"] = row["bytes"] / rows[1]["bytes"]
    report = {**figures.heading(4, ["torch", "deepspeed", "allennlp"]), "rows": rows}
    (figures.RESULTS / "large_model.json").write_text(json.dumps(report, indent=1) + "\n")
    text = "\n".join(_markdown(report))
    (figures.RESULTS / "large_model.md").write_text(text + "\n")
    Console().print(Markdown(text))


def _compare_losses(rows: List[Dict[str, Any]]) -> None:
    for row in rows:
        for actual, expected in zip(row["losses"], rows[0]["losses"], strict=True):
            if not math.isclose(actual, expected, rel_tol=TOLERANCE):
                raise SystemExit(f"The losses differ: {json.dumps(rows, indent=1)}")


def _markdown(report: Dict[str, Any]) -> List[str]:
    headings = ["", "workers", "peak of a worker, MB", "bytes a parameter", "to one process"]
    rows = [
        [
            f"`{row['trainer']}`",
            str(row["num_workers"]),
            figures.megabytes(row["bytes"]),
            f"{row['bytes_per_parameter']:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in report["rows"]
    ]
    num_parameters = report["rows"][0]["num_parameters"]
    return [
        "# Memory to construct and train a large model",
        "",
        f"`python -m benchmarks.large_model`: a transformer of {num_parameters:,} parameters in "
        "fp32 with Adam.",
        figures.describe(report),
        "",
        *figures.markdown_table(headings, rows),
    ]


if __name__ == "__main__":
    main()
