"""Launchers on several hosts."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import List

import pytest

from tests.support.command import wait_for_all
from tests.support.experiment import (
    INCLUDED,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import PORT, TIME_LIMIT, Host, Hosts
from tests.support.launching import MODULE, LaunchedCommands

CONFIG = deepspeed(load_config("classifier"), 2)
EXPECTED: Config = {**CONFIG, "distributed": {"cuda_devices": [-1] * 4}}


def written(config: Config, directory: Path) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "processes, config",
    [
        pytest.param(2, CONFIG, id="one_for_each_worker"),
        pytest.param(
            1,
            {**CONFIG, "distributed": {"cuda_devices": [-1, -1]}},
            id="one_on_each_node",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_torchrun_trains_on_several_hosts(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, processes: int, config: Config
) -> None:
    path = written(config, tmp_path)
    directories = [tmp_path / host.name for host in two_hosts.hosts]
    endpoint = f"{two_hosts[0].address}:{PORT}"

    def torchrun(host: Host, commands: LaunchedCommands) -> str:
        launcher = [Path(sys.executable).parent / "torchrun", "--nnodes", 2]
        launcher += ["--nproc-per-node", processes, "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", endpoint, "-m", MODULE]
        train = ["train", path, "-s", directories[host.rank]]
        train += ["--include-package", "allennlp_deepspeed", "--include-package", INCLUDED]
        run = commands.run(host.command(*launcher, *train), TIME_LIMIT)
        return "" if run.returncode == 0 else run.stdout + commands.output()

    with ExitStack() as stack, ThreadPoolExecutor() as executor:
        commands = []
        for host in two_hosts.hosts:
            output = tmp_path / f"output_{host.rank}"
            output.mkdir()
            commands.append(stack.enter_context(LaunchedCommands(output, host.enter)))
        errors = list(executor.map(torchrun, two_hosts.hosts, commands))
    assert errors == ["", ""], "\n".join(errors)
    expected = experiments.run(EXPECTED).weights()
    for directory in directories:
        assert_same_weights(Result(directory).weights(), expected, tolerance=0)


def test_srun_starts_one_process_on_each_host_and_fewer_continue(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path
) -> None:
    trainer = {**CONFIG["trainer"], "resume": "auto"}
    config = {**CONFIG, "trainer": trainer, "distributed": {"cuda_devices": [-1, -1]}}
    path, directory = written(config, tmp_path), tmp_path / "shared"

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
    assert "from 4 workers for 2" in output
    assert Result(directory).archive.exists()
