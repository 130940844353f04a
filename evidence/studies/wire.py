"""
Bytes that the link between two hosts carries in an optimizer step, with 1 and with 8 micro-batches.

Trains a transformer on two hosts of two CPU workers each, which are network namespaces of this
machine, joined by virtual cables. The study counts what the interface of one host has received and
sent from the end of one step to the end of the next, in multiples of the parameters' bytes. This
trainer reduces gradients once a step at every stage, so that the bytes of a step don't depend on
the number of its micro-batches; those of "gradient_descent" do. Losses and weights must be those of
"gradient_descent". Needs root, iproute2 and util-linux.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch

from evidence import report
from evidence.harness import link_traffic, losses, training
from tests.support.command import wait_for_all
from tests.support.hosts import Hosts, missing_right, write_config

TIME = "5 minutes"

NUM_HOSTS, WORKERS = 2, 2
WIDTH, NUM_LAYERS = 192, 2
STEPS = 6
# In the first, stage 3 records the order of the parameters, in the second it begins to follow it.
WARM_UP = 2
TOLERANCE = 1e-5
TIME_LIMIT = 120  # seconds


ACCUMULATIONS = (1, 8)
STAGES = (0, 1, 2, 3)


class Outcome(NamedTuple):
    """
    Of one training, in multiples of the parameters' bytes.

    # Parameters

    per_step : `float`
        What the link has carried in both directions together, the median of the steps.
    losses : `List[float]`
        Of rank 0's micro-batches.
    weights : `Dict[str, torch.Tensor]`
        After the last step.
    parameter_bytes : `int`
    """

    per_step: float
    losses: List[float]
    weights: Dict[str, torch.Tensor]
    parameter_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=STAGES)


def run(settings: argparse.Namespace) -> None:
    reason = missing_right()
    if reason is not None:
        sys.exit(f"There can be no hosts here: {reason}")
    references = {k: train(None, k) for k in ACCUMULATIONS}
    rows = []
    for stage in (None, *settings.stages):
        outcomes = references
        if stage is not None:
            outcomes = {k: train(stage, k) for k in ACCUMULATIONS}
            for k, outcome in outcomes.items():
                compare(f"stage {stage}, accumulation {k}", outcome, references[k])
        rows.append(
            {
                "stage": stage,
                "per_step": {k: outcome.per_step for k, outcome in outcomes.items()},
                "parameter_bytes": outcomes[1].parameter_bytes,
            }
        )
    data = {**report.heading(NUM_HOSTS * WORKERS), "rows": rows}
    settings.page.write(data, text(data))


def train(stage: Optional[int], accumulation: int) -> Outcome:
    """On two hosts, which are made and removed."""
    with tempfile.TemporaryDirectory() as directory:
        hosts = Hosts(NUM_HOSTS, Path(directory))
        try:
            return train_on(hosts, Path(directory), stage, accumulation)
        finally:
            hosts.remove()


def train_on(hosts: Hosts, directory: Path, stage: Optional[int], accumulation: int) -> Outcome:
    """
    # Parameters

    hosts : `Hosts`
    directory : `Path`
        For what is written.
    stage : `Optional[int]`
        Of ZeRO. `None` for "gradient_descent".
    accumulation : `int`
        Micro-batches in a step.
    """
    trainer: Dict[str, Any] = {
        # With Adam, gradients that are too large by a factor would give the same losses.
        "optimizer": {"type": "sgd", "lr": 0.001},
        "callbacks": ["link_traffic"],
        "num_gradient_accumulation_steps": accumulation,
    }
    if stage is not None:
        trainer.update(
            type="deepspeed",
            deepspeed_config={"zero_optimization": {"stage": stage}},
            gradient_synchronization="step",
        )
    if stage == 3:
        # Parameters are gathered once a step, too.
        trainer["reshard_after_micro_batch"] = False
    config = training.config(
        directory,
        [
            (f"one two three {i % 7} {i % 5}", str(i % 3))
            for i in range(NUM_HOSTS * WORKERS * STEPS * accumulation)
        ],
        batch_size=1,
        num_workers=NUM_HOSTS * WORKERS,
        trainer=trainer,
        **training.transformer(WIDTH, NUM_LAYERS, dropout_prob=0.0),
    )
    config["distributed"] = hosts.distributed(WORKERS)
    outs = [directory / f"{stage}-{accumulation}-{host.name}" for host in hosts.hosts]
    path = write_config(config, outs[0])
    packages = ("allennlp_deepspeed", link_traffic.__name__)
    commands = [
        host.train(path, out, include_packages=packages) for host, out in zip(hosts.hosts, outs)
    ]
    for finished in wait_for_all(commands, TIME_LIMIT):
        finished.check()
    counted = json.loads((outs[0] / link_traffic.FILE).read_text())
    steps = counted["bytes_of_steps"]
    assert len(steps) == STEPS
    return Outcome(
        statistics.median(steps[WARM_UP:]) / counted["parameter_bytes"],
        counted["losses"],
        torch.load(outs[0] / "best.th"),
        counted["parameter_bytes"],
    )


def compare(name: str, actual: Outcome, expected: Outcome) -> None:
    """
    # Raises

    `RuntimeError`
        If the losses or the weights differ.
    """
    losses.largest_difference(name, [actual.losses], [expected.losses], "gradient_descent")
    for key, weight in expected.weights.items():
        difference = (actual.weights[key] - weight).abs().max().item()
        if not difference <= TOLERANCE:
            raise RuntimeError(f"'{key}' of '{name}' differs by {difference:.1e}.")


def text(data: Dict[str, Any]) -> str:
    rows = []
    for row in data["rows"]:
        once, several = (row["per_step"][k] for k in ACCUMULATIONS)
        name = "`gradient_descent`" if row["stage"] is None else f"stage {row['stage']}"
        rows.append([name, f"{once:.2f}", f"{several:.2f}", f"{several / once:.2f}"])
    headings = ("", *(f"accumulation {k}" for k in ACCUMULATIONS), "ratio")
    megabytes = report.megabytes(data["rows"][0]["parameter_bytes"])
    return report.document(
        "Bytes on the link between two hosts",
        f"{report.describe(data)}\nTwo hosts of {WORKERS} workers each over gloo; bytes in an "
        "optimizer step, in both directions together, in multiples of the parameters' "
        f"({megabytes} MB in fp32).",
        report.table(headings, rows),
    )
