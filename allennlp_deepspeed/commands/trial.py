"""
Trains a config for two steps in a temporary directory, as `allennlp train` does, with its own
workers.
"""

import json
import math
import os
import re
import resource
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, TextIO

import psutil
import torch
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Vocabulary
from allennlp.training.callbacks import TrainerCallback
from rich.filesize import decimal
from torch.multiprocessing import ProcessRaisedException
from typing_extensions import override

import allennlp_deepspeed
from allennlp_deepspeed.commands.estimate import only_warnings
from allennlp_deepspeed.engine.lifecycle.model_state_memory import ModelStates
from allennlp_deepspeed.launch import error_messages
from allennlp_deepspeed.launch.train_command import worker_devices
from allennlp_deepspeed.training.validation import HOW_TO_CONTINUE
from allennlp_deepspeed_import_hook import temporary_directory

NUM_STEPS = 2
"""The number of steps of a trial by default."""

_SECONDS_BETWEEN_LINES = 0.2

_EVENTS = "events.jsonl"

# Of the first loss.
_OVERFITTED = 0.1

_MOST_LOSSES = 10  # on a line

# The key that an error of a training is about, if the error doesn't name it.
_KEYS = {
    "for early stopping": "trainer.validation_metric",
    "(?i)nan loss|infinite gradients": "trainer.optimizer.lr",
    "out of memory": "data_loader.batch_size",
}

# Keys of 'distributed' that are about several nodes.
_OF_NODES = (
    "num_nodes",
    "primary_address",
    "primary_port",
)

# Names in the file of events.
_STARTED, _STEP, _VALIDATION, _EPOCH, _ENDED = "started", "step", "validation", "epoch", "ended"


class TrialCallback(TrainerCallback):
    """
    Writes what a training has reached, and when, into a file. Not registered: a trial adds it to
    the callbacks of the config.

    # Parameters

    serialization_dir : `str`, required.
    path : `str`, required.
        The file to which rank 0 appends a line of JSON for each event.
    """

    # The trainer needs not wait for the metrics of a step.
    reads_metrics = False

    def __init__(self, serialization_dir: str, path: str) -> None:
        super().__init__(serialization_dir)
        self._path = path
        self._validates = False

    @override
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        self._write(is_primary, _STARTED)

    @override
    def on_batch(  # type: ignore[override]
        self, trainer: Any, *args: Any, is_training: bool, is_primary: bool = True, **kwargs: Any
    ) -> None:
        if is_training:
            self._write(is_primary, _STEP)
        elif not self._validates:
            self._write(is_primary, _VALIDATION)
        self._validates = not is_training

    @override
    def on_epoch(  # type: ignore[override]
        self, trainer: Any, metrics: Dict[str, Any], *args: Any, is_primary: bool = True, **kw: Any
    ) -> None:
        values = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self._write(is_primary, _EPOCH, metrics=values)

    @override
    def on_end(  # type: ignore[override]
        self, trainer: Any, metrics: Any = None, *args: Any, is_primary: bool = True, **kwargs: Any
    ) -> None:
        if metrics is not None:  # not after an error
            self._write(is_primary, _ENDED, memory=peak_memory())

    def _write(self, is_primary: bool, name: str, **values: Any) -> None:
        if is_primary:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, "time": time.time(), **values}) + "\n")


def peak_memory() -> int:
    """Returns the peak of this process in bytes: on the GPU if it trains there."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Trial:
    """
    Training of some steps, a validation, a checkpoint, its resumption and the archive.

    # Parameters

    params : `Params`, required.
        A complete training configuration that has been checked. It is not changed.
    include_package : `List[str]`, required.
        The packages that workers import.
    instances_per_step : `int`, required.
        The number of instances of an optimizer step, over all workers.
    states : `ModelStates`, required.
        The estimated model states of a rank, for comparison with the peak.
    vocabulary : `Vocabulary`, optional (default = `None`)
        `None` for the vocabulary of the instances that the trial reads.
    num_steps : `int`, optional (default = `2`)
    """

    def __init__(
        self,
        params: Params,
        include_package: List[str],
        instances_per_step: int,
        states: ModelStates,
        vocabulary: Optional[Vocabulary] = None,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self._config: Dict[str, Any] = deepcopy(params.as_dict(quiet=True))
        self._include_package = include_package
        self._instances_per_step = instances_per_step
        self._num_steps = num_steps
        self._states = states
        self._vocabulary = vocabulary

    def run(self) -> None:
        """
        Trains, and prints a line for each stage.

        # Raises

        `ConfigurationError`
            If a stage fails, with its name and the error.
        """
        print(f"Trying {self._num_steps} steps in a temporary directory:", flush=True)
        with self._directory(self._num_steps) as directory:
            self._train(directory, num_epochs=1, recover=False)
            if self._config["trainer"].get("checkpointer", {}) is None:
                print_lines("resumption: none, because 'trainer.checkpointer' is null")
                return
            start = time.time()
            self._train(directory, num_epochs=2, recover=True)
            print_lines(f"resumption from the checkpoint, with another epoch: {_since(start)}")

    def overfit(self) -> None:
        """
        Trains with the same batch in each step, and prints its loss, which should go to 0.

        # Raises

        `ConfigurationError`
            If a stage fails, or the reader can't be limited to a batch.
        """
        print(f"Training {self._num_steps} steps with the same batch:", flush=True)
        trainer = self._config["trainer"]
        for key in ("validation_data_path", "test_data_path", "evaluate_on_test"):
            self._config.pop(key, None)
        if self._config.get("datasets_for_vocab_creation"):
            self._config["datasets_for_vocab_creation"] = ["train"]
        for key in (
            "learning_rate_scheduler",
            "momentum_scheduler",
            "validation_metric",
            "patience",
            "validate_every_num_batches",
        ):
            trainer.pop(key, None)
        trainer["checkpointer"] = None
        if isinstance(self._config["data_loader"], dict):
            self._config["data_loader"].pop("batches_per_epoch", None)
        with self._directory(1) as directory:
            if "max_instances" not in self._config["dataset_reader"]:
                raise ConfigurationError("--overfit needs a 'dataset_reader' with 'max_instances'.")
            self._train(directory, num_epochs=self._num_steps, recover=False, shows=False)
            events = _read(Path(directory) / _EVENTS)
        losses = [e["metrics"]["training_loss"] for e in events if e["name"] == _EPOCH]
        lines = [f"{i + 1}: {losses[i]:.4g}" for i in _shown(len(losses))]
        print_lines(f"loss by step: {', '.join(lines)}")
        if losses[-1] > _OVERFITTED * losses[0]:
            print_lines(
                f"the loss is above {_OVERFITTED:.0%} of the first: try more --steps, another "
                "'trainer.optimizer.lr', or look for labels that the inputs don't tell apart"
            )

    @contextmanager
    def _directory(self, num_steps: int) -> Iterator[str]:
        """Context manager that limits the config, and yields a temporary directory."""
        with only_warnings():
            limit(self._config, num_steps * self._instances_per_step)
        print_lines(*lacking_memory(self._config, self._states))
        with tempfile.TemporaryDirectory(dir=temporary_directory.path()) as directory:
            if self._vocabulary is not None:
                path = os.path.join(directory, "vocabulary")
                self._vocabulary.save_to_files(path)
                self._config["vocabulary"] = {"type": "from_files", "directory": path}
            yield directory

    def _train(
        self, directory: str, num_epochs: int, recover: bool, shows: Optional[bool] = None
    ) -> None:
        """Trains, and prints a line for each stage when it ends, unless that is a resumption."""
        path = Path(directory) / _EVENTS
        shows = not recover if shows is None else shows
        path.unlink(missing_ok=True)
        try:
            with (
                output_to(Path(directory) / "output.txt") as console,
                _printing(_Stages(path, self._states), console) if shows else nullcontext(),
            ):
                train_command.train_model(
                    Params(self._limited(str(path), num_epochs)),
                    os.path.join(directory, "training"),
                    recover=recover,
                    include_package=self._include_package,
                )
        except Exception as error:
            stage = "resumption" if recover else _stage(_read(path))
            why = reason(error)
            key = next((key for pattern, key in _KEYS.items() if re.search(pattern, why)), None)
            why += f" (see '{key}')" if key is not None and key not in why else ""
            raise ConfigurationError(f"The trial failed in its {stage}: {why}") from error

    def _limited(self, path: str, num_epochs: int) -> Dict[str, Any]:
        """Returns the config with few epochs and the callback."""
        config = json.loads(json.dumps(self._config))
        trainer = config["trainer"]
        trainer["num_epochs"] = num_epochs
        callback = {"type": f"{__name__}.{TrialCallback.__name__}", "path": path}
        trainer["callbacks"] = [*(trainer.get("callbacks") or []), callback]
        return config


def limit(config: Dict[str, Any], num_instances: int) -> None:
    """
    Limits the instances of a config to those of some steps, and the nodes to this one, and prints
    what it has limited, or couldn't.

    # Parameters

    config : `Dict[str, Any]`, required.
        It is changed in place.
    num_instances : `int`, required.
        The number of instances of the steps, over all workers of all nodes.
    """
    distributed = config.get("distributed") or {}
    num_nodes = distributed.get("num_nodes", 1)
    if num_nodes > 1:
        print_lines(f"with the workers of one node, of {num_nodes}")
        num_instances //= num_nodes
        for key in _OF_NODES:
            distributed.pop(key, None)
    for name in ("dataset_reader", "validation_dataset_reader"):
        section = config.get(name)
        if section is None:
            continue
        section = {"type": section} if isinstance(section, str) else section
        limits = [section.get("max_instances"), num_instances]
        limited = {**section, "max_instances": min(n for n in limits if n is not None)}
        if _is_reader(limited):
            config[name] = limited
        else:
            print_lines(f"'{name}' has no 'max_instances': an epoch has all instances of its files")


def lacking_memory(config: Dict[str, Any], states: ModelStates) -> List[str]:
    """
    Compares the model states of a rank with the memory of the devices that this machine has.

    # Returns

    `List[str]`
        A sentence for each device with too little memory.
    """
    lines: List[str] = []
    devices = worker_devices(config)
    num_workers = len(devices) // (config.get("distributed") or {}).get("num_nodes", 1)
    is_on_cpu = all(device < 0 for device in devices)
    needed = num_workers * (states.cpu.total + (states.gpu.total if is_on_cpu else 0))
    free = psutil.virtual_memory().available
    if needed > free:
        lines.append(
            f"'estimate' counts {decimal(needed)} of model states for {num_workers} workers, and "
            f"{decimal(free)} of CPU memory are free: the system may kill it"
        )
    for device in sorted({device for device in devices if 0 <= device < torch.cuda.device_count()}):
        has = torch.cuda.get_device_properties(device).total_memory
        if states.gpu.total > has:
            lines.append(
                f"'estimate' counts {decimal(states.gpu.total)} of model states for a worker, and "
                f"GPU {device} has {decimal(has)}"
            )
    return lines


def _shown(count: int) -> List[int]:
    """Returns up to ten indices, with the first and the last."""
    step = max(1, math.ceil(count / (_MOST_LOSSES - 1)))
    return sorted({*range(0, count, step), count - 1})


class _Stages:
    """
    Lines of the stages of a training that have ended, by the events that it has written.

    # Parameters

    path : `Path`
        The file of events.
    states : `ModelStates`
        The estimated model states of a rank.
    """

    def __init__(self, path: Path, states: ModelStates) -> None:
        self._path = path
        self._states = states
        self._num_read = 0
        self._num_steps, self._seconds_of_steps = 0, 0.0
        self._time = time.time()
        self._memory: Optional[int] = None

    def new_lines(self, has_ended: bool = False) -> List[str]:
        """Returns the lines since the last call."""
        events = _read(self._path)[self._num_read :]
        self._num_read += len(events)
        lines = [line for event in events for line in self._lines(event)]
        if has_ended and self._memory is not None:
            states = self._states.gpu.total + self._states.cpu.total
            lines += [
                f"evaluation and archive: {_since(self._time)}",
                f"peak memory of rank 0: {decimal(self._memory)} ('estimate' counts "
                f"{decimal(states)} of model states and buffers)",
            ]
        return lines

    def _lines(self, event: Dict[str, Any]) -> Iterator[str]:
        name, since = event["name"], self._time
        self._time = event["time"]
        seconds = _seconds(self._time - since)
        if name == _STARTED:
            yield f"data, model and engine: {seconds}"
        elif name == _STEP:
            self._num_steps += 1
            self._seconds_of_steps += self._time - since
            if self._num_steps == 1:
                yield f"first training step: {seconds}"
        elif name == _EPOCH:
            metrics = ", ".join(
                f"{name} {value:.4g}"
                for name, value in event["metrics"].items()
                if name.startswith(("training_", "validation_")) and "memory" not in name
            )
            yield f"{self._num_steps} training steps: {_seconds(self._seconds_of_steps)}"
            yield f"validation: {seconds} ({metrics})"
        elif name == _ENDED:
            self._memory = event["memory"]
            yield f"checkpoint: {seconds}"


@contextmanager
def _printing(stages: _Stages, console: TextIO) -> Iterator[None]:
    """Context manager that prints the lines of stages on a console while a training goes on."""
    has_ended = threading.Event()

    def follow() -> None:
        while not has_ended.wait(_SECONDS_BETWEEN_LINES):
            print_lines(*stages.new_lines(), file=console)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        has_ended.set()
        thread.join()
        print_lines(*stages.new_lines(is_whole), file=console)


def print_lines(*lines: str, file: Optional[TextIO] = None) -> None:
    """Prints lines below the one that says what is being done."""
    for line in lines:
        print(f"  {line}", file=file, flush=True)


def _is_reader(section: Dict[str, Any]) -> bool:
    """Returns whether a reader, which can be constructed without a limit, takes one."""
    try:
        DatasetReader.from_params(Params(json.loads(json.dumps(section))))
    except (ConfigurationError, TypeError):
        return False
    return True


def _read(path: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _stage(events: List[Dict[str, Any]]) -> str:
    """Returns the stage after the last event."""
    names = [event["name"] for event in events]
    num_steps = names.count(_STEP)
    return {
        None: "construction of data, model and engine",
        _STARTED: "first training step",
        _STEP: "second training step" if num_steps == 1 else "training or validation",
        _VALIDATION: "validation",
        _EPOCH: "checkpoint",
        _ENDED: "evaluation or archive",
    }[names[-1] if names else None]


def reason(error: BaseException) -> str:
    """Returns why a training in a temporary directory, which is removed, has failed."""
    # That of a worker of AllenNLP's has the traceback as its message.
    is_of_worker = isinstance(error, ProcessRaisedException)
    text = in_a_line(str(error) if is_of_worker else error_messages.explanation(error))
    return re.sub(r"\s*\(Full traceback: .*?\)", "", text).partition(HOW_TO_CONTINUE)[0]


_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)', re.MULTILINE)


def in_a_line(text: str) -> str:
    """Returns the error of a traceback, and the last line of the user's code in it."""
    frames = list(_FRAME.finditer(text))
    if not frames:
        return text
    # A process of a data loader has the traceback indented.
    indent = max(1, frames[-1].group(0).index("F"))
    lines = text[frames[-1].end() :].splitlines()
    error = next((line.strip() for line in lines if line[:indent].strip()), text)
    packages = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    packages.append(os.path.dirname(allennlp_deepspeed.__file__))
    own = [frame for frame in frames if not frame.group(1).startswith(tuple(packages))]
    if not own:
        return error
    path, line, function = own[-1].groups()
    return f"{error} ({path}, line {line}, in {function})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _since(start: float) -> str:
    return _seconds(time.time() - start)


@contextmanager
def output_to(path: Path) -> Iterator[TextIO]:
    """
    Context manager in which this process and those that it starts print into a file. Yields what
    still prints where they did before.
    """
    saved = [os.dup(1), os.dup(2)]
    with open(path, "ab") as file:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), number)
    try:
        with open(os.dup(saved[0]), "w", encoding=sys.stdout.encoding) as console:
            yield console
    finally:
        for stream, number, descriptor in ((sys.stdout, 1, saved[0]), (sys.stderr, 2, saved[1])):
            stream.flush()
            os.dup2(descriptor, number)
            os.close(descriptor)
