"""
What the link between two hosts carries in an optimizer step, beside the least that two nodes need.

Trains a transformer on two hosts of two CPU workers each, which are network namespaces of this
machine, joined by virtual cables. Counted is what the interface of one host has received and sent
from the end of one step to that of the next, in multiples of the parameters' bytes. Each row is
trained with gloo's collectives over all workers, as "gradient_descent" is, and by way of the
nodes, as the trainer does by itself. Losses and weights have to be those of "gradient_descent".
Needs root, iproute2 and util-linux.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch

from benchmarks.harness import link_traffic, losses, report, training
from tests.support.command import wait_for_all
from tests.support.hosts import Hosts, missing_right, write_config

NUM_HOSTS, WORKERS = 2, 2
WIDTH, NUM_LAYERS = 192, 2
STEPS = 6
# In the first, stage 3 records the order of the parameters, in the second it begins to follow it.
WARM_UP = 2
TOLERANCE = 1e-5
TIME_LIMIT = 120  # seconds


class Variant(NamedTuple):
    """
    # Parameters

    name : `str`
    stage : `int`
        Of ZeRO. `None` for "gradient_descent".
    accumulation : `int`
        Micro-batches in a step.
    least : `float`
        What two nodes need for it, in multiples of the parameters' bytes.
    trainer : `Dict[str, Any]`
        Further keys.
    """

    name: str
    stage: Optional[int]
    accumulation: int
    least: float
    trainer: Dict[str, Any] = {}


# Each node needs the sum of the other's gradients, and has the other know its own: once the
# parameters' bytes in each direction, or half of each for sharded sums and as much again for
# the weights that come of them. Each further gathering over both nodes is half in each direction.
_EXCHANGE, _GATHERING = 2, 1


def _stage_3(k: int) -> int:
    """Every pass gathers, and only the first is what any training needs."""
    return _EXCHANGE + (2 * k - 1) * _GATHERING


_IN_NODE = {"shard_within": "node"}
_IN_EACH_PASS = {"shard_within": None}
VARIANTS = [
    Variant("`gradient_descent`", None, 1, _EXCHANGE),
    Variant("`gradient_descent`, accumulation 8", None, 8, _EXCHANGE),
    Variant("stage 0", 0, 1, _EXCHANGE),
    Variant("stage 1", 1, 1, _EXCHANGE),
    Variant("stage 2", 2, 1, _EXCHANGE),
    Variant('stage 3, `"shard_within": "node"`', 3, 1, _EXCHANGE, _IN_NODE),
    Variant("stage 0, accumulation 8", 0, 8, _EXCHANGE),
    Variant("stage 2, accumulation 8", 2, 8, _EXCHANGE),
    Variant('stage 3, `"shard_within": "node"`, accumulation 8', 3, 8, _EXCHANGE, _IN_NODE),
    Variant("stage 3", 3, 1, _stage_3(1)),
    Variant('stage 3, `"shard_within": null`, accumulation 8', 3, 8, _stage_3(8), _IN_EACH_PASS),
]


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
    names = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=range(len(names)),
        help=f"of {list(enumerate(names))}",
    )


def run(settings: argparse.Namespace) -> None:
    reason = missing_right()
    if reason is not None:
        report.show(f"Nothing is measured: {reason}")
        return
    rows = []
    references: Dict[int, Outcome] = {}
    for variant in [VARIANTS[i] for i in settings.rows]:
        k = variant.accumulation
        if k not in references:
            references[k] = train(Variant("reference", None, k, _EXCHANGE), None)
        flat, hierarchical = references[k], None
        if variant.stage is not None:
            flat = train(variant, None)
            compare(variant.name, flat, references[k])
            hierarchical = train(variant, "auto")
            compare(variant.name, hierarchical, references[k])
        rows.append(
            {
                "name": variant.name,
                "least": variant.least,
                "over_all_workers": flat.per_step,
                "by_way_of_nodes": None if hierarchical is None else hierarchical.per_step,
                "parameter_bytes": flat.parameter_bytes,
            }
        )
    data = {**report.heading(NUM_HOSTS * WORKERS), "rows": rows}
    report.write(settings.output, "wire", data, text(data))
    report.show(text(data))


def train(variant: Variant, reduce_within: Optional[str]) -> Outcome:
    """On two hosts, which are made and removed."""
    with tempfile.TemporaryDirectory() as directory:
        hosts = Hosts(NUM_HOSTS, Path(directory))
        try:
            return train_on(hosts, Path(directory), variant, reduce_within)
        finally:
            hosts.remove()


def train_on(
    hosts: Hosts, directory: Path, variant: Variant, reduce_within: Optional[str]
) -> Outcome:
    """
    # Parameters

    hosts : `Hosts`
    directory : `Path`
        For what is written.
    variant : `Variant`
    reduce_within : `str`
        The trainer's key.
    """
    trainer: Dict[str, Any] = {
        # With Adam, gradients that are too large by a factor would give the same losses.
        "optimizer": {"type": "sgd", "lr": 0.001},
        "callbacks": ["link_traffic"],
        "num_gradient_accumulation_steps": variant.accumulation,
    }
    if variant.stage is not None:
        zero: Dict[str, Any] = {"stage": variant.stage}
        if variant.stage == 3:
            # As with a model of more parameters than DeepSpeed keeps whole between the passes.
            zero.update(
                stage3_max_live_parameters=0,
                stage3_max_reuse_distance=0,
                stage3_param_persistence_threshold=0,
            )
        trainer.update(
            type="deepspeed",
            deepspeed_config={"zero_optimization": zero},
            gradient_synchronization="boundary",
            reduce_within=reduce_within,
            **variant.trainer,
        )
    config = training.config(
        directory,
        [
            (f"one two three {i % 7} {i % 5}", str(i % 3))
            for i in range(NUM_HOSTS * WORKERS * STEPS * variant.accumulation)
        ],
        batch_size=1,
        num_workers=NUM_HOSTS * WORKERS,
        trainer=trainer,
        **training.transformer(WIDTH, NUM_LAYERS, dropout_prob=0.0),
    )
    config["distributed"] = hosts.distributed(WORKERS)
    outs = [directory / f"{reduce_within}-{host.name}" for host in hosts.hosts]
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
        nodes = row["by_way_of_nodes"]
        ours = ["", ""] if nodes is None else [f"{nodes:.2f}", f"{nodes / row['least']:.2f}"]
        rows.append([row["name"], f"{row['least']:.1f}", f"{row['over_all_workers']:.2f}", *ours])
    headings = (
        "",
        "the least",
        "over all workers at once",
        "by way of the nodes",
        "of the least",
    )
    megabytes = report.megabytes(data["rows"][0]["parameter_bytes"])
    return report.document(
        "Bytes on the link between two hosts",
        f"{report.describe(data)}\nTwo hosts of {WORKERS} workers each over gloo; bytes in an "
        "optimizer step, in both directions together, in multiples of the parameters' "
        f"({megabytes} MB in fp32).",
        report.table(headings, rows),
    )
