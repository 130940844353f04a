"""
What grows with the number of workers: collectives, their bytes, operations on the shared store, and
files. Also how many gathers a token costs that a validation at stage 3 generates.

Trains a small network with Adam in fp32 and two micro-batches a step, on 2 to 32 CPU workers of one
machine, and counts what each rank does in a start, in a step without logging, in a save, and in a
resumption. The counts don't depend on the machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Union
from unittest import mock

import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.launch import process_group
from allennlp_deepspeed.launch.launcher_environment import LaunchedProcess
from evidence import report
from tests.support import workers
from tests.support.communication import CommunicationCounter, Traffic
from tests.support.side_by_side import Batch, Batches, Side

TIME = "30 minutes"

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

# A validation that generates so many tokens in each of two batches.
_NUM_TOKENS = (8, 16)

_FileStore = dist.FileStore


class CountedStore(dist.Store):
    """
    A `FileStore` that counts its operations, those of gloo included. What polls isn't counted: how
    often that asks depends on the machine.
    """

    latest: "CountedStore"

    def __init__(self, path: str, world_size: int = -1) -> None:
        super().__init__()
        self._store = _FileStore(path, world_size)
        self.num_operations = 0
        # PyTorch calls what is in Python only as long as Python refers to it.
        CountedStore.latest = self

    def set(self, key: str, value: Any) -> None:
        self.num_operations += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.num_operations += 1
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self.num_operations += 1
        return self._store.add(key, value)

    def check(self, keys: List[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: List[str], *timeout: Any) -> None:
        self.num_operations += len(keys)
        self._store.wait(keys, *timeout)

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)


class OpenedFiles:
    """Counts how often this process opens files in a directory, and the bytes of these files."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._is_counting = False
        self._paths: List[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: Any) -> None:
        if self._is_counting and event == "open" and str(arguments[0]).startswith(self._directory):
            self._paths.append(str(arguments[0]))

    def start(self) -> None:
        self._is_counting = True

    def stop(self) -> List[int]:
        """Returns how many have been opened, and the bytes of those that are there."""
        self._is_counting = False
        files = [path for path in set(self._paths) if os.path.isfile(path)]
        return [len(self._paths), sum(map(os.path.getsize, files))]


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

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._files = OpenedFiles(trainer._serialization_dir)

    def on_batch(self, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        self._num_steps += 1
        if self._num_steps == _STEPS - 1:
            self._counter.start()
        elif self._num_steps == _STEPS:
            self.step = self._counter.read(reset=True)
            self._num_operations = CountedStore.latest.num_operations
            self._files.start()

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.save = self._counter.read()
        self._counter.stop()

    def stop(self) -> None:
        """To be called when the checkpoint has been committed."""
        self.opened, _ = self._files.stop()
        self.num_operations = CountedStore.latest.num_operations - self._num_operations


def measure(variant: str, world_size: int) -> Dict[str, Any]:
    """Trains, resumes, and returns the counts of the ranks that have the most."""
    stage, zero = _VARIANTS[variant]

    def train(trainer: Any) -> Any:
        trainer.train()
        (count,) = [c for c in trainer._callbacks if isinstance(c, Count)]
        trainer._checkpointer.finish()
        count.stop()
        return count.step, count.save, count.opened, count.num_operations

    def resume(trainer: Any) -> Any:
        files = OpenedFiles(trainer._serialization_dir)
        files.start()
        with CommunicationCounter() as counter:
            trainer.train()
        return counter.read(), files.stop()

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(workers, "TIME_LIMIT", TIME_LIMIT),
        mock.patch.object(dist, "FileStore", CountedStore),
    ):
        arguments: Dict[str, Any] = {
            "zero": zero,
            "optimizer": lambda parameters: torch.optim.Adam(parameters),
            "num_epochs": 1,
            "num_gradient_accumulation_steps": _MICRO_BATCHES,
            "gradient_synchronization": "step",
            "log_every_num_steps": 10**6,
        }
        side = Side(
            Network,
            batches,
            stage,
            world_size,
            callbacks=lambda: [Count()],
            checkpointer=DeepSpeedCheckpointer(directory),
            **arguments,
        )
        counts = side.on_all_ranks(train, Path(directory))
        files = [p for p in Path(directory).glob("checkpoint_*/**/*") if p.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        # All of its epochs are done: it only restores.
        side = Side(
            Network,
            batches,
            stage,
            world_size,
            checkpointer=DeepSpeedCheckpointer(directory),
            **arguments,
        )
        resumed = side.on_all_ranks(resume, Path(directory))
    operations = [each for *_, each in counts]
    return {
        "variant": variant,
        "workers": world_size,
        "step": _most([step for step, *_ in counts]),
        "save": _most([save for _, save, *_ in counts]),
        "opened": [counts[0][2], max(opened for _, _, opened, _ in counts[1:])],
        "operations": [operations[0], max(operations[1:])],
        "files": len(files),
        "checkpoint_bytes": num_bytes,
        "resumption": _most([traffic for traffic, _ in resumed]),
        "read": [max(each) for each in zip(*(files for _, files in resumed))],
    }


class Generator(Model):
    """Generates `num_tokens` tokens in evaluation."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(Vocabulary())
        config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
        config.decoder_start_token_id = config.pad_token_id
        self.transformer = T5ForConditionalGeneration(config)
        self._num_tokens = num_tokens

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if not self.training:
            lengths = {"min_new_tokens": self._num_tokens, "max_new_tokens": self._num_tokens}
            self.transformer.generate(input_ids=inputs, **lengths)
        return {"loss": self.transformer(input_ids=inputs, labels=inputs).loss}


class CountValidation(TrainerCallback):
    """Counts from the step of the only epoch to its end."""

    reads_gradients = False

    def __init__(self) -> None:
        super().__init__("")
        self._counter = CommunicationCounter()

    def on_batch(self, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        if is_training:
            self._counter.start()

    def on_epoch(self, *args: Any, **kwargs: Any) -> None:
        self.traffic = self._counter.read()
        self._counter.stop()


def measure_generation(reshards: Union[bool, str], world_size: int) -> Dict[str, Any]:
    """Returns the number of gathers of a validation at stage 3, for each number of tokens."""

    def count(trainer: Any) -> int:
        trainer.train()
        (callback,) = [c for c in trainer._callbacks if isinstance(c, CountValidation)]
        return sum(t.calls for name, t in callback.traffic.items() if "gather" in name)

    def num_gathers(num_tokens: int) -> int:
        side = Side(
            lambda: Generator(num_tokens),
            lambda rank: [{"inputs": torch.full((1, 4), 2 + rank)}],
            3,
            world_size,
            validation_data_loader=Batches([{"inputs": torch.full((1, 4), 3)}] * 2),
            callbacks=lambda: [CountValidation()],
            num_epochs=1,
            reshard_after_micro_batch=reshards,
        )
        return max(side.on_all_ranks(count))

    with mock.patch.object(workers, "TIME_LIMIT", TIME_LIMIT):
        gathers = [num_gathers(num_tokens) for num_tokens in _NUM_TOKENS]
    return {"reshards": reshards, "workers": world_size, "gathers": gathers}


def measure_start(world_size: int) -> Dict[str, Any]:
    """Starts the process group as a training does, and returns the operations on the store."""

    def start(rank: int) -> Any:
        dist.barrier()
        launched = LaunchedProcess("", rank, rank, world_size, world_size, "", 0, store_file=path)
        dist.destroy_process_group()
        began = time.monotonic()
        with mock.patch.object(dist, "FileStore", CountedStore):
            process_group.start(launched, -1, TIME_LIMIT, TIME_LIMIT)
        return CountedStore.latest.num_operations, time.monotonic() - began

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(workers, "TIME_LIMIT", TIME_LIMIT),
    ):
        path = str(Path(directory) / "store")
        counts = workers.run_workers(world_size, start)
    operations = [each for each, _ in counts]
    return {
        "workers": world_size,
        "operations": [operations[0], max(operations[1:])],
        "seconds": max(seconds for _, seconds in counts),
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
    data["starts"] = [measure_start(world_size) for world_size in settings.workers]
    data["generation"] = [
        measure_generation(reshards, world_size)
        for reshards in ("auto", True)
        for world_size in settings.workers[:2]
    ]
    for variant in settings.variants:
        for world_size in settings.workers:
            data["rows"].append(measure(variant, world_size))
            print(json.dumps(data["rows"][-1]), flush=True)
            settings.page.write(data, text(data))


def text(data: Dict[str, Any]) -> str:
    """Returns the page with the tables of all rows."""
    return report.document(
        "What grows with the number of workers",
        f"{report.describe(data)} `python -m evidence scale` runs it again.",
        f"A network of {data['num_bytes'] // 4:,} parameters in fp32 with Adam and "
        f'{_MICRO_BATCHES} micro-batches in a step, `"gradient_synchronization": "step"`. Numbers '
        "are those of the rank that has the most. A step at stages 1 to 3 needs the bytes of the "
        "weights twice: once for gradients, once for weights (section 7 of [ZeRO]"
        "(https://arxiv.org/abs/1910.02054)). hpZ gathers twice.",
        "In a step, and from there to the end of the training, with the save of the only "
        "checkpoint, which rank 0 commits:",
        report.table(
            ["stage", "workers", "in a step", "bytes of the weights", "in a save", "bytes"],
            [
                [
                    row["variant"],
                    str(row["workers"]),
                    _calls(row["step"]),
                    f"{_bytes(row['step']) / data['num_bytes']:.2f}",
                    _calls(row["save"]),
                    f"{_bytes(row['save']):,}",
                ]
                for row in data["rows"]
            ],
        ),
        "Files of a checkpoint, and what a rank does to save it and to resume from it. Opened are "
        "files in the directory of the training, operations are those on the store of the process "
        "group:",
        report.table(
            [
                "stage",
                "workers",
                "files",
                "bytes of the checkpoint",
                "opened to save by rank 0, by others",
                "operations of rank 0, of others",
                "collectives of a resumption",
                "opened to resume",
                "bytes of these",
            ],
            [
                [
                    row["variant"],
                    str(row["workers"]),
                    str(row["files"]),
                    f"{row['checkpoint_bytes']:,}",
                    "{}, {}".format(*row["opened"]),
                    "{}, {}".format(*row["operations"]),
                    _calls(row["resumption"]),
                    str(row["read"][0]),
                    f"{row['read'][1]:,}",
                ]
                for row in data["rows"]
            ],
        ),
        "A start, from the first look into the store to the process group. gloo connects each pair "
        "of ranks, for which each rank reads the addresses of all others:",
        report.table(
            ["workers", "operations of rank 0, of others", "seconds"],
            [
                [
                    str(start["workers"]),
                    "{}, {}".format(*start["operations"]),
                    f"{start['seconds']:.2f}",
                ]
                for start in data["starts"]
            ],
        ),
        "Gathers of a validation at stage 3 of two batches, for each of which a T5 of two layers "
        "generates tokens one after another. Where there is memory for all parameters they are "
        "gathered once for all batches:",
        report.table(
            [
                "`reshard_after_micro_batch`",
                "workers",
                *(f"gathers, {num_tokens} tokens" for num_tokens in _NUM_TOKENS),
                "gathers per token",
            ],
            [
                [
                    f"`{json.dumps(each['reshards'])}`",
                    str(each["workers"]),
                    *map(str, each["gathers"]),
                    f"{_per_token(each['gathers']):g}",
                ]
                for each in data["generation"]
            ],
        ),
    )


def _per_token(gathers: List[int]) -> float:
    fewer, more = _NUM_TOKENS
    return (gathers[1] - gathers[0]) / (2 * (more - fewer))


def _calls(traffic: Dict[str, List[int]]) -> str:
    return ", ".join(f"{calls} {name}" for name, (calls, _) in traffic.items())


def _bytes(traffic: Dict[str, List[int]]) -> int:
    return sum(each for _, each in traffic.values())
