"""
The largest GPT-style model that trains on one GPU, with `gradient_descent` and with each preset.

Looks for the largest number of layers with which `allennlp train` makes some steps, first by
doubling, then by bisection. Each trial is a process of its own. Writes a table to
`benchmarks/results`, after each contender. Needs a GPU, and takes some hours: `--contenders` names
fewer, and `--time-limit` ends trials that are slow, such as those with NVMe.

`gradient_descent` trains in fp32, and once more with `use_amp`; the presets in bf16. Offload takes
the memory of the machine, and the `zero_3_nvme` preset files in the folder for temporary files
(`TMPDIR`).
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import psutil
import torch
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from benchmarks.contenders import causal_language_model  # noqa: F401  (registers the model)
from benchmarks.harness import report

NUM_STEPS = 3
VOCAB_SIZE = 50_257
_OUTCOME_NAME = "outcome.json"

# What processes say that have no memory left, on the GPU, in the machine or on its disk.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "no space left on device",
)
_KILLED = (-9, 137)  # by the kernel, for want of memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = list(contenders())
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128, help="in the text of a step")
    parser.add_argument("--start-layers", type=int, default=16, help="the first that are tried")
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative, of the layers")
    parser.add_argument("--time-limit", type=float, default=900, help="of a trial, in seconds")
    parser.add_argument("--cuda-device", type=int, default=0)


def run(settings: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("This needs a GPU, and PyTorch sees none on this machine.")
    data: Dict[str, Any] = {
        **report.heading(1),
        "gpu_memory": torch.cuda.get_device_properties(settings.cuda_device).total_memory,
        "cpu_memory": psutil.virtual_memory().total,
        "width": settings.width,
        "num_tokens": settings.tokens,
        "rows": [],
    }
    for name in settings.contenders:
        data["rows"].append(measure(name, contenders()[name], settings))
        report.write(settings.output, "largest_model", data, text(data))
    report.show(text(data))


class Size(NamedTuple):
    """
    # Parameters

    width : `int`
        Of the representation of a token.
    num_tokens : `int`
        In the one text of a batch.
    num_layers : `int`
    """

    width: int
    num_tokens: int
    num_layers: int

    @property
    def num_parameters(self) -> int:
        layer = 12 * self.width**2 + 13 * self.width
        return self.num_layers * layer + (VOCAB_SIZE + self.num_tokens + 2) * self.width


class Outcome(NamedTuple):
    """
    # Parameters

    trains : `bool`
    reason : `str`
        Why not.
    peak_memory : `int`, optional
        Bytes of the GPU's memory.
    seconds_per_step : `float`, optional
        Of the last step.
    """

    trains: bool
    reason: str = ""
    peak_memory: Optional[int] = None
    seconds_per_step: Optional[float] = None


@TrainerCallback.register("stop_after_steps")
class StopAfterSteps(TrainerCallback):
    """Writes what a training has needed and ends it, before it writes the weights anywhere."""

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._start = time.perf_counter()

    @override
    def on_batch(
        self,
        trainer,
        batch_inputs: List[Any],
        batch_outputs: List[Dict[str, Any]],
        batch_metrics: Dict[str, Any],
        epoch: int,
        batch_number: int,
        is_training: bool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        is_on_gpu = torch.cuda.is_available()
        if is_on_gpu:
            torch.cuda.synchronize()
        if batch_number == NUM_STEPS:
            outcome = Outcome(
                trains=True,
                peak_memory=torch.cuda.max_memory_reserved() if is_on_gpu else None,
                seconds_per_step=time.perf_counter() - self._start,
            )
            path = Path(self.serialization_dir) / _OUTCOME_NAME
            path.write_text(json.dumps(outcome._asdict()))
            os._exit(0)
        self._start = time.perf_counter()


def contenders() -> Dict[str, Dict[str, Any]]:
    """What the trainer's section of the config has, by the name in the table."""
    presets = [name for name in DeepSpeedConfig.list_available() if name != "ds_config"]
    return {
        "gradient_descent": {"type": "gradient_descent"},
        "gradient_descent, use_amp": {"type": "gradient_descent", "use_amp": True},
        **{
            name: {
                "type": "deepspeed",
                "deepspeed_config": {"type": name, "bf16": {"enabled": True}},
            }
            for name in presets
        },
    }


def config(trainer: Dict[str, Any], size: Size, cuda_device: int) -> Dict[str, Any]:
    """A training configuration."""
    values: Dict[str, Any] = {
        "dataset_reader": {
            "type": "random_tokens",
            "vocab_size": VOCAB_SIZE,
            "num_tokens": size.num_tokens,
        },
        "train_data_path": str(NUM_STEPS + 1),
        "vocabulary": {"type": "empty"},
        "model": {
            "type": "causal_language_model",
            "vocab_size": VOCAB_SIZE,
            "num_tokens": size.num_tokens,
            "width": size.width,
            "num_layers": size.num_layers,
            "num_heads": max(1, size.width // 128),
        },
        "data_loader": {"batch_size": 1},
        "trainer": {
            **trainer,
            "optimizer": {"type": "adam", "lr": 1e-5},
            "num_epochs": 1,
            "cuda_device": cuda_device,
            "callbacks": ["stop_after_steps"],
            "run_confidence_checks": False,
        },
    }
    if trainer["type"] == "deepspeed":
        # At stage 3 the model is never whole anywhere.
        values["type"] = "deepspeed"
    return values


def run_trial(values: Dict[str, Any], time_limit: float) -> Outcome:
    """
    Trains in a process of its own.

    # Parameters

    values : `Dict[str, Any]`
        A training configuration.
    time_limit : `float`
        In seconds.

    # Raises

    `RuntimeError`
        If training fails for another reason than a want of memory or time.
    """
    with tempfile.TemporaryDirectory(prefix="largest-model-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(values))
        with open(directory / "output.txt", "wb") as output:
            process = subprocess.Popen(
                ["allennlp", "train", directory / "config.json", "-s", directory / "out"]
                + ["--include-package", __name__],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=report.REPOSITORY,
            )
            # If the machine has no memory left, it is the trial that the kernel kills.
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
            try:
                process.wait(time_limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return Outcome(trains=False, reason=f"not done after {time_limit:.0f} s")
        path = directory / "out" / _OUTCOME_NAME
        if process.returncode == 0 and path.exists():
            return Outcome(**json.loads(path.read_text()))
        text = (directory / "output.txt").read_text(errors="replace")
    if process.returncode in _KILLED:
        return Outcome(trains=False, reason="killed by the kernel")
    for reason in _OUT_OF_MEMORY:
        if reason in text.lower():
            return Outcome(trains=False, reason=reason)
    raise RuntimeError(f"Training failed.\n{text[-5000:]}")


def largest(trains: Callable[[int], bool], start: int, tolerance: float) -> int:
    """
    The largest number of layers that trains, to a `tolerance` relative to it, 0 if none does. More
    layers than some that don't train aren't tried.

    # Parameters

    trains : `Callable[[int], bool]`
    start : `int`
        The first to be tried.
    tolerance : `float`
    """
    low, high = 0, start
    while trains(high):
        low, high = high, 2 * high
    if low == 0:
        while high > 1:
            high //= 2
            if trains(high):
                low, high = high, 2 * high
                break
    while high - low > max(1, tolerance * low) and low > 0:
        middle = (low + high) // 2
        if trains(middle):
            low = middle
        else:
            high = middle
    return low


def measure(name: str, trainer: Dict[str, Any], settings: argparse.Namespace) -> Dict[str, Any]:
    outcomes: Dict[int, Outcome] = {}

    def trains(num_layers: int) -> bool:
        size = Size(settings.width, settings.tokens, num_layers)
        start = time.monotonic()
        outcome = run_trial(config(trainer, size, settings.cuda_device), settings.time_limit)
        outcomes[num_layers] = outcome
        print(
            f"{name}: {num_layers} layers, {size.num_parameters / 1e9:.2f} billion parameters: "
            f"{'trains' if outcome.trains else outcome.reason} "
            f"({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        return outcome.trains

    num_layers = largest(trains, settings.start_layers, settings.tolerance)
    larger = [n for n in outcomes if n > num_layers]
    found = outcomes[num_layers] if num_layers else Outcome(trains=False)
    size = Size(settings.width, settings.tokens, num_layers)
    return {
        "contender": name,
        "num_layers": num_layers,
        "num_parameters": size.num_parameters if num_layers else 0,
        "peak_memory": found.peak_memory,
        "seconds_per_step": found.seconds_per_step,
        "next_layers": min(larger),
        "next_fails_with": outcomes[min(larger)].reason,
    }


def text(data: Dict[str, Any]) -> str:
    headings = ["trainer or preset", "billion parameters", "layers", "GPU's memory, GB"]
    headings += ["s/step", "next larger"]
    rows = [
        [
            row["contender"],
            f"{row['num_parameters'] / 1e9:.2f}",
            str(row["num_layers"]),
            "" if row["peak_memory"] is None else f"{row['peak_memory'] / 1e9:.1f}",
            "" if row["seconds_per_step"] is None else f"{row['seconds_per_step']:.2f}",
            f"{row['next_layers']} layers: {row['next_fails_with']}",
        ]
        for row in data["rows"]
    ]
    return report.document(
        "The largest model on one GPU",
        f"{report.describe(data)}\n"
        f"{data['gpu_memory'] / 1e9:.0f} GB on the GPU, {data['cpu_memory'] / 1e9:.0f} GB in "
        f"the machine. A GPT-style transformer of width {data['width']}, one text of "
        f"{data['num_tokens']} tokens in a step, Adam.\n"
        "How the figures are made: [NOTES.md](../NOTES.md#the-largest-model).",
        report.table(headings, rows),
    )
