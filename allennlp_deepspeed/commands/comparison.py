"""
Trains a config for some steps with its own trainer and with AllenNLP's "gradient_descent", from the
same weights and with the same batches, and compares what each step leaves.
"""

import inspect
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional, Tuple

import torch
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.plugins import import_plugins
from allennlp.common.util import import_module_and_submodules
from allennlp.data import Vocabulary
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.callbacks.log_writer import LogWriterCallback
from rich.filesize import decimal
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from allennlp_deepspeed.commands.estimate import only_warnings
from allennlp_deepspeed.commands.recording import LOSS, NORM, RecordingCallback
from allennlp_deepspeed.commands.trial import limit, output_to, print_lines, reason
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.precision import PRECISIONS
from allennlp_deepspeed.config.schema_validation import AUTO
from allennlp_deepspeed.config.settings import registered_name
from allennlp_deepspeed.launch import agent
from allennlp_deepspeed.launch.train_command import worker_devices
from allennlp_deepspeed_import_hook import fork_server, temporary_directory

_REFERENCE = "gradient_descent"

# The files of the three trainings.
_OWN, _PLAIN, _PERTURBED = "own", "plain", "perturbed"

# By how much weights are perturbed: the rounding of fp32.
_NOISE = 1e-7

# How many times as large as in the perturbed training a difference by rounding may be.
_FACTOR = 30

_SMALLEST = torch.finfo(torch.float32).tiny

# Sections of DeepSpeed's configuration, and AllenNLP's keys for the same.
_COUNTERPARTS = {"optimizer": "optimizer", "scheduler": "learning_rate_scheduler"}


class Comparison:
    """
    Three short trainings: with the config's trainer, with "gradient_descent", and with this one
    from weights that are perturbed, which shows what differences rounding leads to.

    # Parameters

    params : `Params`, required.
        A complete training configuration that has been checked. It is not changed.
    include_package : `List[str]`, required.
        The packages that workers import.
    resolved : `Dict[str, Any]`, required.
        Its resolved DeepSpeed configuration.
    num_steps : `int`, required.
    vocabulary : `Vocabulary`, optional (default = `None`)
        `None` for the vocabulary of the instances that are read.
    """

    def __init__(
        self,
        params: Params,
        include_package: List[str],
        resolved: Dict[str, Any],
        num_steps: int,
        vocabulary: Optional[Vocabulary] = None,
    ) -> None:
        self._config: Dict[str, Any] = deepcopy(params.as_dict(quiet=True))
        self._include_package = include_package
        self._resolved = resolved
        self._num_steps = num_steps
        self._vocabulary = vocabulary
        steps = resolved["gradient_accumulation_steps"]
        # "auto" divides a batch within the trainer.
        self._num_micro_batches = 1 if steps == AUTO else int(steps)
        # In half precision rounding would hide faults.
        self._precisions = [key for key in PRECISIONS if resolved.get(key, {}).get("enabled")]
        self._left_out: List[str] = []
        self._callbacks_left_out: List[str] = []
        self._devices: List[int] = []
        # Those that read different data: the ranks of a sequence read the same.
        self._ranks: List[int] = []

    def run(self) -> bool:
        """
        Trains, and prints a table of the steps and a verdict.

        # Returns

        `bool`
            Whether the trainings are the same to rounding.

        # Raises

        `ConfigurationError`
            If a training fails, with its name and the error.
        """
        for key, counterpart in _COUNTERPARTS.items():
            if key in self._resolved:
                raise ConfigurationError(
                    f"'trainer.deepspeed_config.{key}' has no counterpart in '{_REFERENCE}': to "
                    f"compare, write 'trainer.{counterpart}' instead."
                )
        print(f'Comparing {self._num_steps} steps with "{_REFERENCE}":', flush=True)
        with only_warnings():
            limit(self._config, self._num_steps * self._resolved["train_batch_size"])
        with tempfile.TemporaryDirectory(dir=temporary_directory.path()) as directory:
            if self._vocabulary is not None:
                path = os.path.join(directory, "vocabulary")
                self._vocabulary.save_to_files(path)
                self._config["vocabulary"] = {"type": "from_files", "directory": path}
            self._devices = worker_devices(self._config)
            size = self._config["trainer"].get("sequence_parallel_size", 1)
            self._ranks = list(range(0, len(self._devices), size))
            config = self._comparable()
            self._train(directory, _OWN, "with the config's trainer", config)
            # Several workers, or if these fail one process.
            for num_workers in sorted({len(self._ranks), 1}, reverse=True):
                where = f"in {num_workers} workers (DDP)" if num_workers > 1 else "in one process"
                name = f'with "{_REFERENCE}" {where}'
                reference = self._reference(config, num_workers)
                try:
                    self._train(directory, _PLAIN, name, reference)
                    break
                except ConfigurationError as error:
                    if num_workers == 1:
                        raise
                    print_lines(error.message)
            perturbed = f"{name} from weights perturbed by {_NOISE:.0e}"
            self._train(directory, _PERTURBED, perturbed, reference, _NOISE)
            print_lines(*self._notes(Path(directory)))
            return _print_table(Path(directory), self._num_steps)

    def _comparable(self) -> Dict[str, Any]:
        """Returns the config without what isn't compared."""
        config = {**self._config, "trainer": {**self._config["trainer"], "checkpointer": None}}
        config.pop("evaluate_on_test", None)
        trainer = config["trainer"]
        trainer.pop("resume", None)
        if not self._resolved.get("gradient_clipping"):
            trainer["grad_norm"] = True  # for the norm
        trainer["callbacks"] = self._comparable_callbacks(trainer.get("callbacks") or [])
        if self._precisions:
            trainer["deepspeed_config"] = {
                key: value
                for key, value in DeepSpeedConfig.from_value(
                    trainer.get("deepspeed_config")
                ).config.items()
                if key not in PRECISIONS
            }
            for key in ("use_amp", "half_precision_autocast"):
                trainer.pop(key, None)
        return config

    def _reference(self, config: Dict[str, Any], num_workers: int) -> Dict[str, Any]:
        """
        Returns the config for "gradient_descent", and collects what that trainer doesn't know. A
        single process trains with the batches of all workers.
        """
        known = inspect.signature(GradientDescentTrainer.from_partial_objects).parameters
        trainer = {key: value for key, value in config["trainer"].items() if key in known}
        distributed = config.get("distributed") or {}
        self._left_out = [
            *self._callbacks_left_out,
            *(f"trainer.{key}" for key in config["trainer"] if key not in {"type", *trainer}),
            *(f"distributed.{key}" for key in distributed if key != "cuda_devices"),
        ]
        config = {k: v for k, v in config.items() if k != "distributed"}
        if config.get("type") == "deepspeed":
            del config["type"]
            self._left_out.append("type")
        trainer["type"] = _REFERENCE
        trainer["grad_norm"] = self._resolved.get("gradient_clipping") or True
        num_batches = self._num_micro_batches * len(self._ranks)
        trainer["num_gradient_accumulation_steps"] = num_batches // num_workers
        if num_workers > 1:
            config["distributed"] = {
                "cuda_devices": [self._devices[rank] for rank in self._ranks],
                "ddp_accelerator": {"type": "torch", "find_unused_parameters": True},
            }
        else:
            trainer["cuda_device"] = self._devices[0]
        # Schedules read the number of steps of an epoch from it.
        loader = dict(config["data_loader"])
        if loader.get("batches_per_epoch"):
            loader["batches_per_epoch"] *= len(self._ranks) // num_workers
        return {**config, "trainer": trainer, "data_loader": loader}

    def _comparable_callbacks(self, callbacks: List[Any]) -> List[Any]:
        """
        Returns the callbacks without those that write each training to a file or a service, and
        those of this package, which need its trainer.
        """
        package = __name__.partition(".")[0]
        comparable, self._callbacks_left_out = [], []
        for callback in callbacks:
            name = str(registered_name(callback))
            kind: Any = TrainerCallback.by_name(name)
            if issubclass(kind, LogWriterCallback) or kind.__module__.startswith(f"{package}."):
                self._callbacks_left_out.append(f"the callback {name}")
            else:
                comparable.append(callback)
        return comparable

    def _train(
        self, directory: str, run: str, name: str, config: Dict[str, Any], noise: float = 0
    ) -> None:
        """
        Trains in a process of its own, which has no memory and no random state of another run.

        # Raises

        `ConfigurationError`
            If it fails.
        """
        start = time.time()
        callback = {
            "type": f"{RecordingCallback.__module__}.{RecordingCallback.__name__}",
            "directory": directory,
            "run": run,
            "is_first": run == _OWN,
            "num_batches": self._num_steps * self._num_micro_batches,
            "ranks": self._ranks,
            "noise": noise,
        }
        trainer = {**config["trainer"], "callbacks": [*config["trainer"]["callbacks"], callback]}
        config = json.loads(json.dumps({**config, "trainer": trainer}))
        arguments = (config, directory, run, self._include_package, dict(os.environ))
        if agent.START_METHOD == "forkserver":
            fork_server.ensure_running()
        with fork_server.forking_workers():
            context: Any = multiprocessing.get_context(agent.START_METHOD)
            process = context.Process(target=_train_in_process, args=arguments)
            process.start()
        try:
            process.join()
        finally:
            # Its workers, too, which it can't end when it is killed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        if process.exitcode != 0:
            error = Path(directory) / f"{run}_error.txt"
            cause = error.read_text() if error.exists() else f"exit code {process.exitcode}"
            raise ConfigurationError(f"The training {name} failed: {cause}")
        print_lines(f"trained {name}: {time.time() - start:.1f} s")

    def _notes(self, directory: Path) -> List[str]:
        """Returns what differs between the trainings for a reason, and what was made equal."""
        end = _read(directory, _PLAIN, "end")
        notes = []
        if self._precisions:
            notes.append(f"left out: {self._precisions[0]}, whose rounding hides faults")
        if self._left_out:
            notes.append(f'left out for "{_REFERENCE}": {", ".join(self._left_out)}')
        if end["num_dropouts"]:
            notes.append(f"dropout is turned off in {end['num_dropouts']} modules")
        if end["draws"]:
            notes.append("the model draws random numbers, from the same seed for each batch")
        num_batches = self._num_micro_batches * len(self._ranks)
        is_auto = self._resolved["gradient_accumulation_steps"] == AUTO
        if num_batches > 1 and (end["averages_over_tokens"] or is_auto):
            terms = "tokens" if end["averages_over_tokens"] else "instances"
            notes.append(
                f"the loss is the mean over the {terms} of all micro-batches and workers, and with "
                f'"{_REFERENCE}" the mean of their means: these differ if the numbers of {terms} do'
            )
        if end["unused"]:
            names = [*end["unused"][:3], *["..."][: max(0, len(end["unused"]) - 3)]]
            notes.append(
                f"a step doesn't use {', '.join(names)}: from ZeRO stage 1 on, momentum and weight "
                "decay change a parameter in such a step, too"
            )
        return notes


def _train_in_process(
    config: Dict[str, Any],
    directory: str,
    run: str,
    include_package: List[str],
    environment: Dict[str, str],
) -> None:
    """Trains in this process, which prints into a file, and writes why it fails into another."""
    os.setpgrp()
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # when the command is killed
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    path = os.path.join(directory, run)
    with output_to(Path(f"{path}_output.txt")):
        try:
            import_plugins()
            for package in include_package:
                import_module_and_submodules(package)
            train_command.train_model(
                Params(config), path, force=True, include_package=include_package
            )
        except Exception as error:
            Path(f"{path}_error.txt").write_text(reason(error))
            sys.exit(1)


def _print_table(directory: Path, num_steps: int) -> bool:
    """
    Prints the differences of each step, and the verdict. Returns whether they are of rounding.
    """
    ends = [_read(directory, run, "end") for run in (_PLAIN, _OWN)]
    starts = [_read(directory, run, 0)["values"] for run in (_PLAIN, _PERTURBED)]
    # The weights were perturbed: what counts is how much else they have changed.
    offsets = {name: starts[1][name] - start for name, start in starts[0].items()}
    columns = f"{_REFERENCE:>18}{'deepspeed':>12}"
    print(f"{'':6}{LOSS:>30}{NORM:>30}   largest difference of weights")
    print(f"{'step':>6}{columns * 2}   {'(perturbed)':>18}")
    seconds: List[List[float]] = []
    # The largest and the mean of elements: the largest may be that of an element whose gradient is
    # rounding, of which Adam makes a whole step.
    noise: Dict[str, float] = {}
    mean_noise: Dict[str, float] = {}
    verdict = None
    for step in range(1, num_steps + 1):
        read = [_read(directory, run, step) for run in (_PLAIN, _OWN, _PERTURBED)]
        seconds.append([each["seconds"] for each in read])
        plain, own, perturbed = (each["values"] for each in read)
        weights = [name for name in plain if name not in (LOSS, NORM)]
        differences: Dict[str, float] = {}
        means: Dict[str, float] = {}
        ratios: Dict[str, float] = {}
        for name, expected in plain.items():
            shifted = perturbed[name] - offsets.get(name, 0)
            largest_noise, mean = _difference(shifted, expected)
            if math.isfinite(largest_noise):
                noise[name] = max(noise.get(name, 0), largest_noise)
                mean_noise[name] = max(mean_noise.get(name, 0), mean)
            differences[name], means[name] = _difference(own[name], expected)
        for found, of_noise in ((differences, noise), (means, mean_noise)):
            # A parameter may have no noise by chance.
            common = median(of_noise.get(name, 0) for name in weights)
            for name, expected in plain.items():
                finite = expected[expected.isfinite()].abs()
                rounding = 4 * torch.finfo(torch.float32).eps * _largest(finite)
                allowed = _FACTOR * max(of_noise.get(name, 0), common * (name in weights))
                ratio = found[name] / max(allowed + rounding, _SMALLEST)
                ratios[name] = max(ratios.get(name, 0), ratio)
        largest = max(weights, key=differences.__getitem__)
        numbers = [
            f"{values[name].item():>{width}.6g}"
            for name in (LOSS, NORM)
            for values, width in ((plain, 18), (own, 12))
        ]
        print(
            f"{step:>6}{''.join(numbers)}   {differences[largest]:.1e} "
            f"({noise.get(largest, math.inf):.1e}) "
            f"{largest}"
        )
        wrong = [name for name in weights if ratios[name] > 1] or [
            name for name in (LOSS, NORM) if ratios[name] > 1
        ]
        if wrong and verdict is None:
            first = max(wrong, key=ratios.__getitem__)
            verdict = (
                f"Differs from step {step} on, first in {first}: by {differences[first]:.1e}, "
                f"and by {noise.get(first, math.inf):.1e} if weights are perturbed."
            )
    times = [f"{median(of_run):.3g} s" for of_run in list(zip(*seconds[1:] or seconds))[:2]]
    # Own ones are those of rank 0. One process draws those of all ranks.
    draws, own_draws = (end["draws"] for end in ends)
    is_random = bool(draws) != bool(own_draws) or not own_draws.items() <= draws.items()
    if verdict and is_random:
        verdict = (
            "No verdict: the model draws other random numbers in each training. Turn its random "
            f"layers off to compare. {verdict}"
        )
    memory = [decimal(end["memory"]) for end in ends]
    print(
        f"A step takes {times[0]} and {times[1]}, rank 0 at most {memory[0]} and {memory[1]}.",
        verdict or f"Same to rounding in {num_steps} steps.",
        sep="\n",
    )
    return verdict is None


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _difference(first: torch.Tensor, second: torch.Tensor) -> Tuple[float, float]:
    """
    Returns the largest and the mean difference of elements. Those that are NaN in both are equal.
    """
    are_equal = (first == second) | (first.isnan() & second.isnan())
    difference = torch.where(are_equal, 0.0, (first - second).abs().double())
    difference = difference.nan_to_num(nan=math.inf, posinf=math.inf)
    return float(difference.max()), float(difference.mean())


def _read(directory: Path, run: str, name: Any) -> Dict[str, Any]:
    recorded: Dict[str, Any] = torch.load(directory / f"{run}_{name}.pt", weights_only=True)
    return recorded
