"""
The bytes of model states on each rank, against the ZeRO paper and `allennlp deepspeed estimate`.

`python -m benchmarks.model_states` trains a transformer classifier of 13 million parameters with
the `deepspeed` trainer and Adam on CPU workers, and counts the bytes of the tensors that are alive.
Prints a table and writes it to `benchmarks/results/model_states.json` and `.md`. Some minutes.

The paper ([ZeRO](https://arxiv.org/abs/1910.02054), section 3 and figure 1) has 2 bytes of weights,
2 of gradients and 12 of optimizer states for each parameter in mixed precision, of which stage 1
divides the last by the number of workers, stage 2 the last two and stage 3 all. In fp32 that is 4,
4 and 8.
"""

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence
from unittest import mock

import torch
from allennlp.commands.train import train_model
from allennlp.common import Params
from torch.multiprocessing import start_processes

from allennlp_deepspeed.memory.estimate import Estimator
from allennlp_deepspeed.memory.model_states import ModelStates
from benchmarks import figures
from benchmarks.counted_states import CountedStates

PACKAGES = ("torch", "deepspeed", "allennlp")
TIME_LIMIT = 120  # seconds, for a training
_WIDTH = 512
_BYTES = {"bf16": (2, 2, 12), "fp32": (4, 4, 8)}  # of weights, gradients and optimizer states


def theory(precision: str, stage: int, workers: int) -> float:
    """Bytes for each parameter on each rank, by the paper."""
    weights, gradients, optimizer = _BYTES[precision]
    optimizer_shard = optimizer / workers if stage >= 1 else optimizer
    gradient_shard = gradients / workers if stage >= 2 else gradients
    return (weights / workers if stage == 3 else weights) + gradient_shard + optimizer_shard


def config(directory: Path, precision: str, stage: int, workers: int) -> Dict[str, Any]:
    """A training configuration, whose data it writes to `directory`."""
    # Two steps for each worker, of one text of two words: activations are nothing to the weights.
    lines = [{"text": "one two", "label": str(i % 2)} for i in range(2 * workers)]
    data = directory / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    deepspeed_config: Dict[str, Any] = {
        # DeepSpeed's default is a gigabyte, more than this model.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}
    }
    if precision == "bf16":
        deepspeed_config["bf16"] = {"enabled": True}
    trainer: Dict[str, Any] = {
        "type": "deepspeed",
        "deepspeed_config": deepspeed_config,
        "optimizer": {"type": "adam", "lr": 1e-5},
        "num_epochs": 1,
        "callbacks": ["count_model_states"],
        "checkpointer": None,
        "run_confidence_checks": False,
    }
    values: Dict[str, Any] = {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "train_data_path": str(data),
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": _WIDTH}}
            },
            "seq2seq_encoder": {
                "type": "pytorch_transformer",
                "input_dim": _WIDTH,
                "num_layers": 4,
                "feedforward_hidden_dim": 4 * _WIDTH,
                "num_attention_heads": 8,
            },
            "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": _WIDTH},
        },
        "data_loader": {"batch_size": 1},
        "trainer": trainer,
    }
    if workers > 1:
        values["distributed"] = {"cuda_devices": [-1] * workers}
    else:
        trainer["cuda_device"] = -1
    return values


def measure(precision: str, stage: int, workers: int) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        values = config(directory, precision, stage, workers)
        estimate = Estimator(Params(values)).estimate(gpu_memory=None, cpu_memory=0, nvme_memory=0)
        states = next(e.states for e in estimate.placements if e.placement.name == str(stage))
        assert states is not None
        ranks = train(values, directory)
    return row(precision, stage, workers, estimate.size.total, ranks, states)


def train(values: Dict[str, Any], directory: Path) -> List[CountedStates]:
    """Trains in processes that are forked from this one, since imports take longer."""
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_train, args=(values, directory))
    process.start()
    process.join(TIME_LIMIT)
    if process.is_alive():
        process.kill()
    process.join()
    gc.unfreeze()
    if process.exitcode != 0:
        raise RuntimeError((directory / "output.txt").read_text(errors="replace")[-5000:])
    return CountedStates.read(directory / "out")


def _train(values: Dict[str, Any], directory: Path) -> None:
    with open(directory / "output.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    def fork(function: Any, args: Any = (), nprocs: int = 1) -> None:
        start_processes(function, args, nprocs, start_method="fork")

    with mock.patch.object(torch.multiprocessing, "spawn", fork):
        train_model(Params(values), directory / "out")


def row(
    precision: str,
    stage: int,
    workers: int,
    num_parameters: int,
    ranks: Sequence[CountedStates],
    estimated: ModelStates,
) -> Dict[str, Any]:
    """What is in bytes for each parameter, of the rank that has most."""
    held = max(rank.weights + rank.gradients + rank.optimizer for rank in ranks)
    peak = max(
        rank.weights + max(rank.gradients, rank.gradients_in_step) + rank.optimizer
        for rank in ranks
    )
    gpu = estimated.gpu
    expected = theory(precision, stage, workers)
    return {
        "precision": precision,
        "workers": workers,
        "stage": stage,
        "num_parameters": num_parameters,
        "ranks": [rank._asdict() for rank in ranks],
        "theory": expected,
        "counted": held / num_parameters,
        "counted_to_theory": held / num_parameters / expected,
        "counted_with_step": peak / num_parameters,
        "estimated": (gpu.weights + gpu.gradients + gpu.optimizer) / num_parameters,
        "estimated_to_counted": (gpu.weights + gpu.gradients + gpu.optimizer) / peak,
    }


def report(results: Dict[str, Any]) -> str:
    headings = ["precision", "workers", "stage", "paper", "counted", "to the paper"]
    headings += ["counted with the step", "estimate", "to the counted"]
    rows = [
        [
            row["precision"],
            str(row["workers"]),
            str(row["stage"]),
            f"{row['theory']:.2f}",
            f"{row['counted']:.2f}",
            f"{row['counted_to_theory']:.2f}",
            f"{row['counted_with_step']:.2f}",
            f"{row['estimated']:.2f}",
            f"{row['estimated_to_counted']:.2f}",
        ]
        for row in results["rows"]
    ]
    lines = [
        "# Model states",
        "",
        f"{figures.describe(results)}",
        f"A transformer of {results['num_parameters']:,} parameters with Adam; bytes for each "
        "parameter on each rank.",
        "How the figures are made: [NOTES.md](../NOTES.md#model-states).",
        "",
        *figures.markdown_table(headings, rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", nargs="+", default=list(_BYTES), choices=list(_BYTES))
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path, default=figures.RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for precision in args.precisions:
        for workers in args.workers:
            for stage in args.stages:
                rows.append(measure(precision, stage, workers))
                print(json.dumps({k: v for k, v in rows[-1].items() if k != "ranks"}), flush=True)
    results = {
        **figures.heading(max(args.workers), PACKAGES),
        "num_parameters": rows[0]["num_parameters"],
        "rows": rows,
    }
    (args.output / "model_states.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    (args.output / "model_states.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
