"""What reaches the console, and how it is drawn."""

import io
import logging
import multiprocessing
import os
import pty
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Iterator, Tuple

import pytest
from allennlp.common import Tqdm
from allennlp.training.util import description_from_metrics
from transformers.utils.logging import is_progress_bar_enabled

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.launch import log_files
from allennlp_deepspeed.reports import console_handler as consoles
from allennlp_deepspeed.reports import console_report
from allennlp_deepspeed.reports.console_handler import (
    Console,
    ConsoleHandler,
    ConsoleSettings,
    disable_progress_bars_of_transformers,
    shown_on_console,
)
from allennlp_deepspeed.reports.console_report import EpochProgress, as_text, epoch_table
from tests.support.command import REPOSITORY
from tests.support.workers import run_workers

PLAIN = ConsoleSettings(is_terminal=False, is_file_friendly=False)
TERMINAL = ConsoleSettings(is_terminal=True, is_file_friendly=False)

logger = logging.getLogger("some.library")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hook = sys.excepthook
    tqdm_handlers = list(logging.getLogger("tqdm").handlers)
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("tqdm").handlers[:] = tqdm_handlers
    sys.excepthook = hook


def log_something() -> None:
    logger.info("of no interest")
    announce(logger, "%d checkpoints", 2)
    for _ in range(2):
        logger.warning("It warns.")
        warnings.warn("An old function.", UserWarning, stacklevel=1)
    logging.getLogger("DeepSpeed").warning("DeepSpeed warns.")
    try:
        raise ValueError("on purpose")
    except ValueError:
        logger.exception("It fails.")


def test_announcements_and_warnings_are_shown_and_all_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with shown_on_console(PLAIN):
        logger.info("before there is a file")
        log_files.prepare(str(tmp_path))
        capsys.readouterr()
        log_something()
    out = capsys.readouterr().out
    assert out.splitlines()[:6] == [
        "2 checkpoints",
        "Warning: It warns.",
        "Warning: UserWarning: An old function.",
        "Warning: DeepSpeed warns.",
        "Error: It fails.",
        "Traceback (most recent call last):",
    ]
    assert out.endswith("ValueError: on purpose\n")
    log = (tmp_path / "out.log").read_text()
    for text in ("before there is a file", "of no interest", "2 checkpoints", "ValueError"):
        assert text in log
    assert log.count("It warns.") == 2


def test_records_without_a_log_file_do_not_accumulate() -> None:
    with shown_on_console(PLAIN):
        (buffer,) = (h for h in logging.getLogger().handlers if isinstance(h, MemoryHandler))
        for i in range(2 * buffer.capacity):
            logger.info("step %d of an agent", i)
        assert len(buffer.buffer) == buffer.capacity


def test_afterwards_logging_is_as_allennlp_leaves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with shown_on_console(PLAIN):
        log_files.prepare(str(tmp_path))
    assert consoles.current() is None
    assert not any(isinstance(h, ConsoleHandler) for h in logging.getLogger().handlers)
    capsys.readouterr()
    logger.info("of interest again")
    assert "some.library - of interest again" in capsys.readouterr().out
    assert logging.getLogger("DeepSpeed").handlers


def test_without_settings_everything_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with shown_on_console(None):
        log_files.prepare(str(tmp_path))
        logger.info("of interest")
        assert consoles.current() is None
    assert "some.library - of interest" in capsys.readouterr().out


def _bars_before_and_in_a_worker() -> Tuple[bool, bool]:
    """In a process of its own, in which logging stays as it is for a worker."""
    before = is_progress_bar_enabled()
    disable_progress_bars_of_transformers()
    return before, is_progress_bar_enabled()


@pytest.mark.skipif(
    "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ, reason="the environment says what to do"
)
def test_a_worker_has_no_bars_of_transformers() -> None:
    assert run_workers(1, lambda rank: _bars_before_and_in_a_worker()) == [(True, False)]


@pytest.mark.skipif(
    "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ, reason="the environment says what to do"
)
@pytest.mark.parametrize("settings", [PLAIN, TERMINAL])
def test_bars_of_transformers_are_drawn_on_a_terminal(settings: ConsoleSettings) -> None:
    with shown_on_console(settings):
        assert is_progress_bar_enabled() is settings.is_terminal
    assert is_progress_bar_enabled()


@pytest.mark.parametrize("settings", [PLAIN, TERMINAL])
def test_bars_of_allennlp_are_drawn_on_a_terminal(
    settings: ConsoleSettings, capsys: pytest.CaptureFixture
) -> None:
    with shown_on_console(settings):
        for _ in Tqdm.tqdm(range(3), desc="loading instances"):
            pass
    assert ("loading instances" in capsys.readouterr().err) is settings.is_terminal


def test_a_line_that_is_printed_leaves_the_bar_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(TERMINAL)
    with EpochProgress(console, "Epoch 1 of 5", total=100) as progress:
        progress.show(", ".join(["loss 0.123", "lr 0.01", "norm 0.1", "memory 1.0 GB"]))
        console.print("Saved.")
    _, *drawings = capsys.readouterr().out.split("\r\x1b[2K")
    lines = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", drawing) for drawing in drawings]
    assert lines[0].startswith("Saved.\nEpoch 1 of 5 ")
    # Never longer than the terminal.
    assert all(len(line) <= 60 for drawing in lines for line in drawing.splitlines())


VALUES = ["loss 0.6931", "lr 0.0005", "samples/s 1,234.5", "norm 0.123", "memory 12.3 GB"]


@pytest.mark.parametrize("columns, num_values", [(40, 0), (80, 2), (120, 3), (200, 5)])
def test_a_narrow_terminal_leaves_out_the_last_values_first(
    columns: int, num_values: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    clock = Clock(monkeypatch)
    arguments = ("Epoch 12 of 40", 1000, 28)
    with EpochProgress(Console(TERMINAL), *arguments) as progress:
        progress.show(", ".join(VALUES))
        for _ in range(500):
            clock.now += 1
            progress.update()
        drawn = capsys.readouterr().out.split("\r\x1b[2K")[-1]
    bar = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", drawn)
    if columns >= 80:
        assert re.search("━ +500/1000 08:20 run 7:55:00 ", bar)
    shown = [value for value in VALUES if value in bar]
    assert shown == VALUES[:num_values]
    assert len(bar) <= columns


def test_the_time_of_the_run_counts_validations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    arguments = ("Epoch 2 of 5", 100, 3, 200.0)
    with caplog.at_level(logging.INFO), EpochProgress(Console(PLAIN), *arguments) as line:
        for _ in range(50):
            clock.now += 1
            line.update()
    assert ": 50%, step 50/100, 0:00:50<0:00:50, run 0:10:50" in caplog.messages[-1]


DEBUGGED = """
from allennlp_deepspeed.reports.console_handler import Console, ConsoleSettings, shown_on_console
from allennlp_deepspeed.reports.console_report import EpochProgress

settings = ConsoleSettings(is_terminal=True, is_file_friendly=False)
with shown_on_console(settings):
    with EpochProgress(Console(settings), "Epoch 1 of 5", total=4) as progress:
        for step in range(4):
            if step == 1:
                breakpoint()
            progress.update()
"""


def test_a_debugger_has_the_terminal_for_itself(tmp_path: Path) -> None:
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    terminal, side_of_program = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), side_of_program)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    command = [sys.executable, str(tmp_path / "debugged.py")]
    program = subprocess.Popen(command, **streams, env=environment, cwd=REPOSITORY)
    os.close(side_of_program)
    printed = ""
    for number, typed in enumerate((b"p 6 * 7\n", b"c\n"), start=1):
        while printed.count("(Pdb) ") < number:
            printed += os.read(terminal, 4096).decode(errors="replace")
        os.write(terminal, typed)
    with suppress(OSError):  # the program has ended
        while True:
            printed += os.read(terminal, 4096).decode(errors="replace")
    assert program.wait(30) == 0
    os.close(terminal)
    before, *outputs = re.split(r"\(Pdb\) ", re.sub(r"\x1b\[[\d;]*m", "", printed))
    # The bar ends its line, and the cursor is there.
    assert re.search(r"1/4 .*\r\n\x1b\[\?25h", before)
    session, after = outputs
    assert "━" not in session and "42" in session
    assert "4/4" in after and "\x1b[?25l" in after


def test_what_a_worker_prints_erases_the_bar_of_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for is_shown in (True, False):
        with shown_on_console(TERMINAL._replace(is_shown=is_shown)):
            print("from the model")
            assert sys.stdout.encoding
    with shown_on_console(PLAIN):
        print("from the model")
    *on_terminal, plain, _ = capsys.readouterr().out.split("\n")
    erased = [re.sub(r"\x1b\[\?25[hl]", "", line) for line in on_terminal]
    assert erased == ["\r\x1b[2Kfrom the model"] * 2
    assert plain.endswith("from the model") and "\r" not in plain


def test_the_bar_of_a_completed_epoch_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    # The length of a data loader may be an estimate.
    with EpochProgress(Console(TERMINAL), "Epoch 1 of 5", total=8) as progress:
        for _ in range(7):
            progress.update()
    last = capsys.readouterr().out.split("\r\x1b[2K")[-1]
    assert "7/7" in last


def test_the_last_line_of_a_bar_comes_before_what_ended_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(TERMINAL)
    with suppress(KeyboardInterrupt), EpochProgress(console, "Epoch 1 of 5", total=8) as progress:
        progress.update()
        progress.close()
        console.print("Stopped.")
        raise KeyboardInterrupt
    bar, after = capsys.readouterr().out.rsplit("Stopped.\n", 1)
    assert "1/8" in bar and bar.count("\n") == 1 and "━" not in after


def test_an_announcement_erases_the_bar_of_another_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for settings in (TERMINAL, PLAIN):
        with shown_on_console(settings):
            announce(logger, "Stopping.")
    on_terminal, plain, _ = capsys.readouterr().out.split("\n")
    assert on_terminal.startswith("\r\x1b[2KStopping.") and plain.endswith("Stopping.")
    assert "\r" not in plain


def test_a_validation_is_labelled_and_its_metrics_on_rank_0_are_in_the_log_only(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with shown_on_console(TERMINAL):
        log_files.prepare(str(tmp_path))
        bar = Tqdm.tqdm(range(3))
        for _ in bar:
            bar.set_description(description_from_metrics({"loss": 1.5}), refresh=False)
    drawn = capsys.readouterr().err
    assert "\rEvaluating: 100%" in drawn and "loss" not in drawn
    assert "loss: 1.5000 ||: 100%" in (tmp_path / "out.log").read_text()


def test_a_console_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    Console(PLAIN).print("Saved.")


class Clock:
    """Each step takes as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(console_report.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    "is_file_friendly, seconds_per_step, num_lines",
    [
        (False, 1.0, 20),  # each 5%
        (False, 60.0, 40),  # each 5 minutes
    ],
)
def test_without_a_terminal_there_is_a_line_from_time_to_time(
    is_file_friendly: bool,
    seconds_per_step: float,
    num_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock(monkeypatch)
    console = Console(ConsoleSettings(False, is_file_friendly))
    with caplog.at_level(logging.INFO), EpochProgress(console, "Epoch 1 of 5", total=200) as line:
        line.show("loss 1.25")
        for _ in range(200):
            clock.now += seconds_per_step
            line.update()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == num_lines
    if seconds_per_step == 1.0:
        assert messages[1] == "Epoch 1 of 5: 10%, step 20/200, 0:00:20<0:03:00, loss 1.25"


def test_a_table_has_the_change_against_the_best() -> None:
    metrics = {
        "epoch": 3,
        "training_accuracy": 0.5,
        "training_worker_0_memory_MB": 1000.0,
        "training_duration": "0:01:00",
        "validation_accuracy": 0.625,
        "validation_loss": 1.5,
        "best_validation_accuracy": 0.625,
    }
    table = epoch_table("Epoch 4 of 5", metrics, {"accuracy": 0.75, "loss": 1.25})
    rows = [line.split() for line in as_text(table).splitlines()]
    assert rows == [
        ["Epoch", "4", "of", "5"],
        ["training", "validation", "previous", "best", "change"],
        ["accuracy", "0.5", "0.625", "0.75", "-0.125"],
        ["loss", "1.5", "1.25", "+0.25"],
    ]


def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    handler = ConsoleHandler(Console(PLAIN))
    record = logging.makeLogRecord({"levelno": logging.WARNING, "msg": "a"})
    with handler.console._lock:  # as another thread may have it
        process = multiprocessing.get_context("fork").Process(target=handler.emit, args=(record,))
        process.start()
        process.join(30)
        process.kill()
    assert process.exitcode == 0
