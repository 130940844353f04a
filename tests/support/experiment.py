"""
Runs experiments through the `allennlp` command, each once, and compares what they leave.
"""

import functools
import hashlib
import io
import json
import math
import re
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import pytest
import torch
from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.params import with_overrides
from allennlp.common.util import import_module_and_submodules
from filelock import FileLock

from tests.support.command import REPOSITORY, Run, allennlp

FIXTURES = REPOSITORY / "tests" / "fixtures"
INCLUDED = "tests.fixtures"
PACKAGES = ("--include-package", "allennlp_deepspeed", "--include-package", INCLUDED)

# An experiment is short, and a worker that waits for a lost one would wait for ever. Seconds.
TIME_LIMIT = 90

Config = Dict[str, Any]
StateDict = Dict[str, torch.Tensor]

# Of the 85 training instances one worker has 43 and the other 42, which makes 8 batches and 7.
TWO_WORKERS: Config = {"distributed": {"cuda_devices": [-1, -1]}}

BF16: Config = {"bf16": {"enabled": True}}
FP16: Config = {"fp16": {"enabled": True, "initial_scale_power": 8}}
ONE_PROCESS: Config = {"trainer.cuda_device": -1}


def load_config(name: str, *overrides: Config) -> Config:
    """
    The config file `{name}.jsonnet` of the fixtures, with absolute paths and a callback that
    records every step.

    # Parameters

    name : `str`
    overrides : `Dict[str, Any]`
        Changes, the later over the earlier. A key with dots names a value further down, such as
        "trainer.optimizer.lr".
    """
    merged = {"trainer.callbacks": ["record_steps"]}
    for changes in overrides:
        merged.update(changes)
    # As in a file, where a tuple is a list.
    config = with_overrides(_config_in_file(name), json.loads(json.dumps(merged)))
    for key in config:
        if key.endswith("_data_path"):
            config[key] = str(REPOSITORY / config[key])
    return config


@functools.cache
def _config_in_file(name: str) -> Config:
    """Evaluated once, because that takes Jsonnet longer than most tests with a config."""
    return Params.from_file(FIXTURES / f"{name}.jsonnet").as_dict(quiet=True)


def on_nvme(*sections: str) -> Config:
    """
    Of "zero_optimization": the sections, such as "offload_param", with files as the device, in
    groups of parameters of which some are large enough for DeepSpeed to put there.
    """
    zero: Config = {"sub_group_size": 300_000}
    for section in sections:
        zero[section] = {"device": "nvme"}
        if section == "offload_param":
            # DeepSpeed's default takes 2 GB of each worker, for parameters far larger than these.
            zero[section]["buffer_size"] = 1_000_000
    return zero


def deepspeed(config: Config, stage: int, **sections: Any) -> Config:
    """
    The same experiment with the "deepspeed" trainer, constructed partitioned at stage 3.

    # Parameters

    config : `Dict[str, Any]`
        With the "gradient_descent" trainer.
    stage : `int`
        Of ZeRO.
    sections : `Any`
        More of DeepSpeed's configuration, of "zero_optimization" too.
    """
    zero: Dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Stage 3 doesn't partition parameters below a size that these models don't reach.
        zero["stage3_param_persistence_threshold"] = 0
    zero.update(sections.pop("zero_optimization", {}))
    trainer = {
        **config["trainer"],
        "type": "deepspeed",
        "deepspeed_config": {"zero_optimization": zero, **sections},
    }
    if stage < 3:
        return {**config, "trainer": trainer}
    return {"type": "deepspeed", **config, "trainer": trainer}


def write_config(config: Config, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


def arguments(config: Config, directory: Path, *flags: Any) -> List[str]:
    """Writes the config to a directory. Returns what has the command train in `out` there."""
    path = write_config(config, directory)
    return [*map(str, ("train", path, "-s", directory / "out", *flags)), *PACKAGES]


def train(
    config: Config,
    directory: Path,
    *flags: Any,
    command: Callable[..., Run] = allennlp,
    **kwargs: Any,
) -> Run:
    """Runs the command with these `arguments`. It ends in time, and so do all of its processes."""
    run = command(*arguments(config, directory, *flags), **kwargs)
    assert not run.processes and not run.timed_out, run.output[-6000:]
    return run


class Result:
    """
    What a finished experiment left.

    # Parameters

    serialization_dir : `Path`
    """

    def __init__(self, serialization_dir: Path) -> None:
        self.serialization_dir = serialization_dir

    @property
    def archive(self) -> Path:
        return self.serialization_dir / "model.tar.gz"

    def weights(self) -> StateDict:
        """The state dict in `model.tar.gz`."""
        with tarfile.open(self.archive) as archive:
            member = archive.extractfile("weights.th")
            assert member is not None
            return torch.load(io.BytesIO(member.read()), map_location="cpu", weights_only=True)

    def metrics(self) -> Dict[str, Any]:
        """All numbers: of each epoch, of the whole run, of each optimizer step, by name."""
        metrics = self.metrics_of_epochs()
        for i, step in enumerate(self._read("steps.json")):
            metrics.update({f"optimizer step {i}: {key}": step[key] for key in step})
        return metrics

    def metrics_of_epochs(self) -> Dict[str, Any]:
        """All numbers but those of steps."""
        metrics: Dict[str, Any] = {}
        for path in self.serialization_dir.glob("metrics*.json"):
            for key, value in json.loads(path.read_text()).items():
                if not re.search("memory|duration", key):
                    metrics[f"{path.name}: {key}"] = value
        return metrics

    def final_metrics(self) -> Dict[str, Any]:
        return self._read("metrics.json")

    def epochs(self) -> List[Dict[str, float]]:
        """The losses and accuracies of each epoch, in training and validation."""
        count = len(list(self.serialization_dir.glob("metrics_epoch_*.json")))
        return [
            {
                key: value
                for key, value in self._read(f"metrics_epoch_{epoch}.json").items()
                if re.fullmatch("(training|validation)_(loss|accuracy)", key)
            }
            for epoch in range(count)
        ]

    def _read(self, name: str) -> Any:
        return json.loads((self.serialization_dir / name).read_text())


class Experiments:
    """
    Runs each config once, also if several processes of a test session ask for it.

    # Parameters

    root : `Path`
        A directory that these processes share.
    command : `Callable[..., Run]`, optional (default = `allennlp`)
    """

    def __init__(self, root: Path, command: Callable[..., Run] = allennlp) -> None:
        self._root = root
        self._command = command

    def run(self, config: Config, time_limit: float = TIME_LIMIT) -> Result:
        """
        Trains, unless it has been done already. Fails the test if the command fails, or takes
        longer than `time_limit` seconds.
        """
        text = json.dumps(config, sort_keys=True)
        directory = self._root / hashlib.sha256(text.encode()).hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True)
        result = Result(directory / "out")
        with FileLock(directory / "lock"):
            if not (directory / "done").exists():
                (directory / "config.json").write_text(text)
                self._command(
                    "train",
                    directory / "config.json",
                    "-s",
                    result.serialization_dir,
                    "--force",
                    "--include-package",
                    INCLUDED,
                    time_limit=time_limit,
                ).check()
                (directory / "done").touch()
        return result


def refusal(config: Config, directory: Path) -> str:
    """The message of the error with which a training in this process is refused."""
    import_module_and_submodules(INCLUDED)
    with pytest.raises(ConfigurationError) as error:
        train_command.train_model(Params(config), str(directory / "out"))
    return str(error.value)


def assert_same_run(actual: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """Every number of the two runs is the same to `tolerance`, and so are the final weights."""
    assert_same_metrics(actual.metrics(), expected.metrics(), tolerance)
    assert_same_weights(actual.weights(), expected.weights(), tolerance)


def assert_same_metrics(
    actual: Dict[str, Any], expected: Dict[str, Any], tolerance: float = 1e-5
) -> None:
    assert actual.keys() == expected.keys()
    differences = [
        f"{key} is {actual[key]} instead of {expected[key]}"
        for key in sorted(expected)
        if not _is_close(actual[key], expected[key], tolerance)
    ]
    assert not differences, "\n".join(differences)


def _is_close(actual: Any, expected: Any, tolerance: float) -> bool:
    if expected is None:  # of a training without an epoch that is the best
        return actual is None
    return bool(actual == pytest.approx(expected, rel=tolerance, abs=tolerance))


def assert_same_weights(actual: StateDict, expected: StateDict, tolerance: float = 1e-5) -> None:
    """
    The root mean square of the difference of each tensor is at most `tolerance` times that of the
    tensor, or of all tensors together if that is larger.

    Processors round sums differently, and a sum's rounding error is relative to what is summed: the
    gradient of a bias, whose numbers may be small, is a sum over the numbers of all layers behind.
    """
    assert actual.keys() == expected.keys()
    scale = _root_mean_square([t for t in expected.values() if t.is_floating_point()])
    differences = []
    for name, tensor in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (tensor.shape, tensor.dtype), name
        difference = _root_mean_square([actual[name].double() - tensor.double()])
        if not difference <= tolerance * max(scale, _root_mean_square([tensor])):
            differences.append(f"{name} differs by {difference}, and all weights are {scale}")
    assert not differences, "\n".join(differences)


def assert_same_outputs(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5
) -> None:
    """
    No number differs by more than `tolerance` times the largest of them: a number near zero is a
    sum of large ones, whose rounding errors it has.
    """
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def _root_mean_square(tensors: Sequence[torch.Tensor]) -> float:
    num_elements = sum(tensor.numel() for tensor in tensors)
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors) / max(1, num_elements))


def assert_trains_alike(actual: Result, expected: Result) -> None:
    """
    The losses and accuracies of each epoch are the same to 0.05: the tolerance for `actual` in half
    precision and `expected` in fp32.

    A number in bf16 has 8 significant bits, so that each activation is rounded by up to 0.4%. With
    losses of about 1, one step differs by some 0.001, and 100 steps add to that. An instance more
    or less is 0.024 of the validation accuracy.
    """
    losses = [epoch["training_loss"] for epoch in expected.epochs()]
    assert losses[0] - losses[-1] > 0.25, "The tolerance hides whether the model learns."
    for actual_epoch, expected_epoch in zip(actual.epochs(), expected.epochs(), strict=True):
        assert actual_epoch == pytest.approx(expected_epoch, abs=0.05)


def assert_fp32_master_weights(result: Result) -> None:
    """
    The archive has the fp32 weights that the optimizer steps, and not the rounded ones that the
    model computes with.
    """
    weights = result.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())
