"""What the environment says of a process, as each launcher writes it, and a config with it."""

from dataclasses import replace
from typing import Any, Dict, Optional

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import nodes
from allennlp_deepspeed.launch.agent import Node
from allennlp_deepspeed.launch.launcher_environment import (
    LaunchedProcess,
    detect,
    fill_distributed,
    is_worker,
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_RANK": "1",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29400",
}

ONE = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}

DEEPSPEED = {
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_SIZE": "2",
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-7@1",
}

MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}

SRUN = {
    "SLURM_JOB_ID": "81234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "64",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004],login1",
}

# Of each of two nodes.
ONE_TASK = {
    **SRUN,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize(
    "environment, expected",
    [
        (
            TORCHRUN,
            LaunchedProcess("RANK and WORLD_SIZE", 3, 1, 4, 2, "node-0", 29400, has_store=True),
        ),
        (DEEPSPEED, LaunchedProcess("RANK and WORLD_SIZE", 2, 0, 4, 2, "10.0.0.1", 29500)),
        (
            {"MASTER_PORT": "1234", "MASTER_ADDR": "node-1", **OPEN_MPI},
            LaunchedProcess("Open MPI", 1, 1, 2, 2, "node-1", 1234),
        ),
        ({"MASTER_PORT": "1234", **MPICH}, LaunchedProcess("MPICH", 0, 0, 2, 2, "127.0.0.1", 1234)),
        ({"MASTER_PORT": "1234", **SRUN}, LaunchedProcess("srun", 5, 1, 8, 4, "gpu003", 1234)),
        # The innermost counts.
        (
            {**SRUN, **TORCHRUN},
            LaunchedProcess("RANK and WORLD_SIZE", 3, 1, 4, 2, "node-0", 29400, has_store=True),
        ),
        # A batch script by itself is no step: this is the only process.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({**TORCHRUN, **dict.fromkeys(["RANK", "LOCAL_RANK"], "0"), **ONE}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_what_a_launcher_says(environment: Dict[str, str], expected: LaunchedProcess) -> None:
    assert detect(environment) == expected


def test_a_port_that_all_processes_of_a_step_find() -> None:
    first, second = detect(SRUN), detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert first is not None and second is not None
    assert first.port == second.port and 20_000 <= first.port < 30_000


def test_a_port_that_all_processes_of_mpirun_find_on_one_machine() -> None:
    for environment, rank in ((OPEN_MPI, "OMPI_COMM_WORLD"), (MPICH, "PMI")):
        local_rank = "OMPI_COMM_WORLD_LOCAL_RANK" if environment is OPEN_MPI else "MPI_LOCALRANKID"
        ranks = [
            detect({**environment, f"{rank}_RANK": str(i), local_rank: str(i)}) for i in range(2)
        ]
        [port] = {launched and launched.port for launched in ranks}
        assert port and ranks[0] and ranks[0].address == "127.0.0.1"


def test_another_job_has_another_port() -> None:
    jobs = [detect({**SRUN, "SLURM_JOB_ID": str(job)}) for job in range(1, 50)]
    assert len({job.port for job in jobs if job is not None}) == 49


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu[003-005,9],login1", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("rack1-gpu[10-12].cluster,x", "rack1-gpu10.cluster"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    launched = detect({**SRUN, "SLURM_STEP_NODELIST": nodes})
    assert launched is not None and launched.address == first


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but not the rank of this process"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2, but not the rank"),
        ({**TORCHRUN, "RANK": "three"}, "RANK is 'three', but must be a number"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "is '5,3', but must be a number"),
        ({**TORCHRUN, "RANK": "8", "LOCAL_RANK": "0"}, "is rank 8 .* Ranks must be from 0 to 3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "local rank 1 of 0"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "in the order of the nodes"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "set MASTER_ADDR"),
        # Which is srun's, and of no step of mpirun's.
        ({**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "set MASTER_ADDR"),
        # A task of each node has started four processes, and LOCAL_WORLD_SIZE isn't written.
        ({**ONE_TASK, "RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8"}, "has WORLD_SIZE=8, but"),
        ({**SRUN, "WORLD_SIZE": "1"}, "has WORLD_SIZE=1, but"),
    ],
)
def test_what_cannot_be_understood_is_refused(environment: Dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        detect(environment)


# The third of four processes on two nodes.
LAUNCHED = LaunchedProcess("srun", 2, 0, 4, 2, "node-0", 23456)

ONE_A_NODE = LaunchedProcess("srun", 1, 0, 2, 1, "node-0", 23456)


def filled(
    launched: LaunchedProcess, distributed: Optional[Dict[str, Any]] = None, **arguments: Any
) -> Dict[str, Any]:
    config: Dict[str, Any] = {"trainer": {"type": "deepspeed", "cuda_device": -1}}
    if distributed is not None:
        config["distributed"] = distributed
    params = Params(config)
    fill_distributed(params, launched, arguments)
    assert arguments["node_rank"] == launched.node_rank
    return params.as_dict(quiet=True)


def test_the_section_may_be_left_out() -> None:
    config = filled(LAUNCHED)
    assert config["distributed"] == {
        "cuda_devices": [-1, -1],
        "num_nodes": 2,
        "primary_address": "node-0",
        "primary_port": 23456,
    }
    assert is_worker(config, LAUNCHED)


def test_one_process_on_each_node_starts_its_workers() -> None:
    section = {"cuda_devices": [-1, -1, -1], "num_nodes": 2, "timeout": 60}
    config = filled(ONE_A_NODE, section, node_rank=1)
    assert not is_worker(config, ONE_A_NODE)
    node = nodes.local_node(config, 1)
    assert node == Node(1, 2, 3, "node-0", 23456)


def test_where_to_meet_may_be_in_the_config() -> None:
    section = {"primary_address": "10.0.0.7", "primary_port": 1234}
    config = filled(LAUNCHED, section)
    assert config["distributed"]["primary_address"] == "10.0.0.7"
    assert config["distributed"]["primary_port"] == 1234


@pytest.mark.parametrize(
    "launched, section, message",
    [
        (
            LAUNCHED,
            {"cuda_devices": [0]},
            "'distributed.cuda_devices' has 1 entries, but .* started 2",
        ),
        (
            replace(ONE_A_NODE, has_store=True),
            {"cuda_devices": [0, 1]},
            "'distributed.cuda_devices' has 2 entries, .* --nproc-per-node",
        ),
        (LAUNCHED, {"num_nodes": 4}, "'distributed.num_nodes' is 4, but .* started 2"),
        (replace(LAUNCHED, port=0), {}, "no port for the rendezvous: set MASTER_PORT"),
    ],
)
def test_contradictions_are_refused(
    launched: LaunchedProcess, section: Dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        filled(launched, section)
