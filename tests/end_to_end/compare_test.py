"""`allennlp deepspeed check --compare`: what it finds, and what it doesn't take for a fault."""

import re
import signal
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import pytest

from tests.fixtures.tiny_lm import LLAMA
from tests.fixtures.unlike_gradient_descent import BIAS, PARAMETER
from tests.support.command import Command, Run, allennlp, subprocess_allennlp, wait_for_all
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    deepspeed,
    load_config,
    write_config,
)
from tests.support.language_model import language_model

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
    verdict : `str`, optional (default = `SAME`)
        The beginning of the last line.
    lines : `List[str]`, optional (default = `[]`)
        Of the output.
    sections : `Dict[str, Any]`, optional (default = `{}`)
        Of DeepSpeed's configuration.
    """

    name: str
    stage: int
    changes: Config
    verdict: str = SAME
    lines: List[str] = []
    sections: Dict[str, Any] = {}


def random_layer(module: str) -> Dict[str, str]:
    return {"type": "random_layer", "module": module}


CASES = {
    "the same, two workers": Case(
        "classifier",
        2,
        {
            **TWO_WORKERS,
            "trainer.num_gradient_accumulation_steps": 2,
            "trainer.grad_norm": 0.2,
            "trainer.learning_rate_scheduler": {"type": "reduce_on_plateau"},
            "trainer.resume": "auto",
        },
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
    "random layers and a schedule in bf16, without DDP": Case(
        "transformer",
        3,
        {
            **TWO_WORKERS,
            "trainer.callbacks": ["refuse_ddp", "tensorboard", random_layer("_seq2vec_encoder")],
            "trainer.learning_rate_scheduler": {"type": "slanted_triangular"},
            "model.dropout": 0.1,
            "data_loader": {"batch_size": 3, "batches_per_epoch": NUM_STEPS},
        },
        lines=[
            'The training with "gradient_descent" in 2 workers (DDP) failed: ',
            'trained with "gradient_descent" in one process from weights perturbed',
            "left out: bf16, whose rounding hides faults",
            "the callback tensorboard",
            "dropout is turned off in 1 modules",
            "the model draws random numbers, from the same seed for each batch",
        ],
        sections={"bf16": {"enabled": True}},
    ),
    "a frozen bias, with Adam": Case(
        "classifier",
        0,
        {**ONE_PROCESS, "trainer.callbacks": ["freeze_bias"]},
        f"Differs from step 1 on, first in {BIAS}: ",
    ),
    "a gradient that is scaled": Case(
        "classifier",
        2,
        {
            **ONE_PROCESS,
            "trainer.optimizer": {"type": "sgd", "lr": 0.1},
            "trainer.callbacks": [SCALED],
        },
        f"Differs from step 4 on, first in {PARAMETER}: ",
    ),
    "a weight that is scaled": Case(
        "classifier",
        0,
        {**ONE_PROCESS, "trainer.callbacks": [{"type": "scale_weight", "step": 2}]},
        f"Differs from step 2 on, first in {PARAMETER}: ",
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
        "Differs from step 4 on, first in the gradient norm: ",
    ),
}
SLOW = ("a weight that is scaled", "a gradient that is scaled, with Adam and two workers")


def assert_verdict(run: Run, verdict: str) -> None:
    assert run.returncode == (verdict != SAME), run.output
    assert run.output.splitlines()[-1].startswith(verdict), run.output
    rows = re.findall(r"^ +(\d+) .+\(\d.\d\w[-+]\d+\) \S+$", run.output, re.MULTILINE)
    assert list(map(int, rows)) == list(range(1, NUM_STEPS + 1)), run.output
    assert re.search(r"A step takes \S+ s and \S+ s, rank 0 at most \S+ MB and \S+ MB", run.output)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in SLOW)) for name in CASES],
)
def test_differences_are_told_from_rounding(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = load_config(case.name, {"trainer.callbacks": [], **case.changes})
    run = compare(deepspeed(config, case.stage, **case.sections), tmp_path)
    assert_verdict(run, case.verdict)
    for line in case.lines:
        assert line in run.output, run.output


@pytest.mark.parametrize(
    "callbacks, verdict",
    [([], SAME), ([random_layer("transformer.model.layers.0.mlp")], "No verdict: ")],
    ids=["dropout", "random layers"],
)
def test_workers_that_share_sequences(
    tokenizer: str, tmp_path: Path, callbacks: List[Any], verdict: str
) -> None:
    """They draw random numbers for their parts of a sequence, and one process for all of it."""
    changes = {
        "trainer.sequence_parallel_size": 2,
        "model.config": {**LLAMA, "attention_dropout": 0.2},
        "trainer.callbacks": callbacks,
    }
    config = language_model(tokenizer, TWO_WORKERS, changes)
    assert_verdict(compare(deepspeed(config, 2), tmp_path), verdict)


@pytest.mark.soak
def test_the_command_tries_and_compares(tmp_path: Path) -> None:
    config = load_config("classifier", ONE_PROCESS, {"trainer.callbacks": []})
    path = write_config(deepspeed(config, 2), tmp_path)
    command = ("deepspeed", "check", path, "--try", "--compare", "--steps", NUM_STEPS)
    run = subprocess_allennlp(*command, "--include-package", "allennlp_deepspeed")
    assert not run.processes, run.output
    assert "resumption from the checkpoint, with another epoch" in run.output
    assert_verdict(run, SAME)


def test_ctrl_c_leaves_no_worker(tmp_path: Path) -> None:
    (tmp_path / "asleep").mkdir()
    sleep = {"type": "sleep_in_ddp", "directory": str(tmp_path / "asleep")}
    config = load_config("classifier", TWO_WORKERS, {"trainer.callbacks": [sleep]})
    path = write_config(deepspeed(config, 2), tmp_path)
    command = Command("deepspeed", "check", path, "--compare", include_packages=PACKAGES)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "asleep").iterdir())) < 2:
        assert command.is_running and time.monotonic() < deadline, command.output()
        time.sleep(0.1)
    command.signal(signal.SIGINT)
    (run,) = wait_for_all([command], 10)
    assert not run.processes and not run.timed_out, run.output


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
