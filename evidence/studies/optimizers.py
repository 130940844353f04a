"""
Optimizers of PyTorch and of packages train to the weights of AllenNLP's own trainer at every stage,
or are refused, and resume exactly. Packages that aren't installed are left out.
"""

import argparse
import importlib
import itertools
import os
from functools import partial
from importlib.metadata import version
from typing import Any, Callable, Dict, Iterator, List

import torch

from evidence import report
from evidence.optimizers.trial import STAGES, Result, results

TIME = "15 minutes"

ONLY = "names of optimizers"

WORLD_SIZES = (1, 2)

# The learning rate of a constructor, and others of its arguments, by package and name.
OPTIMIZERS: Dict[str, Dict[str, Dict[str, Any]]] = {
    "torch.optim": dict.fromkeys(
        (
            *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"),
            *("RMSprop", "Rprop", "SGD", "Adafactor"),
        ),
        {},
    ),
    "schedulefree": {
        "AdamWScheduleFree": {"warmup_steps": 3},
        "RAdamScheduleFree": {},
        "SGDScheduleFree": {"lr": 0.3},
    },
    "prodigyopt": {"Prodigy": {"lr": 1.0}},
    "dadaptation": {"DAdaptAdam": {"lr": 1.0}, "DAdaptSGD": {"lr": 1.0}},
    "pytorch_optimizer": dict.fromkeys(
        (
            *("AdaBelief", "Adan", "ADOPT", "AdEMAMix", "DiffGrad", "LaProp", "Lion", "Tiger"),
            *("Yogi", "AdaBound", "QHAdam", "ScheduleFreeAdamW", "MADGRAD", "AdamP", "CAME"),
            *("Lamb", "LARS", "NovoGrad", "SOAP", "StableAdamW", "AdaNorm", "Ranger", "Prodigy"),
        ),
        {},
    ),
    "bitsandbytes.optim": {"AdamW": {}, "AdamW8bit": {}, "Lion": {}, "Lion8bit": {}},
    "torchao.optim": {"AdamW8bit": {}},
}
_PACKAGES = {"torch.optim": "torch"}


WHAT = """For each ZeRO stage, with one worker and two: the weights after 8 steps of a small model
whose optimizer has three parameter groups, beside AllenNLP's `gradient_descent` with as many
workers. Exact means that no weight differs by more than 1e-5; refused, that a `ConfigurationError`
names the optimizer before training. Each training was also ended after an epoch and recovered: the
weights were equal to those of the uninterrupted one to the last bit, unless a cell says
differently."""


def rows(only: List[str]) -> Iterator[List[str]]:
    for module, optimizers in OPTIMIZERS.items():
        try:
            imported = importlib.import_module(module)
        except ImportError:
            continue
        package = _PACKAGES.get(module, module.partition(".")[0])
        for name, arguments in optimizers.items():
            if only and name not in only:
                continue
            construct = partial(getattr(imported, name), **{"lr": 0.01, **arguments})
            cells = [_cells(construct, world_size) for world_size in WORLD_SIZES]
            yield [f"{package} {version(package)}", name, *itertools.chain(*cells)]


def _cells(construct: Callable[[Any], torch.optim.Optimizer], world_size: int) -> List[str]:
    try:
        of_stages = results(construct, world_size)
    except AssertionError:  # a worker has failed
        return ["error"] * len(STAGES)
    return [_cell(of_stages[stage]) for stage in STAGES]


def _cell(result: Result) -> str:
    recovery = "" if result.recovery in ("", "equal") else f", recovery {result.recovery}"
    return result.weights.partition(":")[0].replace("equal", "exact") + recovery


def run(arguments: argparse.Namespace) -> None:
    # Workers write progress bars and warnings.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    trained = []
    for row in rows(arguments.only):
        trained.append(row)
        print(" | ".join(row), flush=True)
    columns = [f"{number} × stage {stage}" for number in WORLD_SIZES for stage in STAGES]
    heading = report.heading(max(WORLD_SIZES))
    text = report.document(
        "Optimizers",
        " ".join(WHAT.split()),
        report.table(["package", "optimizer", *columns], trained),
        f"{report.describe(heading)} `python -m evidence optimizers` runs it again.",
    )
    arguments.page.write({**heading, "rows": trained}, text)
