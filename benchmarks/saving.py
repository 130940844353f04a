"""
How long saving a checkpoint keeps training waiting, against DeepSpeed's own save of the same state.

`python -m benchmarks.saving` trains a transformer classifier of some 19 million parameters on two
workers over gloo. After each step one of them is timed, in turn: DeepSpeed's
`engine.save_checkpoint` as it comes, and `DeepSpeedCheckpointer.save_checkpoint`, which also saves
the training state, and flushes, hashes and commits in the background. What is still being written
from the time before is waited for outside of the timing. Prints a table and writes it to
`benchmarks/results/saving.json`.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import deepspeed
import torch
import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from overrides import overrides
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "saving.json"
REPOSITORY = Path(__file__).resolve().parent.parent
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


def config(data: Path, stage: int, async_save: bool) -> Dict[str, Any]:
    return {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "train_data_path": str(data),
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 512}}
            },
            "seq2seq_encoder": {
                "type": "pytorch_transformer",
                "input_dim": 512,
                "num_layers": 6,
                "feedforward_hidden_dim": 2048,
                "num_attention_heads": 8,
            },
            "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 512},
        },
        "data_loader": {"batch_size": 2},
        "distributed": {"cuda_devices": [-1, -1]},
        "trainer": {
            "type": "deepspeed",
            "deepspeed_config": {"zero_optimization": {"stage": stage}},
            "optimizer": {"type": "adam", "lr": 1e-5},
            "num_epochs": 1,
            "callbacks": ["time_saves"],
            "checkpointer": {"async_save": async_save, "keep_most_recent_by_count": 1},
        },
    }


def measure(stage: int, async_save: bool) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data.jsonl"
        lines = [{"text": "one two three four", "label": str(i % 2)} for i in range(4 * NUM_PAIRS)]
        data.write_text("\n".join(map(json.dumps, lines)))
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config(data, stage, async_save)))
        out = Path(directory) / "out"
        subprocess.run(
            ["allennlp", "train", path, "-s", out, "--include-package", "benchmarks.saving"],
            check=True,
            cwd=REPOSITORY,
            capture_output=True,
        )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    stages = parser.parse_args().stages
    rows = [measure(stage, async_save) for stage in stages for async_save in (False, True)]
    RESULTS.write_text(
        json.dumps(
            {
                "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
                "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
                "python": sys.version.split()[0],
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )
    table = Table("ZeRO stage", "async_save", "DeepSpeed (s)", "ours (s)", "ratio", "quartiles")
    for row in rows:
        low, high = row["ratio_quartiles"]
        table.add_row(
            str(row["zero_stage"]),
            str(row["async_save"]).lower(),
            f"{row['deepspeed_seconds']:.3f}",
            f"{row['checkpointer_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
