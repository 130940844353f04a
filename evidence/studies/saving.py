"""
How long saving a checkpoint keeps training waiting, against DeepSpeed's own save of the same state.

Trains a transformer classifier of some 19 million parameters on two workers over gloo. After each
step one of them is timed, in turn: DeepSpeed's `engine.save_checkpoint` as it comes, and
`DeepSpeedCheckpointer.save_checkpoint`, which also saves the training state, and flushes, hashes
and commits in the background. What is still being written from the time before is waited for
outside of the timing, but its processor time is counted. On disk, and in memory (tmpfs), where what
is written doesn't wait for a device.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from evidence import report
from evidence.harness import training

TIME = "10 minutes"

MEMORY = Path("/dev/shm")


@TrainerCallback.register("time_saves")
class TimeSaves(TrainerCallback):
    """After each step, times one save of each kind, in alternating order."""

    def __init__(self, serialization_dir: str, num_pairs: int) -> None:
        super().__init__(serialization_dir)
        self._num_pairs = num_pairs
        self._taken: Dict[str, List[Tuple[float, float]]] = {"deepspeed": [], "checkpointer": []}

    @override
    def on_batch(self, trainer, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        num_pairs = len(self._taken["deepspeed"])
        if not is_training or num_pairs == self._num_pairs:
            return
        kinds: List[Callable] = [self._save_with_deepspeed, self._save_with_checkpointer]
        for save in kinds if num_pairs % 2 else reversed(kinds):
            save(trainer)

    def _save_with_deepspeed(self, trainer) -> None:
        directory = os.path.join(self.serialization_dir, "deepspeed_save")
        stopwatch = _Stopwatch()
        trainer.engine.save_checkpoint(directory, tag="engine")
        stopwatch.stop()
        self._taken["deepspeed"].append(stopwatch.read())
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
        dist.barrier()

    def _save_with_checkpointer(self, trainer) -> None:
        stopwatch = _Stopwatch()
        trainer._checkpointer.save_checkpoint(trainer)
        stopwatch.stop()
        trainer._checkpointer.finish()
        self._taken["checkpointer"].append(stopwatch.read())

    @override
    def on_end(self, trainer, *args: Any, is_primary: bool = True, **kwargs: Any) -> None:
        if is_primary:
            path = os.path.join(self.serialization_dir, "taken.json")
            Path(path).write_text(json.dumps(self._taken))


class _Stopwatch:
    """Begins when all ranks are there. Every rank must call each of its methods."""

    def __init__(self) -> None:
        dist.barrier()
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()

    def stop(self) -> None:
        """Of the clock, when all ranks are done. Processor time goes on."""
        dist.barrier()
        self._seconds = time.perf_counter() - self._start

    def read(self) -> Tuple[float, float]:
        """Seconds from start to stop, and of processor time until now, of all ranks."""
        cpu_seconds = torch.tensor(time.process_time() - self._cpu_start, dtype=torch.float64)
        dist.all_reduce(cpu_seconds)
        return self._seconds, float(cpu_seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--pairs", type=int, default=24, help="saves of each kind")


def run(settings: argparse.Namespace) -> None:
    places = {"disk": None, "memory": MEMORY} if MEMORY.is_dir() else {"disk": None}
    rows = [
        measure(stage, async_save, place, folder, settings.pairs)
        for (place, folder), stage, async_save in product(
            places.items(), settings.stages, (False, True)
        )
    ]
    data = {**report.heading(2), "pairs": settings.pairs, "rows": rows}
    settings.page.write(data, text(data))


def measure(
    stage: int, async_save: bool, place: str, folder: Optional[Path], num_pairs: int
) -> Dict[str, Any]:
    """Of one combination, where `folder` is the one to write to, if it isn't the usual one."""
    # The first pair allocates what the others reuse.
    num_steps = num_pairs + 1
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        config = training.config(
            Path(directory),
            [("one two three four", str(i % 2)) for i in range(4 * num_steps)],
            batch_size=2,
            num_workers=2,
            trainer={
                "type": "deepspeed",
                "deepspeed_config": {"zero_optimization": {"stage": stage}},
                "callbacks": [{"type": "time_saves", "num_pairs": num_steps}],
                "checkpointer": {"async_save": async_save, "keep_most_recent_by_count": 1},
            },
            **training.transformer(width=512, num_layers=6),
        )
        out = Path(directory) / "out"
        training.train(config, out, "--include-package", __name__)
        taken = json.loads((out / "taken.json").read_text())
    theirs, own = taken["deepspeed"][1:], taken["checkpointer"][1:]
    ratios = [b / a for (a, _), (b, _) in zip(theirs, own)]
    cpu_ratios = [b / a for (_, a), (_, b) in zip(theirs, own)]
    return {
        "place": place,
        "zero_stage": stage,
        "async_save": async_save,
        "deepspeed_seconds": statistics.median(seconds for seconds, _ in theirs),
        "checkpointer_seconds": statistics.median(seconds for seconds, _ in own),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": report.quartiles(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratio_quartiles": report.quartiles(cpu_ratios),
        "taken": taken,
    }


def text(data: Dict[str, Any]) -> str:
    rows = [
        [
            row["place"],
            str(row["zero_stage"]),
            str(row["async_save"]).lower(),
            f"{row['deepspeed_seconds']:.3f}",
            f"{row['checkpointer_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            report.spread(row["ratio_quartiles"]),
            f"{row['cpu_ratio']:.2f}",
            report.spread(row["cpu_ratio_quartiles"]),
        ]
        for row in data["rows"]
    ]
    headings = (
        "where",
        "ZeRO stage",
        "async_save",
        "DeepSpeed (s)",
        "ours (s)",
        "ratio",
        "quartiles",
        "ratio of CPU time",
        "quartiles",
    )
    return report.document(
        "Saving a checkpoint",
        f"{report.describe(data)}\nHow long it keeps training waiting, in medians of "
        f"{data['pairs']} pairs, and the processor time of all that is done for it.",
        report.table(headings, rows),
    )
