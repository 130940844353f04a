"""
The bytes of model states on each rank, against the ZeRO paper and `allennlp deepspeed estimate`.

Trains a transformer classifier of 13 million parameters with the `deepspeed` trainer and Adam on
CPU workers, and counts the bytes of the tensors that are alive; then the models of the study
`real`, if they are installed, at two workers in fp32.

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
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, Tuple
from unittest import mock

# Imported when an engine is brought up. It brings PyTorch's compiler with it, and takes longer than
# anything else that a worker does.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.util import import_module_and_submodules

from allennlp_deepspeed.commands.memory_estimate import Estimator
from allennlp_deepspeed.launch import agent
from evidence import report
from evidence.harness import training
from evidence.harness.counted_states import CountedStates
from evidence.real.recorder import Cell
from evidence.studies import real

TIME = "40 minutes"

TIME_LIMIT = 1800  # seconds, for a training
_BYTES = {"bf16": (2, 2, 12), "fp32": (4, 4, 8)}  # of weights, gradients and optimizer states


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precisions", nargs="+", default=list(_BYTES), choices=list(_BYTES))
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--real", nargs="*", choices=real.SUBJECTS, default=list(real.SUBJECTS))


def run(settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    data: Dict[str, Any] = report.heading(max(settings.workers), "transformers", "peft")
    data.update(rows=[], real=[])
    for variant in product(settings.precisions, settings.workers, settings.stages):
        data["rows"].append(measure(*variant))
        data["num_parameters"] = data["rows"][0]["num_parameters"]
        _write(settings.page, data, {k: v for k, v in data["rows"][-1].items() if k != "ranks"})
    for name in settings.real:
        for stage, accumulation in product((0, 2, 3), real.SUBJECTS[name].accumulation):
            data["real"].append(measure_real(name, stage, accumulation))
            _write(settings.page, data, data["real"][-1])


def _write(page: report.Page, data: Dict[str, Any], row: Dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    page.write(data, text(data))


def theory(precision: str, stage: int, workers: int) -> float:
    """Bytes for each parameter on each rank, by the paper."""
    weights, gradients, optimizer = _BYTES[precision]
    optimizer_shard = optimizer / workers if stage >= 1 else optimizer
    gradient_shard = gradients / workers if stage >= 2 else gradients
    return (weights / workers if stage == 3 else weights) + gradient_shard + optimizer_shard


def config(directory: Path, precision: str, workers: int, stage: int) -> Dict[str, Any]:
    deepspeed_config: Dict[str, Any] = {
        # DeepSpeed's default is a gigabyte, more than this model.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}
    }
    if precision == "bf16":
        deepspeed_config["bf16"] = {"enabled": True}
    return training.config(
        directory,
        # Four steps for each worker, of one text of two words: activations are nothing to the
        # weights.
        [("one two", str(i % 2)) for i in range(4 * workers)],
        batch_size=1,
        num_workers=workers,
        trainer={
            "type": "deepspeed",
            "deepspeed_config": deepspeed_config,
            "callbacks": ["count_model_states"],
            "checkpointer": None,
            "run_confidence_checks": False,
        },
        **training.transformer(width=512, num_layers=4),
    )


def measure(precision: str, workers: int, stage: int) -> Dict[str, Any]:
    """What is in bytes for each parameter, of the rank that has most."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        values = config(directory, precision, workers, stage)
        num_parameters, estimated = estimate(values, stage)
        ranks = train(values, directory)
    held = max(rank.weights + rank.gradients + rank.optimizer for rank in ranks)
    peak = _peak(ranks)
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
        "estimated": estimated / num_parameters,
        "estimated_to_counted": estimated / peak,
    }


def measure_real(name: str, stage: int, accumulation: int) -> Dict[str, Any]:
    """What is in bytes, of the rank that has most, for a row of the study `real`."""
    import_module_and_submodules("allennlp_deepspeed")
    model = import_module(f"evidence.real.{name}")
    with tempfile.TemporaryDirectory() as directory:
        # Texts of a few tokens: activations are little to the weights.
        cell = Cell(
            data=directory,
            output="",
            address="",
            world_size=2,
            stage=stage,
            accumulation=accumulation,
            warmup=2,
            num_segments=0,
            steps=0,
            batch_size=1,
            max_length=8,
            chunk_size=1 if name == "bi_encoder" else 0,
        )
        model.prepare(cell, tiny=False)
        # As from a file: sections that are one object here would be read once.
        values = json.loads(json.dumps(real.training_config(name, real.OURS, cell)))
        values["trainer"]["deepspeed_config"]["zero_optimization"]["reduce_bucket_size"] = 100_000
        values["trainer"].update(
            callbacks=["count_model_states"], checkpointer=None, run_confidence_checks=False
        )
        if (accumulation > 1 or cell.chunk_size) and stage >= 2:
            # As "auto" is here, which `estimate` doesn't know.
            values["trainer"]["gradient_synchronization"] = "step"
        num_parameters, estimated = estimate(values, stage)
        peak = _peak(train(values, Path(directory)))
    return {
        "model": name,
        "stage": stage,
        "accumulation": accumulation,
        "num_parameters": num_parameters,
        "counted_with_step": peak,
        "estimated": estimated,
        "estimated_to_counted": estimated / peak,
    }


def estimate(values: Dict[str, Any], stage: int) -> Tuple[int, int]:
    """The model's parameters, and the bytes of model states that `estimate` says of a rank."""
    estimates = Estimator(Params(values)).estimate(gpu_memory=None, cpu_memory=0, nvme_memory=0)
    states = next(e.states for e in estimates.placements if e.placement.name == str(stage))
    assert states is not None
    return (
        estimates.size.total,
        states.gpu.weights + states.gpu.gradients + states.gpu.optimizer,
    )


def _peak(ranks: List[CountedStates]) -> int:
    """The most at a time, of the rank that has most."""
    return max(
        rank.weights + max(rank.gradients, rank.gradients_in_step) + rank.optimizer
        for rank in ranks
    )


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

    # Forks of this process have the callback registered.
    with mock.patch.object(agent, "START_METHOD", "fork"):
        train_command.train_model(Params(values), directory / "out")


def text(data: Dict[str, Any]) -> str:
    columns = {
        "paper": "theory",
        "counted": "counted",
        "to the paper": "counted_to_theory",
        "counted with the step": "counted_with_step",
        "estimate": "estimated",
        "to the counted": "estimated_to_counted",
    }
    rows = [
        [row["precision"], str(row["workers"]), str(row["stage"])]
        + [f"{row[key]:.2f}" for key in columns.values()]
        for row in data["rows"]
    ]
    real_rows = [
        [row["model"], str(row["stage"]), str(row["accumulation"])]
        + [f"{row[key] / 1e6:.1f}" for key in ("counted_with_step", "estimated")]
        + [f"{row['estimated_to_counted']:.2f}"]
        for row in data["real"]
    ]
    headings = (
        "model",
        "stage",
        "accumulation",
        "counted with the step, MB",
        "estimate, MB",
        "to the counted",
    )
    return report.document(
        "Model states",
        f"{report.describe(data)}\n"
        f"A transformer of {data['num_parameters']:,} parameters with Adam; bytes for each "
        "parameter on each rank.\n"
        "How the figures are made: [NOTES.md](../NOTES.md#model-states).",
        report.table(("precision", "workers", "stage", *columns), rows),
        "## Models of the study `real`",
        "Two workers, fp32; MB of a rank.",
        report.table(headings, real_rows),
    )
