import json
import math
import os
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, TypeGuard

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.config.values import is_number
from allennlp_deepspeed.reports import metrics_file

# Seconds without a line after which a run without an archive isn't taken for one that trains.
_SILENCE = 120.0

_MAX_TIME = 1e11  # seconds since 1970


class Line(NamedTuple):
    """
    A line of a metrics file.

    # Parameters

    hours : `float`
        That the run had trained until then, without the time between a crash and a recovery.
    values : `Dict[str, Any]`
        As written.
    """

    hours: float
    values: Dict[str, Any]


class Checkpoint(NamedTuple):
    """
    # Parameters

    name : `str`
    epochs : `int`
        That had been completed.
    steps : `int`
        Of the epoch after them.
    saved : `float`
        Seconds since 1970.
    num_bytes : `int`
    """

    name: str
    epochs: int
    steps: int
    saved: float
    num_bytes: int


class Run:
    """
    What a training has left in its serialization directory, also while it trains.

    # Parameters

    directory : `str`, required.

    # Raises

    `ConfigurationError`
        If there is no `metrics.jsonl` in it, or nothing in that.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        path = self.directory / metrics_file.FILE_NAME
        if not self._has(path):
            raise ConfigurationError(
                f"There is no {metrics_file.FILE_NAME} in {directory}: give the serialization "
                "directory of a training with the 'deepspeed' trainer, which writes it."
            )
        self.lines = _with_hours(list(metrics_file.read(str(path))))
        if not self.lines:
            raise ConfigurationError(
                f"{path} has no lines yet. They come with the first optimizer steps."
            )
        self.name = self.directory.resolve().name
        config = self.directory / "config.json"
        self.config = _config(config) if self._has(config) else {}

    def _has(self, path: Path) -> bool:
        """
        # Raises

        `ConfigurationError`
            If it is a link to a file somewhere else, which isn't of this run.
        """
        if path.is_file() and not path.resolve().is_relative_to(self.directory.resolve()):
            raise ConfigurationError(
                f"{path} is a link to {path.resolve()}, which is not in {self.directory}: copy the "
                "file there."
            )
        return path.is_file()

    def of_kind(self, *kinds: str) -> List[Line]:
        """The lines of these kinds, in the order in which they were written."""
        return [line for line in self.lines if line.values["kind"] in kinds]

    @property
    def environment(self) -> Dict[str, Any]:
        """Of the last start or recovery. Empty if its line is lost."""
        starts = self.of_kind("start", "recover")
        return starts[-1].values if starts else {}

    @property
    def deepspeed_config(self) -> Dict[str, Any]:
        """As it was resolved."""
        return mapping(self.environment.get("deepspeed_config"))

    @property
    def final_metrics(self) -> Dict[str, Any]:
        """Of the last epoch that was completed, with those of the best one."""
        epochs = self.of_kind("epoch")
        return mapping(epochs[-1].values.get("metrics")) if epochs else {}

    @property
    def num_steps(self) -> int:
        """That have been completed, also where a checkpoint of before was the last to be told."""
        return max(line.values["step"] for line in self.lines)

    @property
    def state(self) -> str:
        """In a word."""
        if (self.directory / "model.tar.gz").exists():
            return "finished"
        last = _time(self.lines[-1].values)
        return "training" if last is not None and time.time() - last < _SILENCE else "stopped"

    def checkpoints(self) -> List[Checkpoint]:
        """Those that are on disk, the newest first. One that is being removed is left out."""
        directory = CheckpointDirectory(str(self.directory))
        found = []
        for point in directory.find():
            path = Path(directory.path(point))
            try:
                size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
                saved = path.lstat().st_mtime
            except FileNotFoundError:
                continue
            found.append(Checkpoint(path.name, point.epochs, point.steps, saved, size))
        return found

    def warnings(self) -> Dict[str, int]:
        """How often each was logged."""
        counts: Dict[str, int] = {}
        for line in self.of_kind("warning"):
            message = f"{line.values.get('logger', '')}: {line.values.get('message', '')}"
            counts[message] = counts.get(message, 0) + 1
        return counts


def named(directories: List[str]) -> List[Run]:
    """
    # Parameters

    directories : `List[str]`, required.

    # Returns

    `List[Run]`
        With names of their own: the last folder of the path, or the path if another has the same.

    # Raises

    `ConfigurationError`
        If one has no metrics, or is given twice.
    """
    resolved = [os.path.realpath(directory) for directory in directories]
    if len(set(resolved)) < len(resolved):
        raise ConfigurationError("A directory is given twice: leave one out.")
    runs = [Run(directory) for directory in directories]
    names = [run.name for run in runs]
    for run, directory in zip(runs, directories):
        if names.count(run.name) > 1:
            run.name = directory
    return runs


def mapping(value: Any) -> Dict[str, Any]:
    """The value if it is an object, else an empty one: anything may be in a metrics file."""
    return value if isinstance(value, dict) else {}


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number that a float can hold."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def flattened(config: Any, path: str = "") -> Dict[str, str]:
    """The values of a config by their paths, such as "trainer.optimizer.lr", as JSON."""
    if isinstance(config, dict) and config:
        parts = [(f"{path}.{key}" if path else str(key), value) for key, value in config.items()]
    elif isinstance(config, list) and any(isinstance(item, (dict, list)) for item in config):
        parts = [(f"{path}.{index}", value) for index, value in enumerate(config)]
    else:
        return {path: json.dumps(config)}
    return {name: text for key, value in parts for name, text in flattened(value, key).items()}


def differences(configs: List[Dict[str, Any]]) -> Dict[str, List[Optional[str]]]:
    """
    # Parameters

    configs : `List[Dict[str, Any]]`, required.

    # Returns

    `Dict[str, List[Optional[str]]]`
        For each path that isn't the same in all of them, the value in each as JSON, `None` where it
        isn't given.
    """
    flat = [flattened(config) for config in configs]
    paths = dict.fromkeys(path for config in flat for path in config)
    values = {path: [config.get(path) for config in flat] for path in paths}
    return {path: found for path, found in values.items() if len(set(found)) > 1}


def _with_hours(lines: List[Dict[str, Any]]) -> List[Line]:
    result: List[Line] = []
    hours = 0.0
    before: Optional[float] = None
    for line in lines:
        now = _time(line)
        if now is not None:
            if before is not None and line["kind"] not in ("start", "recover"):
                hours += max(0.0, now - before) / 3600
            before = now
        result.append(Line(hours, line))
    return result


def _time(values: Dict[str, Any]) -> Optional[float]:
    """Seconds since 1970, `None` if it isn't told or can't be."""
    time = values.get("time")
    return float(time) if is_finite(time) and 0 <= time < _MAX_TIME else None


def _config(path: Path) -> Dict[str, Any]:
    """As AllenNLP has written it. Not as Jsonnet, which could put secrets into the page."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not JSON ({error}): it isn't as training has written it. Put it back, or "
            "remove it, and the report is without the config."
        ) from error
