"""
What AllenNLP offers around a training: flags and commands, repeated trainings in one process, a
notebook, a search of hyperparameters.
"""

import importlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable

import nbformat
import pytest
from allennlp.commands import train as train_command
from allennlp.common import Params
from nbclient import NotebookClient

from tests.end_to_end.parity_test import check_parity
from tests.support.command import REPOSITORY, allennlp
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
    refusal,
    train,
    write_config,
)
from tests.support.verses import write_sample

# Both start Python and import all of AllenNLP several times. Seconds.
TIME_LIMIT = 240


def test_a_dry_run_makes_the_vocabulary_and_trains_nothing(tmp_path: Path) -> None:
    train(deepspeed(load_config("tagger", TWO_WORKERS), 2), tmp_path, "--dry-run").check()
    result = Result(tmp_path / "out")
    assert (result.serialization_dir / "vocabulary" / "labels.txt").is_file()
    assert not result.archive.exists()
    assert not list(result.serialization_dir.glob("checkpoint_*"))


def test_a_vocabulary_is_built_before_and_used(experiments: Experiments, tmp_path: Path) -> None:
    config = deepspeed(load_config("tagger", TWO_WORKERS), 2)
    vocabulary = tmp_path / "vocabulary.tar.gz"
    allennlp("build-vocab", write_config(config, tmp_path), vocabulary).check()
    prepared = {**config, "vocabulary": {"type": "from_files", "directory": str(vocabulary)}}
    train(prepared, tmp_path).check()
    actual, expected = Result(tmp_path / "out").weights(), experiments.run(config).weights()
    assert_same_weights(actual, expected, tolerance=0)


def test_a_vocabulary_may_be_a_name_as_in_one_process(experiments: Experiments) -> None:
    named, section = (
        deepspeed(load_config("bi_encoder", TWO_WORKERS, {"vocabulary": vocabulary}), 2)
        for vocabulary in ("empty", {"type": "empty"})
    )
    weights = experiments.run(named).weights(), experiments.run(section).weights()
    assert_same_weights(*weights, tolerance=0)


def test_special_tokens_of_a_vocabulary_are_kept_by_recovery(
    experiments: Experiments, tmp_path: Path
) -> None:
    tokens = {"vocabulary": {"padding_token": "[PAD]", "oov_token": "[UNK]"}}
    config = deepspeed(load_config("tagger", TWO_WORKERS, tokens), 2)
    train({**config, "trainer": {**config["trainer"], "num_epochs": 1}}, tmp_path).check()
    train(config, tmp_path, "--recover").check()
    actual, expected = Result(tmp_path / "out").weights(), experiments.run(config).weights()
    assert_same_weights(actual, expected, tolerance=0)


def test_a_worker_alone_needs_no_section(tmp_path: Path) -> None:
    one = {"distributed": {"cuda_devices": [-1]}}
    assert "'distributed' has one worker" in refusal(
        deepspeed(load_config("tagger", one), 2), tmp_path
    )
    assert not (tmp_path / "out").exists()


def run_python(*arguments: Any, cwd: Path) -> str:
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert process.returncode == 0, process.stdout[-6000:]
    return process.stdout


def test_a_training_that_fails_leaves_pythons_hooks(tmp_path: Path) -> None:
    """In a notebook or a search, where other trainings follow in the same process."""
    before = threading.excepthook
    config = load_config("tagger", ONE_PROCESS, {"train_data_path": "nowhere"})
    with pytest.raises(FileNotFoundError):
        train_command.train_model(Params(deepspeed(config, 2)), str(tmp_path / "out"))
    assert threading.excepthook is before


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """As the repository's root, with a sample of the data."""
    (tmp_path / "training_configs").symlink_to(REPOSITORY / "training_configs")
    (tmp_path / "demo").mkdir()
    (tmp_path / "data" / "verses").mkdir(parents=True)
    write_sample(tmp_path / "data" / "verses", every=20)
    return tmp_path


@pytest.mark.soak
def test_the_tutorial_runs(directory: Path) -> None:
    notebook = nbformat.read(REPOSITORY / "demo" / "tutorial.ipynb", as_version=4)
    for cell in notebook.cells:
        # The sample is there.
        source = cell.source.replace('prepare_verses(Path("data/verses"))', "")
        cell.source = re.sub(r"(batches_per_epoch|num_epochs)\": \d+", r'\1": 2', source)
    client = NotebookClient(
        notebook, timeout=TIME_LIMIT, resources={"metadata": {"path": str(directory / "demo")}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    *_, predicted, _, lines, _ = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert predicted.outputs[-1]["data"]["text/plain"].startswith("'")
    printed = "".join(output["text"] for output in lines.outputs)
    assert re.findall(r"(\w+),\s+(\d+) steps", printed) == [
        ("one", "2"),
        ("one", "4"),
        ("two", "2"),
        ("two", "4"),
    ]
    assert (directory / "output" / "tutorial" / "report.html").stat().st_size > 1_000_000


@pytest.mark.soak
def test_hyperparameters_are_searched_in_one_process(directory: Path) -> None:
    """By the program in docs/python.md."""
    *_, code = re.findall(
        "^```python\n(.*?)^```$",
        (REPOSITORY / "docs" / "python.md").read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    script = directory / "search.py"
    script.write_text(code.replace("n_trials=10", "n_trials=5"))
    recipe = directory / "training_configs" / "verse_classifier.jsonnet"
    changes = "data_loader+: {batches_per_epoch: 3}, trainer+: {num_epochs: 3}"
    (directory / "config.jsonnet").write_text(f"(import '{recipe}') + {{{changes}}}")
    output = run_python(script, cwd=directory)
    states = re.findall(r"^\d (COMPLETE|PRUNED) \[", output, re.MULTILINE)
    assert len(states) == 5
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert re.search(r"^Best: accuracy \d", output, re.MULTILINE)


BUILT_IN: Config = {
    "trainer.num_epochs": 3,
    "trainer.callbacks": [
        {"type": "console_logger", "should_log_inputs": True},
        {"type": "should_validate_callback", "validation_start": 1, "validation_interval": 2},
        "track_epoch_callback",
        "confidence_checks",
        {"type": "tensorboard", "summary_interval": 2},
        "record_steps",
    ],
}


def test_callbacks_of_allennlp_do_what_they_do(experiments: Experiments) -> None:
    config = load_config("tagger", TWO_WORKERS, BUILT_IN)
    check_parity(experiments, config, stage=3)
    epochs = experiments.run(deepspeed(config, 3)).epochs()
    assert ["validation_loss" in epoch for epoch in epochs] == [False, False, True]


def test_a_callback_that_scales_losses_is_refused(tmp_path: Path) -> None:
    callback = {"trainer.callbacks": ["mixed_precision_backward"]}
    config = deepspeed(load_config("tagger", ONE_PROCESS, callback), 2)
    assert "remove it, and write 'trainer.use_amp'" in refusal(config, tmp_path)


def test_a_callback_that_goes_backward_twice_is_refused_at_stage_3(
    tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    importlib.import_module("allennlp.fairness")
    callback = {"trainer.callbacks": ["adversarial_bias_mitigator_backward"]}
    config = deepspeed(load_config("tagger", ONE_PROCESS, callback), 3)
    expect_message(refusal(config, tmp_path))
