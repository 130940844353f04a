"""
What a launcher's environment says of this process. Nothing here communicates, and nothing is
changed.
"""

import os
import re
import zlib
from dataclasses import dataclass
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from allennlp.common.checks import ConfigurationError

# What there is in the place of a launcher's name where each process is started by itself.
BY_HAND = "the environment (RANK, WORLD_SIZE)"

_LOCAL_ADDRESS = "127.0.0.1"

# From which a port is chosen that is the same for all processes of a job and another for the next.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000

_ADVICE = (
    "Write RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT into the "
    "environment of each process, or start them by torchrun, deepspeed, accelerate, srun or mpirun."
)


@dataclass(frozen=True)
class Launched:
    """
    A process among those that a launcher has started, as many on each node.

    # Parameters

    launcher : `Optional[str]`, required.
        What it is called in messages. `None` if this package has started the process.
    rank : `int`, required.
    local_rank : `int`, required.
        On its node.
    world_size : `int`, required.
    local_world_size : `int`, required.
    address : `str`, required.
        Of the node of rank 0.
    port : `int`, required.
        There, where the processes can meet.
    has_store : `bool`, optional (default = `False`)
        Whether the launcher has a store there already.
    """

    launcher: Optional[str]
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    has_store: bool = False

    def environment(self) -> Dict[str, str]:
        """As PyTorch reads it."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size


def detect(environ: Optional[Mapping[str, str]] = None) -> Optional[Launched]:
    """
    # Parameters

    environ : `Mapping[str, str]`, optional (default = `os.environ`)

    # Returns

    `Optional[Launched]`
        `None` if this process is the only one.

    # Raises

    `ConfigurationError`
        If there are others, but the environment doesn't say how they are to find each other.
    """
    environ = os.environ if environ is None else environ
    for is_meant, read in _LAUNCHERS:
        if is_meant(environ):
            launched = read(environ)
            break
    else:
        if _integer(environ, "WORLD_SIZE", 1) > 1:
            raise ConfigurationError(
                f"The environment has WORLD_SIZE={environ['WORLD_SIZE']}, but doesn't say which "
                f"of the processes this one is. {_ADVICE} Or remove it, if this is to be the only "
                "one."
            )
        return None
    said = _integer(environ, "WORLD_SIZE", launched.world_size)
    if said != launched.world_size:
        raise ConfigurationError(
            f"{launched.launcher} has started {launched.world_size} processes, but the environment "
            f"has WORLD_SIZE={said}. Remove WORLD_SIZE, or start as many."
        )
    if launched.world_size == 1:
        return None
    _check(launched)
    return launched


def _check(launched: Launched) -> None:
    size, local_size = launched.world_size, launched.local_world_size
    if not 0 <= launched.rank < size:
        raise ConfigurationError(
            f"{launched.launcher} has started {size} processes, of which this is rank "
            f"{launched.rank}: ranks are from 0 to {size - 1}."
        )
    if local_size < 1 or size % local_size or launched.rank % local_size != launched.local_rank:
        raise ConfigurationError(
            f"{launched.launcher} has started {size} processes, of which this is rank "
            f"{launched.rank}, and number {launched.local_rank} of {local_size} on its node. Each "
            "node has to have as many, and the ranks have to be in the order of the nodes, such as "
            "with srun's --ntasks-per-node and --distribution=block."
        )


def _torchrun(environ: Mapping[str, str]) -> Launched:
    """Also `accelerate launch`, which calls it."""
    return Launched(
        launcher="accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun",
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE"),
        address=environ["MASTER_ADDR"],
        port=_integer(environ, "MASTER_PORT"),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _environment(environ: Mapping[str, str]) -> Launched:
    """PyTorch's `env://`, which DeepSpeed's launcher writes, and whoever starts each by hand."""
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR") if name not in environ]
    local_size = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
    if local_size is None and environ.get("MASTER_ADDR") in (_LOCAL_ADDRESS, "localhost"):
        local_size = environ["WORLD_SIZE"]
    if local_size is None:
        missing.append("LOCAL_WORLD_SIZE")
    if "MASTER_PORT" not in environ:
        missing.append("MASTER_PORT")
    if missing and _integer(environ, "WORLD_SIZE") > 1:
        raise ConfigurationError(
            f"The environment has RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']}, "
            f"but not {', '.join(missing)}. {_ADVICE}"
        )
    return Launched(
        launcher="deepspeed" if "CROSS_RANK" in environ else BY_HAND,
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK", 0),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_world_size=int(local_size or 1),
        address=environ.get("MASTER_ADDR", _LOCAL_ADDRESS),
        port=_integer(environ, "MASTER_PORT", 0),
    )


def _open_mpi(environ: Mapping[str, str]) -> Launched:
    world_size = _integer(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
    return Launched(
        launcher="mpirun",
        rank=_integer(environ, "OMPI_COMM_WORLD_RANK"),
        local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_size,
        address=_mpi_address(environ, is_one_node=world_size == local_size),
        port=_port(environ, job),
    )


def _hydra(environ: Mapping[str, str]) -> Launched:
    """MPICH's and Intel's mpirun."""
    world_size = _integer(environ, "PMI_SIZE")
    local_size = _integer(environ, "MPI_LOCALNRANKS")
    return Launched(
        launcher="mpirun",
        rank=_integer(environ, "PMI_RANK"),
        local_rank=_integer(environ, "MPI_LOCALRANKID"),
        world_size=world_size,
        local_world_size=local_size,
        address=_mpi_address(environ, is_one_node=world_size == local_size),
        # By what has started them, which all of a node have in common, but not several nodes.
        port=_port(environ, str(os.getppid()) if world_size == local_size else None),
    )


def _mpi_address(environ: Mapping[str, str], is_one_node: bool) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if is_one_node:
        return _LOCAL_ADDRESS
    raise ConfigurationError(
        "mpirun has started processes on several nodes, but doesn't say where the one of rank 0 "
        "is: write MASTER_ADDR, a name or an address of that node, and MASTER_PORT, a free port "
        "there, into the environment of all (Open MPI: -x MASTER_ADDR=..., MPICH: -genv "
        "MASTER_ADDR ...)."
    )


def _slurm(environ: Mapping[str, str]) -> Launched:
    """`srun`, which has these by step; those by job are of the whole allocation."""
    tasks_per_node = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS")
    if len(set(tasks_per_node)) > 1:
        raise ConfigurationError(
            f"srun has started {', '.join(map(str, tasks_per_node))} processes on its nodes. Each "
            "has to have as many: write --ntasks-per-node."
        )
    return Launched(
        launcher="srun",
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=tasks_per_node[0],
        address=environ.get("MASTER_ADDR")
        or (_first_host(nodes) if len(tasks_per_node) > 1 else _LOCAL_ADDRESS),
        port=_port(
            environ,
            environ.get("SLURM_JOB_ID", "") + "." + environ.get("SLURM_STEP_ID", ""),
        ),
    )


def _tasks_per_node(text: str) -> List[int]:
    """Of each node, from such as `2(x3),1`."""
    counts: List[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text} can't be understood.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Of a list such as `gpu[003-005,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ConfigurationError(
            f"SLURM_STEP_NODELIST={nodes} can't be understood: write MASTER_ADDR, a name or an "
            "address of the first node, into the environment."
        )
    return "".join(filter(None, match.groups()))


def _port(environ: Mapping[str, str], job: Optional[str]) -> int:
    """That of the environment, or one by the name of the job; 0 if it has none."""
    if "MASTER_PORT" in environ or job is None:
        return _integer(environ, "MASTER_PORT", 0)
    # Not `hash`, which is another in each process.
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _integer(environ: Mapping[str, str], name: str, default: Optional[int] = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        is_what = "isn't there" if text is None else f"is '{text}'"
        raise ConfigurationError(
            f"The environment variable {name} {is_what}, but has to be a number. {_ADVICE}"
        ) from None


def _has(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: all(name in environ for name in names)


# The innermost first: torchrun and DeepSpeed's launcher may be started by srun or mpirun.
_LAUNCHERS: List[
    Tuple[Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str]], Launched]]
] = [
    (_has("TORCHELASTIC_RUN_ID", "RANK"), _torchrun),
    (_has("RANK", "WORLD_SIZE"), _environment),
    (_has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), _open_mpi),
    (_has("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"), _hydra),
    (_has("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), _slurm),
]
