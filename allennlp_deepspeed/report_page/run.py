import json
import math
import os
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, TypeGuard

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.config.json_types import is_number
from allennlp_deepspeed.reports import metrics_file

# Seconds without a line after which a run without an archive counts as stopped.
_SILENCE = 120.0

# Validations whose completions are shown.
_MAX_VALIDATIONS = 10

_MAX_TIME = 1e11  # seconds since 1970


class Line(NamedTuple):
    """
    A line of a metrics file.

    # Parameters

    hours : `float`
        The hours that the run had trained at this line, without the time between a crash and the
        recovery.
    values : `Dict[str, Any]`
        The values in the file.
    """

    hours: float
    values: Dict[str, Any]


class Checkpoint(NamedTuple):
    """
    Checkpoint of a run.

    # Parameters

    name : `str`
    epochs : `int`
        The number of completed epochs.
    steps : `int`
        The optimizer steps completed in the epoch after them.
    saved : `float`
        The time of saving, in seconds since 1970.
    num_bytes : `int`
    """

    name: str
    epochs: int
    steps: int
    saved: float
    num_bytes: int


class Run:
    """
    Metrics, config and checkpoints of a training, also while it runs.

    # Parameters

    directory : `str`, required.

    # Raises

    `ConfigurationError`
        If there is no `metrics.jsonl` in the directory, or it has no lines.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        path = self.directory / metrics_file.FILE_NAME
        if not self._has(path):
            raise ConfigurationError(
                f"There is no {metrics_file.FILE_NAME} in {directory}: pass the serialization "
                "directory of a training with the 'deepspeed' trainer, which writes that file."
            )
        self.lines = _with_hours(list(metrics_file.read(str(path))))
        if not self.lines:
            raise ConfigurationError(
                f"{path} is empty: its first lines are written after the first optimizer steps."
            )
        self.name = self.directory.resolve().name
        self.config = self._json("config.json")

    def _has(self, path: Path) -> bool:
        """
        Returns whether a file exists.

        # Raises

        `ConfigurationError`
            If it is a link to a file outside of the directory, which isn't of this run.
        """
        if path.is_file() and not path.resolve().is_relative_to(self.directory.resolve()):
            raise ConfigurationError(
                f"{path} is a symbolic link to {path.resolve()}, outside {self.directory}: copy "
                "the file there."
            )
        return path.is_file()

    def _json(self, name: str) -> Any:
        path = self.directory / name
        return _read_json(path) if self._has(path) else {}

    def lines_of_kind(self, *kinds: str) -> List[Line]:
        """Returns the lines of these kinds, in the order in which they were written."""
        return [line for line in self.lines if line.values["kind"] in kinds]

    @property
    def environment(self) -> Dict[str, Any]:
        """The environment of the last start or recovery. Empty if its line is lost."""
        starts = self.lines_of_kind("start", "recover")
        return starts[-1].values if starts else {}

    @property
    def deepspeed_config(self) -> Dict[str, Any]:
        """The resolved DeepSpeed configuration."""
        return mapping(self.environment.get("deepspeed_config"))

    @property
    def final_metrics(self) -> Dict[str, Any]:
        """The metrics of the last completed epoch, including those of the best one."""
        epochs = self.lines_of_kind("epoch")
        return mapping(epochs[-1].values.get("metrics")) if epochs else {}

    @property
    def test_metrics(self) -> Dict[str, Any]:
        """The metrics of the test set, if the training has evaluated it."""
        metrics = mapping(self._json("metrics.json"))
        return {key: value for key, value in metrics.items() if key.startswith("test_")}

    @property
    def num_steps(self) -> int:
        """
        The number of completed optimizer steps, the maximum over all lines: a checkpoint's line may
        be written late.
        """
        return max(line.values["step"] for line in self.lines)

    @property
    def state(self) -> str:
        """The state of the run: "finished", "training" or "stopped"."""
        if (self.directory / "model.tar.gz").exists():
            return "finished"
        last = _time(self.lines[-1].values)
        return "training" if last is not None and time.time() - last < _SILENCE else "stopped"

    def checkpoints(self) -> List[Checkpoint]:
        """
        Returns the checkpoints on disk, the newest first. One that is being removed is left out.
        """
        directory = CheckpointDirectory(str(self.directory))
        found = []
        for point in directory.list_checkpoints():
            path = Path(directory.path(point))
            try:
                size = 0 if path.is_symlink() else _size(path)  # a link may lead anywhere
                saved = path.lstat().st_mtime
            except FileNotFoundError:
                continue
            found.append(Checkpoint(path.name, point.epochs, point.steps, saved, size))
        return found

    def completions(self) -> Dict[str, List[Dict[str, Any]]]:
        """Returns the completions of the last validations by a title, the newest first."""
        return {
            f"epoch {line.values['epoch'] + 1}, step {line.values['step']}": [
                mapping(completion) for completion in _list(line.values.get("completions"))
            ]
            for line in self.lines_of_kind("completions")[: -_MAX_VALIDATIONS - 1 : -1]
        }

    def warnings(self) -> Dict[str, int]:
        """Returns how often each warning was logged."""
        counts: Dict[str, int] = {}
        for line in self.lines_of_kind("warning"):
            message = f"{line.values.get('logger', '')}: {line.values.get('message', '')}"
            counts[message] = counts.get(message, 0) + 1
        return counts


def _size(directory: Path) -> int:
    """Returns the bytes of all files in a directory, without those that links lead to."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(directory)
        for name in names
    )


def load_runs(directories: List[str]) -> List[Run]:
    """
    Loads runs, and gives them distinct names.

    # Parameters

    directories : `List[str]`, required.

    # Returns

    `List[Run]`
        The runs. A name is the last directory of the path, or the path if another run has the same
        one.

    # Raises

    `ConfigurationError`
        If a directory has no metrics, or is given twice.
    """
    resolved = [os.path.realpath(directory) for directory in directories]
    if len(set(resolved)) < len(resolved):
        raise ConfigurationError("A directory is passed twice: remove one.")
    runs = [Run(directory) for directory in directories]
    names = [run.name for run in runs]
    for run, directory in zip(runs, directories):
        if names.count(run.name) > 1:
            run.name = directory
    return runs


def mapping(value: Any) -> Dict[str, Any]:
    """
    Returns the value if it is an object, else an empty one: a metrics file may contain anything.
    """
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []


def is_finite(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a finite number in the range of a float."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def flattened(config: Any, path: str = "") -> Dict[str, str]:
    """Returns the values of a config as JSON, by path, such as "trainer.optimizer.lr"."""
    if isinstance(config, dict) and config:
        parts = [(f"{path}.{key}" if path else str(key), value) for key, value in config.items()]
    elif isinstance(config, list) and any(isinstance(item, (dict, list)) for item in config):
        parts = [(f"{path}.{index}", value) for index, value in enumerate(config)]
    else:
        return {path: json.dumps(config)}
    return {name: text for key, value in parts for name, text in flattened(value, key).items()}


def differences(configs: List[Dict[str, Any]]) -> Dict[str, List[Optional[str]]]:
    """
    Compares configs.

    # Parameters

    configs : `List[Dict[str, Any]]`, required.

    # Returns

    `Dict[str, List[Optional[str]]]`
        The values of each path that differs between configs, as JSON, `None` if unset.
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
    """Returns the time of a line in seconds since 1970, `None` if it is missing or invalid."""
    time = values.get("time")
    return float(time) if is_finite(time) and 0 <= time < _MAX_TIME else None


def _read_json(path: Path) -> Any:
    """Reads a config or metrics as AllenNLP has written them."""
    try:
        # As Jsonnet, it could add secrets to the page.
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not valid JSON ({error}): restore the file, or remove it for a report "
            "without it."
        ) from error
