"""What a training shows on the console, and what it leaves to the log files."""

import json
import os
import pty
import re
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from allennlp_deepspeed.reports import metrics_file
from tests.fixtures.tiny_bert import tiny_bert
from tests.support import experiment
from tests.support.command import Command, Run, allennlp, subprocess_allennlp, wait_for_all
from tests.support.experiment import (
    INCLUDED,
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    arguments,
    deepspeed,
    load_config,
)

# Other tests have it say what AllenNLP logs.
BY_DEFAULT = {"ALLENNLP_LOG_LEVEL": ""}

TIME_LIMIT = 60


class Trained(NamedTuple):
    directory: Path
    run: Run

    @property
    def logs(self) -> str:
        return "".join(
            (self.directory / name).read_text() for name in ("out.log", "out_worker0.log")
        )


train = partial(experiment.train, environment=BY_DEFAULT, time_limit=TIME_LIMIT)


def classifier(*changes: Config, stage: int = 2) -> Config:
    return deepspeed(load_config("classifier", TWO_WORKERS, *changes), stage)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two workers and two epochs without a terminal."""
    root = tmp_path_factory.mktemp("plain")
    return Trained(root / "out", train(classifier(), root).check())


def test_a_training_is_told_in_few_plain_lines(plain: Trained) -> None:
    lines = plain.run.output.splitlines()
    assert len(lines) < 40, plain.run.output
    assert "\x1b" not in plain.run.output and "\r" not in plain.run.output
    assert "allennlp.common.params" not in plain.run.output


def test_it_begins_with_what_is_going_to_be_done(plain: Trained) -> None:
    # A long directory is wrapped.
    lines = re.sub(r"\n {10,}", " ", plain.run.output).splitlines()
    told = dict(line.strip().split(maxsplit=1) for line in lines if line[:1] == " ")
    assert told["workers"] == "2 on the CPU"
    assert told["engine"] == "ZeRO stage 2, fp32"
    assert told["parameters"] == "1,275 trainable, 0 frozen"
    assert told["batch"].endswith("6 × accumulation 1 × workers 2 = global batch 12")
    assert told["optimizer"] == "AdamOptimizer, learning rate 0.01, no schedule"
    assert told["gradients"] == "not clipped, reduced once per step"
    assert re.fullmatch(
        r"[\d.]+ .B CPU memory on this node; no offload, no activation checkpointing",
        told["memory"],
    )
    # As it is estimated: Adam has two numbers for each parameter beside the weights that it steps.
    config = plain.directory.parent / "config.json"
    estimate = allennlp("deepspeed", "estimate", config, include_packages=[INCLUDED]).check()
    row = next(line.split() for line in estimate.output.splitlines() if line.startswith("  2 "))
    assert row[1] == "CPU" and "GPU " not in estimate.output
    weights, gradients, optimizer = map(" ".join, zip(row[2:8:2], row[3:8:2]))
    of_a_worker = f"(weights {weights}, gradients {gradients}, optimizer {optimizer})"
    assert told["model"].endswith(f"{of_a_worker} per worker")
    assert optimizer == "7.7 kB"
    assert told["checkpoints"] == f"saved to {plain.directory}/ after each epoch, newest 2 kept"


def test_the_overview_names_schedule_clipping_and_autocast(tmp_path: Path) -> None:
    changes = {
        "trainer.optimizer": {"type": "sgd", "lr": 0.1},
        "trainer.num_epochs": 1,
        "trainer.learning_rate_scheduler": {"type": "linear_with_warmup", "warmup_steps": 3},
        "trainer.grad_clipping": 0.5,
        "trainer.num_gradient_accumulation_steps": 2,
        "trainer.use_amp": True,
    }
    run = train(classifier(changes, stage=1), tmp_path).check()
    assert "SgdOptimizer, learning rate 0, warming up to 0.1, schedule Linear" in run.output
    # "auto" depends on memory from stage 2.
    assert "values clipped to ±0.5, reduced once per step\n" in run.output
    assert "ZeRO stage 1, autocast to bfloat16" in run.output


@pytest.mark.parametrize("is_distributed", [False, True])
def test_values_of_0_and_test_metrics_are_shown(is_distributed: bool, tmp_path: Path) -> None:
    data = load_config("classifier")["validation_data_path"]
    changes: Config = {
        "trainer.optimizer": {"type": "sgd", "lr": 0},
        "trainer.num_epochs": 2,
        "trainer.checkpointer": {"keep_most_recent_by_count": 0},
        "test_data_path": data,
        "evaluate_on_test": True,
    }
    if is_distributed:
        changes["type"] = "deepspeed"
    else:
        # AllenNLP's own top level.
        changes.update({"distributed": None, "trainer.cuda_device": -1})
    run = train(classifier(changes), tmp_path).check()
    assert "SgdOptimizer, learning rate 0, no schedule\n" in run.output
    shown = " ".join(run.output.split())  # a long directory is wrapped
    assert "newest 1 kept (keep_most_recent_by_count 0: a run resumes from it)" in shown
    assert [path.name for path in (tmp_path / "out").glob("checkpoint_*")] == ["checkpoint_e2_b0"]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    accuracy, loss = (f"{metrics[f'test_{name}']:.4g}" for name in ("accuracy", "loss"))
    assert run.output.count(f"Test metrics: accuracy {accuracy}, loss {loss}\n") == 1


def test_a_constructor_that_fails_is_told_in_one_message(tmp_path: Path) -> None:
    failing = {"model.type": "failing_classifier", "model.fails_on": [1]}
    config = deepspeed(load_config("classifier", TWO_WORKERS, failing), 3)
    run = train(config, tmp_path, environment=BY_DEFAULT, time_limit=TIME_LIMIT)
    assert run.returncode == 1
    *_, before, message, log = run.output.splitlines()
    assert before.startswith("Reading data.")
    assert message == "'model': ValueError: no such thing on disk"
    assert log == f"(Full traceback: {tmp_path / 'out' / 'out_worker1.log'})"


def test_the_error_of_a_rank_follows_without_an_empty_line(tmp_path: Path) -> None:
    failing = {"model.type": "failing_tagger", "model.rank": 1, "model.in_training": True}
    config = deepspeed(load_config("tagger", TWO_WORKERS, failing), 2)
    run = train(config, tmp_path, environment=BY_DEFAULT, time_limit=TIME_LIMIT)
    assert run.returncode == 1
    lines = run.output.splitlines()
    assert "Traceback (most recent call last):" in lines and "" not in lines


def test_a_file_has_no_line_of_plugins_and_no_bars_of_transformers(
    session_directory: Path, tmp_path: Path
) -> None:
    bert = tiny_bert(session_directory / "tiny_bert")
    transformer = {"type": "pretrained_transformer", "model_name": bert}
    changes = {
        "dataset_reader.token_indexers": {"tokens": transformer},
        "dataset_reader.tokenizer": transformer,
        "model.text_field_embedder.token_embedders.tokens": transformer,
        "model.seq2vec_encoder": {"type": "bert_pooler", "pretrained_model": bert},
        "trainer.num_epochs": 1,
    }
    config = deepspeed(load_config("classifier", ONE_PROCESS, changes), 2)
    (tmp_path / ".allennlp_plugins").write_text("allennlp_deepspeed\n")
    run = subprocess_allennlp(
        *arguments(config, tmp_path),
        cwd=tmp_path,
        env={**os.environ, **BY_DEFAULT},
    ).check()
    assert run.lines()[0].startswith("Reading data.")
    assert "\r" not in run.output and "Loading weights" not in run.output


def test_each_epoch_is_compared_with_the_best_one_before(plain: Trained) -> None:
    metrics = [
        json.loads((plain.directory / f"metrics_epoch_{epoch}.json").read_text())
        for epoch in range(2)
    ]
    before, now = (m["validation_accuracy"] for m in metrics)
    row = rf"accuracy +{metrics[1]['training_accuracy']:.4g} +{now:.4g} +{before:.4g}"
    assert re.search(rf"{row} +{re.escape(f'{now - before:+.3g}')}\n", plain.run.output)
    assert "Epoch 2 of 2 in " in plain.run.output and ", best so far" in plain.run.output
    assert "memory_MB" not in plain.run.output


def test_checkpoints_and_what_comes_next_are_told(plain: Trained) -> None:
    for name in ("checkpoint_e1_b0", "checkpoint_e2_b0"):
        assert f"Saved {name} (" in plain.run.output
    commands = [line.split()[1] for line in plain.run.output.splitlines()[-3:]]
    assert commands == ["evaluate", "predict", "deepspeed"]
    assert f"allennlp evaluate {plain.directory / 'model.tar.gz'} " in plain.run.output


def test_a_warning_is_shown_once(plain: Trained) -> None:
    warning = "Rank 0 drops 1 batch at the end of each epoch"
    assert plain.run.output.count(warning) == 1
    assert plain.logs.count(warning) == 2
    # What each training logs as a warning, and is none.
    assert plain.run.output.count("Warning: ") == 1, plain.run.output
    assert plain.logs.count("WARNING - allennlp.training.gradient_descent_trainer") > 2


def test_the_log_files_have_everything(plain: Trained) -> None:
    for text in (
        "trainer.deepspeed_config.zero_optimization.stage = 2",  # before there is a log file
        "allennlp.common.params - trainer.optimizer.lr = 0.01",
        "Number of trainable parameters: 1275",
        "Beginning training.",
        "tqdm - loading instances",
        "allennlp.models.archival - archiving weights",
    ):
        assert text in plain.logs and text not in plain.run.output
    for text in (
        "2 on the CPU",
        "Saved checkpoint_e1_b0",
        "Epoch 2 of 2 in",
        "allennlp predict",
    ):
        assert text in plain.logs and text in plain.run.output
    assert "allennlp.common.params" in (plain.directory / "out_worker1.log").read_text()


def test_more_epochs_can_be_trained_after_the_end(plain: Trained, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    shutil.copytree(plain.directory, directory)
    more = ["--recover", "-o", '{"trainer.num_epochs": 3}']
    run = train(classifier(), tmp_path, *more).check()
    assert "trainer.num_epochs: 2 -> 3" in run.output
    assert f"Loading checkpoint {directory / 'checkpoint_e2_b0'}" in run.output
    assert "Resuming after epoch 2 (global step 14): fast-forwarding data" in run.output
    assert "Resumed training after epoch 2 (global step 14)" in run.output
    assert "Rank 0 drops" not in run.output
    assert "Epoch 3 of 3 in " in run.output and "previous best" in run.output
    assert (directory / "metrics_epoch_2.json").exists()
    lines = list(metrics_file.read(str(directory / "metrics.jsonl")))
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == sorted(set(steps)) and steps[-1] == 21
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [0, 1, 2]


def test_a_run_of_one_worker_continues_with_two(tmp_path: Path) -> None:
    directory, one_worker = tmp_path / "out", {"distributed": None, "trainer.cuda_device": -1}
    checkpoints = {"save_every_num_batches": 4, "keep_most_recent_by_count": None}
    changes = {"trainer.checkpointer": checkpoints}
    train(classifier(changes, one_worker), tmp_path).check()
    for path in directory.glob("checkpoint_*"):
        if path.name != "checkpoint_e1_b4":
            shutil.rmtree(path)
    accumulation = {"trainer.num_gradient_accumulation_steps": 2}
    run = train(classifier(changes, accumulation), tmp_path, "--recover").check()
    # The same position in the data. Global step 19 would be of steps with a quarter of the batch.
    assert "Resuming after step 1 of epoch 2: fast-forwarding data" in run.output
    assert "Resumed training after step 1 of epoch 2\n" in run.output
    # Only from now on.
    assert run.output.count("Rank 0 drops 1 batch at the end of each epoch") == 1
    assert "reduced once per step if memory allows (gradient_synchronization auto)" in run.output


# on a terminal


def _onto_terminal(path: str) -> None:
    """Called in the process of the command, which leads a session."""
    terminal = os.open(path, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)


class Terminal:
    """A command on a terminal of its own, of 100 columns."""

    def __init__(self, *arguments: Any) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, True)
        self._printed = b""
        self.command = Command(
            *arguments,
            environment={**BY_DEFAULT, "COLUMNS": "100", "TERM": "xterm-256color"},
            enter=partial(_onto_terminal, os.ttyname(slave)),
        )
        self._slave = slave
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._printed += os.read(self._master, 65536)
            except OSError:
                return

    @property
    def printed(self) -> str:
        return self._printed.decode(errors="replace")

    def wait_until_it_prints(self, text: str) -> None:
        deadline = time.monotonic() + TIME_LIMIT
        while text not in self.printed:
            assert self.command.is_running and time.monotonic() < deadline, self.printed[-6000:]
            time.sleep(0.02)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def end(self) -> Run:
        (run,) = wait_for_all([self.command], TIME_LIMIT)
        os.close(self._slave)
        self._reader.join(TIME_LIMIT)  # it reads until nobody can write
        return run


class Interrupted(NamedTuple):
    run: Run
    printed: str

    @property
    def last_line(self) -> str:
        return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", self.printed).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """A training on a terminal that ends by Ctrl-C in its second epoch or after."""
    root = tmp_path_factory.mktemp("terminal")
    terminal = Terminal(*arguments(classifier({"trainer.num_epochs": 500}), root))
    terminal.wait_until_it_prints("Saved checkpoint_e1_b0")
    terminal.press_ctrl_c()
    run = terminal.end()
    assert not run.processes and not run.timed_out
    return Interrupted(run, terminal.printed)


def test_on_a_terminal_there_is_a_bar(interrupted: Interrupted) -> None:
    drawings = interrupted.printed.split("\r\x1b[2K")
    bars = [re.sub(r"\x1b\[[?\d;]*[a-z]", "", d).split("\r\n")[-1] for d in drawings if "━" in d]
    assert any(bar.startswith("Epoch 1 of 500") for bar in bars), drawings
    # The other worker has fewer batches.
    drawn = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", interrupted.printed)
    assert re.search("Epoch 1 of 500 ━+ 7/7 ", drawn)
    assert "\rEvaluating: 100%" in interrupted.printed and "loss: " not in interrupted.printed
    # It never takes a second line.
    assert max(map(len, bars)) <= 100
    # No cursor is moved up, which two processes couldn't agree on, or left hidden.
    assert not re.search(r"\x1b\[\d*A", interrupted.printed)
    assert interrupted.printed.rfind("\x1b[?25h") > interrupted.printed.rfind("\x1b[?25l")


def test_ctrl_c_ends_without_a_traceback_and_says_how_to_continue(interrupted: Interrupted) -> None:
    printed, last = interrupted.printed, interrupted.last_line
    assert interrupted.run.returncode == 128 + signal.SIGINT
    assert "SIGINT received: stopping the workers" in printed
    # In the console's format, not in that of AllenNLP's log.
    assert " - WARNING - " not in printed
    # On a line of its own, between drawings of a bar.
    assert re.search(r"(\r\x1b\[2K|\n)SIGINT received", printed)
    assert "━" not in printed[printed.index("Stopped by SIGINT") :]
    assert re.search(r"Stopped by SIGINT (after step|during the validation)", printed)
    for text in ("Traceback", "KeyboardInterrupt", "KeyError"):
        assert text not in printed, printed
    assert re.match(r"\r?To resume from checkpoint_e\d+_b\d+, add --recover to the command\.", last)
