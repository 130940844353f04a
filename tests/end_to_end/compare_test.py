"""`allennlp deepspeed check --compare`: what it finds, and what it doesn't take for a fault."""

import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import pytest

from tests.fixtures.unlike_gradient_descent import PARAMETER
from tests.support.command import Run, allennlp
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    deepspeed,
    load_config,
    write_config,
)

PACKAGES = ("allennlp_deepspeed", "tests.fixtures")
NUM_STEPS = 8

SAME = f"Same to rounding in {NUM_STEPS} steps."

# One gradient of the classifier, from step 4 on.
SCALED: Dict[str, Any] = {"type": "scale_gradient", "first_step": 4}


def compare(config: Config, directory: Path, *flags: Any) -> Run:
    path = write_config(config, directory)
    run = allennlp(
        *("deepspeed", "check", path, "--compare", "--steps", NUM_STEPS, *flags),
        include_packages=PACKAGES,
        time_limit=120,
    )
    assert not run.processes and not run.timed_out, run.output
    assert sorted(directory.iterdir()) == [path]
    return run


class Case(NamedTuple):
    """
    # Parameters

    name : `str`
        Of a config file of the fixtures.
    stage : `int`
    changes : `Dict[str, Any]`
        To the config.
    first : `str`, optional (default = `None`)
        A regular expression: the first step that differs, and where. `None` if all are the same.
    lines : `List[str]`, optional (default = `[]`)
        Of the output.
    sections : `Dict[str, Any]`, optional (default = `{}`)
        Of DeepSpeed's configuration.
    """

    name: str
    stage: int
    changes: Config
    first: Optional[str] = None
    lines: List[str] = []
    sections: Dict[str, Any] = {}


CASES = {
    "the same, two workers": Case(
        "classifier",
        2,
        {**TWO_WORKERS, "trainer.num_gradient_accumulation_steps": 2, "trainer.grad_norm": 0.2},
        lines=['trained with "gradient_descent" in 2 workers (DDP)'],
    ),
    "dropout": Case(
        "tagger",
        3,
        {**ONE_PROCESS, "model.encoder.num_layers": 2, "model.encoder.dropout": 0.3},
        lines=[
            "dropout is turned off in 1 modules",
            'left out for "gradient_descent": trainer.deepspeed_config, type',
        ],
    ),
    "a gradient that is scaled": Case(
        "classifier",
        2,
        {
            **ONE_PROCESS,
            "trainer.optimizer": {"type": "sgd", "lr": 0.1},
            "trainer.callbacks": [SCALED],
        },
        first=f"step 4 on, first in {PARAMETER}",
    ),
    "a weight that is scaled": Case(
        "classifier",
        0,
        {**ONE_PROCESS, "trainer.callbacks": [{"type": "scale_weight", "step": 2}]},
        first=f"step 2 on, first in {PARAMETER}",
    ),
    # Adam divides by the size of a gradient, so that its scale is seen in the norm alone.
    "a gradient that is scaled, with Adam and two workers": Case(
        "transformer",
        1,
        {
            **TWO_WORKERS,
            "trainer.optimizer": {"type": "adam", "lr": 1e-6},
            "trainer.callbacks": [SCALED],
        },
        first="step 4 on, first in the gradient norm",
    ),
    "random layers in bf16, without DDP": Case(
        "transformer",
        3,
        {
            **TWO_WORKERS,
            "trainer.callbacks": ["refuse_ddp", "tensorboard"],
            "model.dropout": 0.1,
            "data_loader.batch_size": 3,
        },
        lines=[
            'The training with "gradient_descent" in 2 workers (DDP) failed: ',
            'trained with "gradient_descent" in one process from weights perturbed',
            "left out: bf16, whose rounding hides faults",
            "the callback tensorboard",
            "dropout is turned off in 1 modules",
        ],
        sections={"bf16": {"enabled": True}},
    ),
}
SLOW = (
    "a gradient that is scaled, with Adam and two workers",
    "random layers in bf16, without DDP",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in SLOW)) for name in CASES],
)
def test_differences_are_told_from_rounding(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = load_config(case.name, {"trainer.callbacks": [], **case.changes})
    run = compare(deepspeed(config, case.stage, **case.sections), tmp_path)
    verdict = run.output.splitlines()[-1]
    if case.first is None:
        assert (run.returncode, verdict) == (0, SAME), run.output
    else:
        assert run.returncode == 1 and f"Differs from {case.first}" in verdict, run.output
    for line in case.lines:
        assert line in run.output, run.output
    rows = re.findall(r"^ +(\d+) .+\(\d.\d\w[-+]\d+\) \S+$", run.output, re.MULTILINE)
    assert list(map(int, rows)) == list(range(1, NUM_STEPS + 1)), run.output
    assert re.search(r"A step takes \S+ s and \S+ s, rank 0 at most \S+ MB and \S+ MB", run.output)


def test_an_optimizer_of_deepspeeds_is_refused(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = load_config("classifier", ONE_PROCESS, {"trainer.callbacks": []})
    del config["trainer"]["optimizer"]
    run = compare(deepspeed(config, 2, optimizer=optimizer), tmp_path)
    assert run.returncode == 1
    assert run.output.splitlines()[-1] == (
        "'trainer.deepspeed_config.optimizer' has no counterpart in 'gradient_descent': to "
        "compare, write 'trainer.optimizer' instead."
    )
