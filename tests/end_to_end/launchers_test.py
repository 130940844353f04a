"""
Processes that a launcher has started train as those that `allennlp train` starts, and continue when
they are started again.
"""

import shutil
import sys
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import pytest
from allennlp.common.util import find_open_port

from tests.fixtures.failures import MESSAGE
from tests.support.command import allennlp
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    arguments,
    assert_same_run,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.launching import MODULE, LaunchedCommands

BIN = Path(sys.executable).parent

CONFIG = deepspeed(load_config("tagger", TWO_WORKERS), 2)

# A launcher says itself how many there are.
LAUNCHED_CONFIG = {key: value for key, value in CONFIG.items() if key != "distributed"}

PYTHON_MODULE = [sys.executable, "-m"]
STAND_IN = [*PYTHON_MODULE, "tests.support.stand_in_launcher"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2"]
ACCELERATE = [
    *(str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
]
DEEPSPEED = [str(BIN / "deepspeed"), "--num_gpus", "2", "--no_local_rank"]

# Slurm has a stand-in that gives the environment of the real one.
LAUNCHERS: Dict[str, List[str]] = {
    "accelerate": [*ACCELERATE, "--main_process_port", "PORT", "-m"],
    "deepspeed": [*DEEPSPEED, "--master_port", "PORT", "--module"],
    "srun": [*STAND_IN, "srun", "2", *PYTHON_MODULE],
    "environment": [*STAND_IN, "environment", "2", *PYTHON_MODULE],
}


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[LaunchedCommands]:
    directory = tmp_path / "output"
    directory.mkdir()
    with LaunchedCommands(directory) as commands:
        yield commands


def launch(name: str) -> List[str]:
    port = str(find_open_port())
    return [port if argument == "PORT" else argument for argument in LAUNCHERS[name]]


def changed(**trainer: object) -> Config:
    return {**LAUNCHED_CONFIG, "trainer": {**LAUNCHED_CONFIG["trainer"], **trainer}}


# `torchrun` restarts below. Accelerate starts processes by it.
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.soak) for name in ("accelerate", "deepspeed")), "srun"],
)
def test_a_launchers_processes_train_as_workers_do(
    experiments: Experiments, launched: LaunchedCommands, tmp_path: Path, name: str
) -> None:
    run = launched.run([*launch(name), MODULE, *arguments(LAUNCHED_CONFIG, tmp_path)])
    assert run.returncode == 0, run.stdout + launched.output()
    assert_same_run(Result(tmp_path / "out"), experiments.run(CONFIG), tolerance=0)


def test_torchrun_starts_again_what_has_been_killed(
    experiments: Experiments, launched: LaunchedCommands, tmp_path: Path
) -> None:
    kill = {"type": "send_signal", "point": "step 3 of epoch 1", "signal_name": "SIGKILL"}
    kill = {**kill, "rank": 1, "after": "checkpoint_e1_b0"}
    config = changed(resume="auto", callbacks=["record_steps", kill])
    torchrun = [*TORCHRUN, "--standalone", "--max-restarts", "1", "-m", MODULE]
    run = launched.run([*torchrun, *arguments(config, tmp_path)])
    assert run.returncode == 0, run.stdout + launched.output()
    output = launched.output()
    assert "Resuming the training in " in output
    expected, result = experiments.run(CONFIG), Result(tmp_path / "out")
    assert result.epochs() == expected.epochs()
    assert_same_weights(result.weights(), expected.weights(), tolerance=0)


def test_an_interrupted_launch_says_how_to_continue(
    launched: LaunchedCommands, tmp_path: Path
) -> None:
    stop = {"type": "send_signal", "point": "step 2 of epoch 1", "signal_name": "SIGTERM"}
    config = changed(callbacks=[{**stop, "to": "session"}])
    torchrun = [*TORCHRUN, "--standalone", "-m", MODULE]
    # The console that a user has.
    environment = {"ALLENNLP_LOG_LEVEL": ""}
    again = [*torchrun, *arguments(config, tmp_path, "--force")]
    run = launched.run(again, environment=environment)
    assert run.returncode != 0
    (line,) = [line for line in launched.output().splitlines() if "To resume from" in line]
    assert line.endswith("replace --force by --recover in the command.")


def test_a_failure_ends_all_of_a_launchers_processes(
    launched: LaunchedCommands, tmp_path: Path
) -> None:
    fail = {"type": "fail", "point": "step 2 of epoch 0", "rank": 1}
    config = changed(callbacks=["record_steps", fail])
    run = launched.run([*launch("environment"), MODULE, *arguments(config, tmp_path)])
    assert run.returncode == 1
    assert f"{MESSAGE} in step 2 of epoch 0" in launched.output()


def test_resume_starts_and_continues_by_one_command(
    experiments: Experiments, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "resume": "auto"}}
    out = tmp_path / "out"
    # What a user has put there.
    shutil.copytree(experiments.run(CONFIG).serialization_dir / "vocabulary", out / "vocabulary")
    (out / "best.th").write_text("weights that took a week")
    run = allennlp(*arguments(config, tmp_path))
    assert run.returncode == 1 and "Traceback" not in run.output
    expect_message(run.output.splitlines()[-1].replace(str(tmp_path), "/tmp/path"))
    assert len(list((out / "vocabulary").glob("*.txt"))) == 3
    assert (out / "best.th").read_text() == "weights that took a week"
    shutil.rmtree(out)
    # A start that hasn't come to a checkpoint, but to best weights, and one that is whole.
    kill = {"type": "send_signal", "point": "step 2 of epoch 1", "signal_name": "SIGKILL"}
    late = {"callbacks": ["record_steps", kill], "checkpointer": {"save_completed_epochs": False}}
    killed = {**config, "trainer": {**config["trainer"], **late}}
    assert allennlp(*arguments(killed, tmp_path)).returncode == 1
    assert (out / "best.th").exists() and not list(out.glob("checkpoint_*"))
    training = arguments(config, tmp_path)
    run = allennlp(*training).check()
    assert "Removed an earlier start without a checkpoint" in run.output
    shutil.rmtree(out / "checkpoint_e2_b0")
    (out / "model.tar.gz").unlink()
    run = allennlp(*training, "--recover").check()
    assert f"Loading checkpoint {out / 'checkpoint_e1_b0'}" in run.output
    assert_same_weights(Result(out).weights(), experiments.run(CONFIG).weights(), tolerance=0)
    # And the only weights of a whole one whose checkpoints are gone.
    for path in out.glob("checkpoint_*"):
        shutil.rmtree(path)
    before = (out / "best.th").read_bytes()
    assert allennlp(*training).returncode == 1
    assert (out / "best.th").read_bytes() == before and (out / "model.tar.gz").exists()
