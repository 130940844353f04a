"""
Trainings on simulated GPUs: each worker uses its own device and no other, the ranks make the same
communicators in the same order, and libraries print nothing.
"""

import re
import socket
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import pytest

from tests.simulated_gpus.machine import Machine, events
from tests.support import experiment
from tests.support.command import Run
from tests.support.experiment import Config, deepspeed, load_config
from tests.support.launching import MODULE, LaunchedCommands

# Of a model that asks nothing of cuDNN.
MODEL: Config = {
    "model.seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 12},
    "model.feedforward": {
        "input_dim": 12,
        "num_layers": 2,
        "hidden_dims": 8,
        "activations": "relu",
    },
    "trainer.num_epochs": 1,
    # Ranks have as many batches each.
    "data_loader.batch_size": 8,
}

PLUGIN = ("--include-package", "tests.simulated_gpus.plugin")

# Another level has the console show all that AllenNLP logs.
CONSOLE = {"ALLENNLP_LOG_LEVEL": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}

ASYNCHRONOUS: Config = {"trainer.checkpointer": {"async_save": True, "save_every_num_batches": 2}}
CPU: Config = {"device": "cpu", "pin_memory": True}
RECOMPUTATION: Config = {"trainer.activation_checkpointing": ["_feedforward"]}


def classifier(stage: int, devices: Sequence[int], *changes: Config, **zero: Any) -> Config:
    """
    With one device the only process trains on it, and without any a launcher says which.
    `zero` is added to "zero_optimization".
    """
    where: Config = {"distributed": {"cuda_devices": list(devices)}}
    if len(devices) < 2:
        where = {"trainer.cuda_device": devices[0]} if devices else {}
    # Whether tags of checkpoints are the same is computed by a kernel.
    sections: Config = {"checkpoint": {"tag_validation": "Ignore"}}
    if RECOMPUTATION in changes:
        sections["activation_checkpointing"] = {"cpu_checkpointing": True}
    config = deepspeed(load_config("classifier", where, MODEL, *changes), stage, **sections)
    config["trainer"]["deepspeed_config"]["zero_optimization"].update(zero)
    return config


def train(run: Callable[..., Run], config: Config, directory: Path, **kwargs: Any) -> Run:
    """Trains with a method of the machine. The devices log to `log` in the directory."""
    variables = {**CONSOLE, **kwargs.pop("variables", {})}
    kwargs.update(log=directory / "log", variables=variables)
    return experiment.train(config, directory, *PLUGIN, command=run, **kwargs)


def assert_uses_its_own_device(log: Path, devices: Sequence[int]) -> None:
    """
    Each worker has one context, and its communicators and what it sends are on its device. A thread
    that hasn't chosen one creates another context on the first.
    """
    contexts = {event["process"]: event["device"] for event in events(log, "context")}
    assert len(events(log, "context")) == len(contexts), events(log, "context", "thread")
    assert sorted(contexts.values()) == sorted(devices)
    for event in events(log, "communicator", "collective"):
        assert event["device"] == contexts[event["process"]], event
        assert event.get("memory", event["device"]) == event["device"], event
    assert not events(log, "stuck", "after_fork")


def assert_same_communicators(log: Path) -> None:
    """The ranks make them, and enter their collectives, in the same order."""
    by_process: Dict[int, List[Any]] = {}
    for event in events(log, "communicator", "collective"):
        what = [event.get(key) for key in ("id", "communicator", "name", "bytes")]
        by_process.setdefault(event["process"], []).append(what)
    first, *others = by_process.values()
    assert all(other == first for other in others)


def library_lines(run: Run) -> List[str]:
    """Lines of a console that are no line of ours."""
    return [line for line in run.lines() if "warn" in line.lower() or line.startswith("[")]


TRAININGS = {
    "one process": (classifier(2, [1], ASYNCHRONOUS), 2),
    "stage 0, four, buffers, metrics": (
        classifier(
            0, [3, 0, 2, 1], {"trainer.grad_norm": 1.0, "model.type": "classifier_with_buffers"}
        ),
        4,
    ),
    "stage 1, overlap, average": (
        classifier(
            1, [1, 0], {"trainer.moving_average": {"decay": 0.9}}, ASYNCHRONOUS, overlap_comm=True
        ),
        2,
    ),
    "stage 2, global batch, recomputation from the CPU": (
        classifier(
            2,
            [1, 2],
            {
                "data_loader.batch_size": 12,
                "trainer.global_batch_size": 24,
                "trainer.num_gradient_accumulation_steps": "auto",
            },
            RECOMPUTATION,
            ASYNCHRONOUS,
        ),
        3,
    ),
    "stage 3, offload": (
        classifier(3, [2, 1], ASYNCHRONOUS, offload_optimizer=CPU, offload_param=CPU),
        3,
    ),
    "stage 3": (classifier(3, [1, 2], ASYNCHRONOUS, overlap_comm=True), 3),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_each_worker_uses_its_own_device_alone(machine: Machine, tmp_path: Path, name: str) -> None:
    config, num_devices = TRAININGS[name]
    run = train(machine.allennlp, config, tmp_path, num_devices=num_devices).check()
    devices = config.get("distributed", {}).get("cuda_devices", [1])
    assert_uses_its_own_device(tmp_path / "log", devices)
    assert_same_communicators(tmp_path / "log")
    assert not library_lines(run)


def test_workers_on_the_cpu_use_no_gpu(machine: Machine, tmp_path: Path) -> None:
    train(machine.allennlp, classifier(2, [-1, -1], ASYNCHRONOUS), tmp_path).check()
    assert not events(tmp_path / "log", "context")


def fails(machine: Machine, config: Config, directory: Path, **variables: str) -> str:
    """Trains, and returns what the command ends with. Of its processes none is left."""
    run = train(machine.allennlp, config, directory, variables=variables)
    assert run.returncode == 1, run.output[-6000:]
    *_, last = re.finditer("^Rank ", run.output, re.MULTILINE)
    return run.output[last.start() :]


def on_rank_1(callback: str, **arguments: Any) -> Config:
    at = {"point": "step 2 of epoch 0", "rank": 1}
    return {"trainer.callbacks": [{"type": callback, **at, **arguments}]}


@pytest.mark.parametrize(
    "callback, expected",
    [
        (on_rank_1("fail"), "raised on purpose in step 2"),
        (on_rank_1("send_signal", signal_name="SIGKILL"), "was killed by SIGKILL"),
    ],
    ids=["raises", "is killed"],
)
def test_a_rank_that_ends_ends_all(
    machine: Machine, tmp_path: Path, callback: Config, expected: str
) -> None:
    assert expected in fails(machine, classifier(2, [0, 1], callback), tmp_path)


def test_a_rank_that_enters_no_collective_is_told(machine: Machine, tmp_path: Path) -> None:
    config = classifier(2, [0, 1], on_rank_1("be_absent"))
    config["distributed"]["timeout"] = 10
    # NCCL gives other ranks time to write what they have done.
    message = fails(machine, config, tmp_path, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500")
    assert "Another rank didn't enter the same collective within 'distributed.timeout'" in message
    assert "2 on rank 0, 2 on rank 1" in message
    assert str(tmp_path / "out" / "collectives_rank_0") in message


def test_a_wrong_interface_of_nccl_is_named(machine: Machine, tmp_path: Path) -> None:
    config = classifier(2, [0, 1])
    message = fails(machine, config, tmp_path, NCCL_SOCKET_IFNAME="missing0")
    assert "NCCL_SOCKET_IFNAME is 'missing0'" in message


def test_a_leader_may_read_for_longer_than_ranks_wait_for_each_other(
    machine: Machine, tmp_path: Path
) -> None:
    reader = {"type": "slow_reader", "host": socket.gethostname(), "seconds": 16}
    config = classifier(2, [0, 1], {"dataset_reader": {"tokenizer": "whitespace", **reader}})
    config["distributed"]["rendezvous_timeout"] = 10
    train(machine.allennlp, config, tmp_path).check()


def test_restarted_workers_use_their_devices_too(machine: Machine, tmp_path: Path) -> None:
    kill = {"type": "send_signal", "signal_name": "SIGKILL", "rank": 1}
    kill = {**kill, "point": "step 4 of epoch 0", "after": "checkpoint_e0_b2"}
    config = classifier(3, [1, 0], ASYNCHRONOUS, {"trainer.callbacks": [kill]})
    config["distributed"]["max_restarts"] = 1
    run = train(machine.allennlp, config, tmp_path).check()
    assert "Restarts left after this one: 0" in run.output
    assert "checkpoint_e0_b2" in run.output
    assert_uses_its_own_device(tmp_path / "log", [0, 0, 1, 1])


def test_workers_of_torchrun_use_their_own_devices(machine: Machine, tmp_path: Path) -> None:
    config = classifier(2, [], ASYNCHRONOUS)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2]
    arguments = experiment.arguments(config, tmp_path, *PLUGIN)
    # The server that they are forked from sees no devices.
    visible = {"CUDA_VISIBLE_DEVICES": "0,1"}
    environment = {**machine.environment(tmp_path / "log"), **CONSOLE, **visible}
    with machine.forks(), LaunchedCommands(tmp_path) as launched:
        run = launched.run([*torchrun, "-m", MODULE, *arguments], environment=environment)
        assert run.returncode == 0, run.stdout + launched.output()
    assert_uses_its_own_device(tmp_path / "log", [0, 1])
    assert_same_communicators(tmp_path / "log")


# Either keeps PyTorch from counting devices without initializing CUDA.
@pytest.mark.parametrize(
    "variables, has_nvml",
    [
        pytest.param({}, False, id="none"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1"}, True, id="names of MIG", marks=pytest.mark.soak
        ),
    ],
)
def test_without_nvml(
    machine: Machine, tmp_path: Path, variables: Dict[str, str], has_nvml: bool
) -> None:
    config = classifier(2, [0, 1])
    run = train(
        machine.installed_allennlp, config, tmp_path, variables=variables, has_nvml=has_nvml
    )
    run.check()
    assert_uses_its_own_device(tmp_path / "log", [0, 1])
    assert not library_lines(run)
