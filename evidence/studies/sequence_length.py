"""
The memory of a worker against the length of a sequence: with 1, 2 and 4 workers that share it, with
and without activation checkpointing and tiled feed-forward layers.

Trains a Llama with random weights through `allennlp train`'s function on CPU workers, one sequence
a step, and counts the bytes of all tensors of a worker that are alive at a time, from before the
model is constructed. Losses of the same length are compared first. From the lengths that are
measured it draws a line, and says how long a sequence fits into 4 GB a worker: activations grow
with the length, and attention makes no matrix of its square.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from functools import partial, wraps
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Tuple
from unittest import mock

import numpy
import torch
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.data import DatasetReader, Instance
from allennlp.data.fields import TensorField
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

import allennlp_deepspeed  # noqa: F401  # registers what the configs name
from allennlp_deepspeed.launch import agent, worker
from evidence import report
from evidence.harness import plot
from tests.support.tensor_memory import TensorMemory

TIME = "10 minutes"

TIME_LIMIT = 900  # seconds, for a training
NUM_STEPS = 2
FITS = 4e9
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1 << 20,
}
OPTIONS: Dict[str, Dict[str, Any]] = {
    "all activations": {},
    "tiled": {"sequence_tiling": {"modules": ["mlp$"], "num_tiles": 16}},
    "checkpointed": {"activation_checkpointing": [r"layers\.\d+$"]},
    "checkpointed, tiled": {
        "activation_checkpointing": [r"layers\.\d+$"],
        "sequence_tiling": {"modules": ["mlp$"], "num_tiles": 16},
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 1536, 2048])
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))


def run(settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows: List[Dict[str, Any]] = []
    for length in settings.lengths:
        for workers in settings.workers:
            for options in settings.options:
                rows.append(measure(length, workers, options))
                print(json.dumps(rows[-1]), flush=True)
        check_losses([row for row in rows if row["length"] == length])
    data = {**report.heading(max(settings.workers)), "llama": LLAMA, "rows": rows}
    settings.page.write(data, text(data))
    picture(data, settings.output / "sequence_length.png")


def check_losses(rows: List[Dict[str, Any]]) -> None:
    """That of the first step is of the same weights, that of the next of one step of training."""
    for row in rows:
        if not numpy.allclose(row["losses"], rows[0]["losses"], rtol=1e-4):
            raise RuntimeError(f"The losses are not the same: {row} and {rows[0]}")


@DatasetReader.register("random_text")
class RandomText(DatasetReader):
    """Texts of random tokens, as many of them as the path says."""

    def __init__(self, length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._length = length

    @override
    def _read(self, file_path: str) -> Iterable[Instance]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(int(file_path)):
            ids = torch.randint(LLAMA["vocab_size"], (self._length,), generator=generator)
            fields = {"input_ids": TensorField(ids), "labels": TensorField(ids)}
            yield Instance(fields)  # type: ignore[arg-type]


@TrainerCallback.register("record_losses")
class RecordLosses(TrainerCallback):
    """Keeps the mean over all workers of each step."""

    losses: List[float] = []

    @override
    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        loss = args[1][0]["loss"].detach().clone()
        torch.distributed.all_reduce(loss)
        self.losses.append(loss.item() / torch.distributed.get_world_size())


def counted(directory: Path, function: Callable[..., Any], *args: Any) -> None:
    """Calls a function, and writes how much memory it has needed, and the losses."""
    with TensorMemory() as memory:
        function(*args)
    outcome = {"peak": memory.peak, "losses": RecordLosses.losses}
    (directory / f"outcome_{os.getpid()}.json").write_text(json.dumps(outcome))


def config(length: int, workers: int, options: str) -> Dict[str, Any]:
    values: Dict[str, Any] = {
        "dataset_reader": {"type": "random_text", "length": length},
        "train_data_path": str(NUM_STEPS),
        "vocabulary": {"type": "empty"},
        "model": {"type": "causal_lm", "config": LLAMA, "loss_chunk_size": 256},
        "data_loader": {"batch_size": 1},
        "trainer": {
            "type": "deepspeed",
            # Of which DeepSpeed's default is half a gigabyte, more than this model.
            "deepspeed_config": {
                "type": "zero_3",
                "zero_optimization": {"reduce_bucket_size": 1_000_000},
            },
            "sequence_parallel_size": workers,
            "optimizer": {"type": "sgd", "lr": 0.01},
            "num_epochs": 1,
            "callbacks": ["record_losses"],
            "checkpointer": None,
            "run_confidence_checks": False,
            "cuda_device": -1,
            **OPTIONS[options],
        },
    }
    if workers > 1:
        del values["trainer"]["cuda_device"]
        values["distributed"] = {"cuda_devices": [-1] * workers}
    return values


def measure(length: int, workers: int, options: str) -> Dict[str, Any]:
    """In processes that are forked from this one, since imports take longer."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_train, args=(config(length, workers, options), directory))
        process.start()
        process.join(TIME_LIMIT)
        if process.is_alive():
            process.kill()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError((directory / "output.txt").read_text(errors="replace")[-5000:])
        outcomes = [json.loads(p.read_text()) for p in directory.glob("outcome_*.json")]
    return {
        "length": length,
        "workers": workers,
        "options": options,
        "peak": max(outcome["peak"] for outcome in outcomes),
        "losses": outcomes[0]["losses"],
    }


def _train(values: Dict[str, Any], directory: Path) -> None:
    with open(directory / "output.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    # Which checks the config, and has readers read by groups.
    train = partial(train_command.train_model, Params(values), directory / "out")
    if "distributed" not in values:
        counted(directory, train)
        return
    run = worker.run

    @wraps(run)
    def counted_run(*args: Any) -> Any:
        return counted(directory, run, *args)

    # Forks of this process have the reader and the callback registered.
    forked = mock.patch.object(agent, "START_METHOD", "fork")
    with forked, mock.patch.object(worker, "run", counted_run):
        train()


def bytes_per_token(rows: List[Dict[str, Any]]) -> float:
    slope, _ = numpy.polyfit([r["length"] for r in rows], [r["peak"] for r in rows], 1)
    return float(slope)


def longest(rows: List[Dict[str, Any]], of_one_worker: List[Dict[str, Any]]) -> float:
    """
    Tokens of a sequence that fits. Where the peak of short sequences isn't yet that of activations,
    each token is taken for what one worker has for it, divided by the workers.
    """
    last = max(rows, key=lambda row: row["length"])
    share = bytes_per_token(of_one_worker) / last["workers"]
    return last["length"] + (FITS - last["peak"]) / max(bytes_per_token(rows), share)


def by_variant(data: Dict[str, Any]) -> Dict[Tuple[int, str], List[Dict[str, Any]]]:
    variants: Dict[Tuple[int, str], List[Dict[str, Any]]] = {}
    for row in data["rows"]:
        variants.setdefault((row["workers"], row["options"]), []).append(row)
    return variants


def text(data: Dict[str, Any]) -> str:
    lengths = sorted({row["length"] for row in data["rows"]})
    rows = []
    for (workers, options), measured in by_variant(data).items():
        of_one_worker = by_variant(data).get((1, options), measured)
        peaks = {row["length"]: row["peak"] for row in measured}
        rows.append(
            [str(workers), options]
            + [f"{peaks[length] / 1e6:,.0f}" for length in lengths]
            + [f"{bytes_per_token(measured) / 1000:.1f}"]
            + [f"{round(longest(measured, of_one_worker), -3):,.0f}"]
        )
    headings = ["workers", "memory", *(f"{n:,}" for n in lengths), "KB a token", "fits into 4 GB"]
    return report.document(
        "Memory against the length of a sequence",
        f"{report.describe(data)}\n"
        "A Llama with 6 layers of width 256 at ZeRO stage 3 in fp32, one sequence a step. MB of a "
        "worker's tensors at their peak, of the worker that has most, for sequences of so many "
        "tokens; how much more for each token; and the longest sequence that fits into 4 GB a "
        "worker, by these figures.\n"
        "How the figures are made: [NOTES.md](../NOTES.md#sequence-length).",
        report.table(headings, rows),
    )


def picture(data: Dict[str, Any], path: Path) -> None:
    workers = sorted({row["workers"] for row in data["rows"]})
    with plot.figure(path, (3.2 * len(workers) + 2.4, 3.2), columns=len(workers)) as axes:
        for axis, number in zip(axes.flat, workers):
            for (others, options), rows in by_variant(data).items():
                if others == number:
                    peaks = [row["peak"] / 1e6 for row in rows]
                    axis.plot([row["length"] for row in rows], peaks, marker="o", label=options)
            axis.set_title(f"{number} worker{'s' if number > 1 else ''}")
            axis.set_xlabel("tokens")
        axes[0][0].set_ylabel("MB a worker")
