"""What the environment says of a process, as each launcher writes it."""

from typing import Dict

import pytest
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch.launcher import Launched, detect

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


@pytest.mark.parametrize(
    "environment, expected",
    [
        (
            TORCHRUN,
            Launched("torchrun", 3, 1, 4, 2, "node-0", 29400, has_store=True),
        ),
        (DEEPSPEED, Launched("deepspeed", 2, 0, 4, 2, "10.0.0.1", 29500)),
        (
            {"MASTER_PORT": "1234", "MASTER_ADDR": "node-1", **OPEN_MPI},
            Launched("mpirun", 1, 1, 2, 2, "node-1", 1234),
        ),
        ({"MASTER_PORT": "1234", **MPICH}, Launched("mpirun", 0, 0, 2, 2, "127.0.0.1", 1234)),
        ({"MASTER_PORT": "1234", **SRUN}, Launched("srun", 5, 1, 8, 4, "gpu003", 1234)),
        # The innermost counts.
        (
            {**SRUN, **TORCHRUN},
            Launched("torchrun", 3, 1, 4, 2, "node-0", 29400, has_store=True),
        ),
        # A batch script by itself is no step: this is the only process.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_what_a_launcher_says(environment: Dict[str, str], expected: Launched) -> None:
    assert detect(environment) == expected


@pytest.mark.parametrize("environment", [OPEN_MPI, MPICH, SRUN])
def test_a_port_that_all_processes_of_a_job_find(environment: Dict[str, str]) -> None:
    first, second = detect(environment), detect(dict(environment))
    assert first is not None and second is not None
    assert first.port == second.port and 20_000 <= first.port < 30_000


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
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but doesn't say which of the processes"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0"},
            "but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT",
        ),
        ({**TORCHRUN, "RANK": "three"}, "RANK is 'three', but has to be a number"),
        ({**SRUN, "WORLD_SIZE": "4"}, "srun has started 8 processes, but .* WORLD_SIZE=4"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "srun has started 5, 3 processes"),
        ({**TORCHRUN, "RANK": "8", "LOCAL_RANK": "0"}, "this is rank 8: ranks are from 0 to 3"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "the ranks have to be in the order of the nodes"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "write MASTER_ADDR"),
    ],
)
def test_what_cannot_be_understood_is_refused(environment: Dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        detect(environment)
