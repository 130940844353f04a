"""
How long saving a checkpoint keeps training waiting, against DeepSpeed's own save of the same state.

Trains a transformer classifier of some 19 million parameters on two workers over gloo. After each
step one of them is timed, in turn: DeepSpeed's `engine.save_checkpoint` as it comes, and
`DeepSpeedCheckpointer.save_checkpoint`, which also saves the training state, and flushes, hashes
and commits in the background. What is still being written from the time before is waited for
outside of the timing. Writes a table to `benchmarks/results`.
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
from typing import Any, Callable, Dict, List

import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from overrides import overrides

from benchmarks.harness import report, training

NUM_PAIRS = 9


@TrainerCallback.register("time_saves")
class TimeSaves(TrainerCallback):
    """After each step, times one save of each kind, in alternating order."""

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._seconds: Dict[str, List[float]] = {"deepspeed": [], "checkpointer": []}

    @overrides
    def on_batch(self, trainer, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        if not is_training or len(self._seconds["deepspeed"]) == NUM_PAIRS:
            return
        kinds: List[Callable] = [self._save_with_deepspeed, self._save_with_checkpointer]
        for save in kinds if len(self._seconds["deepspeed"]) % 2 else reversed(kinds):
            save(trainer)

    def _save_with_deepspeed(self, trainer) -> None:
        directory = os.path.join(self.serialization_dir, "deepspeed_save")
        own_engine = trainer.engine.checkpoint_engine
        trainer.engine.checkpoint_engine = TorchCheckpointEngine(trainer.engine._config)
        dist.barrier()
        start = time.perf_counter()
        trainer.engine.save_checkpoint(directory, tag="engine")
        dist.barrier()
        self._seconds["deepspeed"].append(time.perf_counter() - start)
        trainer.engine.checkpoint_engine = own_engine
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
        dist.barrier()

    def _save_with_checkpointer(self, trainer) -> None:
        dist.barrier()
        start = time.perf_counter()
        trainer._checkpointer.save_checkpoint(trainer)
        dist.barrier()
        self._seconds["checkpointer"].append(time.perf_counter() - start)
        trainer._checkpointer.finish()

    @overrides
    def on_end(self, trainer, *args: Any, is_primary: bool = True, **kwargs: Any) -> None:
        if is_primary:
            path = os.path.join(self.serialization_dir, "seconds.json")
            Path(path).write_text(json.dumps(self._seconds))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])


def run(settings: argparse.Namespace) -> None:
    rows = [measure(*variant) for variant in product(settings.stages, (False, True))]
    data = {**report.heading(2), "rows": rows}
    report.write(settings.output, "saving", data, text(data))
    report.show(text(data))


def measure(stage: int, async_save: bool) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        config = training.config(
            Path(directory),
            [("one two three four", str(i % 2)) for i in range(4 * NUM_PAIRS)],
            batch_size=2,
            num_workers=2,
            trainer={
                "type": "deepspeed",
                "deepspeed_config": {"zero_optimization": {"stage": stage}},
                "callbacks": ["time_saves"],
                "checkpointer": {"async_save": async_save, "keep_most_recent_by_count": 1},
            },
            **training.transformer(width=512, num_layers=6),
        )
        out = Path(directory) / "out"
        training.train(config, out, "--include-package", __name__)
        seconds = json.loads((out / "seconds.json").read_text())
    # The first pair allocates what the others reuse.
    ratios = [b / a for a, b in zip(seconds["deepspeed"], seconds["checkpointer"])][1:]
    return {
        "zero_stage": stage,
        "async_save": async_save,
        "deepspeed_seconds": statistics.median(seconds["deepspeed"][1:]),
        "checkpointer_seconds": statistics.median(seconds["checkpointer"][1:]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def text(data: Dict[str, Any]) -> str:
    rows = [
        [
            str(row["zero_stage"]),
            str(row["async_save"]).lower(),
            f"{row['deepspeed_seconds']:.3f}",
            f"{row['checkpointer_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            report.spread(row["ratio_quartiles"]),
        ]
        for row in data["rows"]
    ]
    headings = ("ZeRO stage", "async_save", "DeepSpeed (s)", "ours (s)", "ratio", "quartiles")
    return report.document(
        "Saving a checkpoint",
        f"{report.describe(data)}\nHow long it keeps training waiting, in medians of pairs.",
        report.table(headings, rows),
    )
