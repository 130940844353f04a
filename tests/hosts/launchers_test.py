"""Launchers on several hosts."""

import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import pytest

from tests.support.command import wait_for_all
from tests.support.experiment import (
    PACKAGES,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
    write_config,
)
from tests.support.hosts import PORT, TIME_LIMIT, Host, Hosts, on_one_host
from tests.support.launching import MODULE, LaunchedCommands
from tests.support.stand_in_remote_shell import commands_in

BIN = Path(sys.executable).parent

CONFIG = deepspeed(load_config("classifier"), 2)
EXPECTED: Config = on_one_host(CONFIG)


def train(path: Path, serialization_dir: Path) -> List[Any]:
    return ["train", path, "-s", serialization_dir, *PACKAGES]


def launch(
    launchers: Sequence[Sequence[Any]],
    directory: Path,
    environment: Optional[Dict[str, str]] = None,
) -> None:
    """Runs them beside one another, to their end."""
    output = directory / "output"
    output.mkdir()
    with LaunchedCommands(output) as commands, ThreadPoolExecutor() as executor:

        def run(launcher: Sequence[Any]) -> str:
            run = commands.run(launcher, TIME_LIMIT, environment)
            return "" if run.returncode == 0 else run.stdout + commands.output()

        assert not any(errors := list(executor.map(run, launchers))), "\n".join(errors)


# The other host's workers are ended before they fail, so that the hosts count other restarts.
KILL = {"type": "send_signal", "signal_name": "SIGKILL", "rank": 3, "point": "step 2 of epoch 1"}
KILLED = {**CONFIG, "trainer": {**CONFIG["trainer"], "callbacks": [KILL]}}


def test_torchrun_trains_and_restarts_on_several_hosts(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path
) -> None:
    launcher = [BIN / "torchrun", "--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 1]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{two_hosts[0].address}:{PORT}"]
    path = write_config(KILLED, tmp_path)

    def torchrun(host: Host) -> List[Any]:
        return host.command(*launcher, "-m", MODULE, *train(path, tmp_path / host.name))

    launch([torchrun(host) for host in two_hosts.hosts], tmp_path)
    expected = experiments.run(EXPECTED).weights()
    for host in two_hosts.hosts:
        assert_same_weights(Result(tmp_path / host.name).weights(), expected, tolerance=0)


# Otherwise nodes that join look for the store of the first round: docs/upstream.md.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Any number of workers shares its 7 steps equally.
SHARED: Config = {
    "dataset_reader.max_instances": 84,
    "validation_dataset_reader": {
        **load_config("tagger")["dataset_reader"],
        "max_instances": 12,
    },
    "validation_data_loader": {"batch_size": 2},
    "data_loader": {"shuffle": False},
    "trainer.optimizer": {"type": "sgd", "lr": 0.5},
    "trainer.num_gradient_accumulation_steps": "auto",
    "trainer.global_batch_size": 12,
    "trainer.num_epochs": 4,
    "trainer.callbacks": [{"type": "tell_steps", "pause": 0.5}],
    "trainer.checkpointer": {"save_on_preemption": True},
    "trainer.resume": "auto",
}


def test_torchrun_takes_in_a_node_that_joins_and_no_step_is_trained_twice(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path
) -> None:
    launcher = [BIN / "torchrun", "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{two_hosts[0].address}:{PORT}"]
    launcher += ["--rdzv-conf", "last_call_timeout=2", "-m", MODULE]
    config = deepspeed(load_config("tagger", SHARED), 2)
    arguments = train(write_config(config, tmp_path), tmp_path / "shared")
    output = tmp_path / "output"
    output.mkdir()
    with LaunchedCommands(output) as commands, ThreadPoolExecutor() as executor:
        runs = []
        for host in two_hosts.hosts:
            command = host.command(*launcher, *arguments)
            runs.append(executor.submit(commands.run, command, TIME_LIMIT, OWN_STORE))
            deadline = time.monotonic() + TIME_LIMIT
            while "step 2 of epoch 0" not in commands.output() and time.monotonic() < deadline:
                time.sleep(0.1)
        finished = [run.result() for run in runs]
        printed = "\n".join([*(each.stdout for each in finished), commands.output()])
        assert not any(each.returncode for each in finished), printed
    alone, *together = (path.read_text() for path in sorted(output.iterdir()))
    assert "Stopped by SIGTERM after step" in alone
    assert any("with 1 workers: loading it by name" in text for text in together)
    before, after = (
        set(re.findall(r"^step \d+ of epoch \d+$", text, re.MULTILINE))
        for text in (alone, "\n".join(together))
    )
    assert before and after and not before & after
    del config["trainer"]["resume"]
    config["distributed"] = {"cuda_devices": [-1, -1]}
    expected = experiments.run(config).weights()
    assert_same_weights(Result(tmp_path / "shared").weights(), expected)


@pytest.mark.parametrize("name", ["mpich", pytest.param("deepspeed", marks=pytest.mark.soak)])
def test_a_launcher_on_one_host_starts_processes_on_all(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, name: str
) -> None:
    names = [host.name for host in two_hosts.hosts]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots=2\n" for name in names))
    mpich = [BIN / "mpiexec", "-launcher", "ssh", "-hosts", ",".join(names), "-ppn", 2, "-n", 4]
    mpich += ["-genv", "MASTER_ADDR", names[0], "-genv", "MASTER_PORT", PORT]
    deepspeed = [BIN / "deepspeed", "--hostfile", hostfile, "--no_local_rank"]
    launchers = {
        "mpich": [*mpich, sys.executable, "-m"],
        "deepspeed": [*deepspeed, "--master_port", PORT, "--module"],
    }
    remote_shells = commands_in(tmp_path / "bin", {h.name: h.holder for h in two_hosts.hosts})
    arguments = train(write_config(CONFIG, tmp_path), tmp_path / "shared")
    command = two_hosts[0].command(*launchers[name], MODULE, *arguments)
    launch([command], tmp_path, remote_shells)
    result, expected = Result(tmp_path / "shared"), experiments.run(EXPECTED)
    assert_same_weights(result.weights(), expected.weights(), tolerance=0)
    assert (tmp_path / "shared" / "out_worker3_host-1.log").exists()


def test_srun_starts_one_process_on_each_host_and_fewer_continue(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path
) -> None:
    trainer = {**CONFIG["trainer"], "resume": "auto"}
    config = {**CONFIG, "trainer": trainer, "distributed": {"cuda_devices": [-1, -1]}}
    path, directory = write_config(config, tmp_path), tmp_path / "shared"

    def srun(hosts: List[Host]) -> List[str]:
        commands = []
        for task, host in enumerate(hosts):
            environment = {
                "SLURM_JOB_ID": "17",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": str(len(hosts)),
                "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(hosts)})",
                "SLURM_STEP_NODELIST": "host-[0-1]",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": "0",
            }
            commands.append(host.start("train", path, "-s", directory, environment=environment))
        return [run.check().output for run in wait_for_all(commands, TIME_LIMIT)]

    srun(two_hosts.hosts)
    expected = experiments.run(EXPECTED).weights()
    assert_same_weights(Result(directory).weights(), expected, tolerance=0)
    # As if it had been preempted, and came back with one node.
    shutil.rmtree(directory / "checkpoint_e2_b0")
    (directory / "model.tar.gz").unlink()
    (output,) = srun(two_hosts.hosts[:1])
    assert "with 4 workers: loading it by name" in output
    assert Result(directory).archive.exists()
