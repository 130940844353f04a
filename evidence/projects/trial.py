"""Trains a public project, in a process of its own."""

import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import torch
from allennlp.common import Params
from allennlp.common.util import import_module_and_submodules, push_python_path

from evidence.model_library import experiments, trial
from evidence.model_library.table import TOLERANCE
from evidence.projects.projects import REMOVED, Project
from evidence.studies.model_library import Trials, ours
from tests.support import command as commands
from tests.support import preload  # noqa: F401
from tests.support.command import Command, Run, allennlp, wait_for_all

# World size and stage of ZeRO.
CELLS = [(1, 0), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3)]
NUM_EPOCHS = 2
# The module of a project's lines.
_LINES = "lines_of_today"
TIME_LIMIT = 400  # seconds, of a command


def run(project: Project, checkouts: Path, folder: Path) -> Iterator[Tuple[str, str]]:
    """
    Yields each step and what has become of it: how far weights are off, relative to the update by
    training, `"ok"`, or a message. A project that can't be imported, or whose reference can't be
    trained, has no further steps.
    """
    checkout = folder / "project"
    shutil.copytree(checkouts / project.repository.replace("/", "+"), checkout)
    os.chdir(checkout / project.folder)
    for path, text in project.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    Path(f"{_LINES}.py").write_text(project.lines)
    os.environ.update(project.variables)
    experiments.replace_models_of_spacy()
    try:
        with push_python_path("."):
            for package in _packages(project):
                import_module_and_submodules(package)
    except Exception as error:
        yield "import", f"FAILS: {trial.in_short(error)}"
        return
    yield "import", "ok"
    config = _config(project)
    # This process has imported what a command needs.
    commands._context = multiprocessing.get_context("fork")
    try:
        yield from _by_command(project, config, folder)
    except RuntimeError as error:
        yield "recover", f"FAILS: {error}"
    experiments.install()
    sys.path.insert(0, os.getcwd())
    try:
        config = trial.make_vocabulary(config, folder)
    except Exception as error:
        yield "reference", f"ERROR: {trial.in_short(error)}"
        return
    trials = (_ParallelTrials if project.gathers else Trials)(config, folder / "trials")
    for world_size, stage in CELLS:
        yield f"{world_size}x{stage}", trials.cell(world_size, stage)


class _ParallelTrials(Trials):
    """Trials beside `gradient_descent` with as many workers."""

    def reference(self, world_size: int, prepare: Any = None) -> Any:
        name = f"reference{world_size}{getattr(prepare, '__name__', '')}"
        train = functools.partial(trial.train, self._config, world_size, prepare=prepare)
        return self._train(name, train)


def _packages(project: Project) -> List[str]:
    return [*([_LINES] if project.lines else []), *project.packages]


def _config(project: Project) -> Dict[str, Any]:
    """Returns the project's config, for two epochs on this machine's processors."""
    config = Params.from_file(project.config).as_dict(quiet=True)
    config["trainer"].update(num_epochs=NUM_EPOCHS, cuda_device=-1)
    for key, value in {**project.fixtures, **project.changes}.items():
        *path, last = key.split(".")
        section = functools.reduce(lambda part, name: part[name], path, config)
        if value is REMOVED:
            del section[last]
        else:
            section[last] = value
    return config


def _by_command(
    project: Project, config: Dict[str, Any], folder: Path
) -> Iterator[Tuple[str, str]]:
    """Checks, trains at stage 3 with two workers, recovers after a kill, evaluates and predicts."""
    path = folder / "config.json"
    path.write_text(json.dumps(ours(config, 2, 3)))
    arguments: Dict[str, Any] = {
        "include_packages": ["allennlp_deepspeed", *_packages(project)],
        "environment": project.variables,
        "enter": functools.partial(_enter, os.getcwd()),
    }
    command = functools.partial(allennlp, time_limit=TIME_LIMIT, **arguments)
    yield "check", _outcome(command("deepspeed", "check", path))
    straight, killed = folder / "straight", folder / "killed"
    outcome = _outcome(command("train", path, "-s", straight))
    yield "train", outcome
    if outcome != "ok":
        return
    _kill_in_second_epoch(Command("train", path, "-s", killed, **arguments), killed)
    outcome = _outcome(command("train", path, "-s", killed, "--recover"))
    yield "recover", outcome if outcome != "ok" else _difference(straight, killed)
    archive = straight / "model.tar.gz"
    yield "evaluate", _outcome(command("evaluate", archive, config["validation_data_path"]))
    if project.predictor:
        lines = folder / "lines.jsonl"
        lines.write_text(json.dumps(project.sentence) + "\n")
        predicted = command("predict", archive, lines, "--predictor", project.predictor)
    else:
        data = config["validation_data_path"]
        predicted = command("predict", archive, data, "--use-dataset-reader", "--silent")
    yield "predict", _outcome(predicted)


def _kill_in_second_epoch(training: Command, folder: Path) -> None:
    first, last = (folder / f"checkpoint_e{epochs}_b0" for epochs in (1, NUM_EPOCHS))
    deadline = time.monotonic() + TIME_LIMIT
    while training.is_running and not first.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    training.signal(signal.SIGKILL)
    wait_for_all([training], TIME_LIMIT)
    if last.exists() or not first.exists():
        raise RuntimeError("The training wasn't killed in its second epoch")


def _enter(folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)


def _outcome(run: Run) -> str:
    if run.returncode == 0 and not run.processes:
        return "ok"
    if run.timed_out:
        return f"FAILS: not done after {TIME_LIMIT} s"
    print(run.output, flush=True)
    lines = [line.strip() for line in run.output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?:\w+\.)*\w*Error\b", line)]
    message = (errors or lines or ["no output"])[-1]
    return f"FAILS: {message[:400]}"


def _difference(folder: Path, other: Path) -> str:
    """Returns the largest difference of weights, relative to the largest weight of each."""
    weights, others = (
        torch.load(path / "best.th", map_location="cpu", weights_only=True)
        for path in (folder, other)
    )
    differences = [
        float((weight - others[name]).abs().max() / weight.abs().max().clamp(min=1e-12))
        for name, weight in weights.items()
        if weight.numel() and weight.is_floating_point()
    ]
    largest = max(differences)
    return f"{largest:.1e}" if largest <= TOLERANCE else f"DIFFERS: {largest:.1e}, at most"


def main(project: Project, checkouts: Path, folder: Path, results: Path) -> None:
    """Writes a line of JSON for each step, and a log of what is printed."""
    log = os.open(results.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with results.open("w") as file:
        for step, text in run(project, checkouts, folder):
            file.write(json.dumps({"step": step, "text": text}) + "\n")
            file.flush()
