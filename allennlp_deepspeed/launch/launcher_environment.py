"""
Reads the environment of launchers, such as torchrun and srun, and fills the section "distributed"
of the config from it. With one process per worker, the process becomes the worker. With one per
node, it starts the workers of its node.
"""

import os
import re
import zlib
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

ALLENNLP = "allennlp train"
"""The launcher of workers that this package has started."""

_TORCH = "RANK and WORLD_SIZE"

# Rank, local rank, world size and processes on the node, as each launcher writes them. The
# innermost first: torchrun and DeepSpeed's launcher may be started by srun or mpirun.
_VARIABLES = {
    _TORCH: ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
}

# From which a port is chosen that is the same for all processes of a step of Slurm or mpirun.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class LaunchedProcess:
    """
    Process that a launcher has started. Each node has the same number of them.

    # Parameters

    launcher : `str`
        The name of the launcher, for messages.
    rank : `int`
    local_rank : `int`
        Its rank on its node.
    world_size : `int`
    local_world_size : `int`
    address : `str`
        The address of rank 0's node.
    port : `int`
        The port at which the processes can connect. 0 if none is known.
    has_store : `bool`, optional (default = `False`)
        Whether the launcher already has a store there.
    store_file : `str`, optional (default = `""`)
        The file of the store in which the processes find each other. Empty if that is at the
        address.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    has_store: bool = False
    store_file: str = ""

    def environment(self) -> Dict[str, str]:
        """Returns the environment variables that PyTorch reads."""
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

    @property
    def serves_other_nodes(self) -> bool:
        """Whether this process has the store in which others read."""
        return self.num_nodes > 1 and self.rank == 0 and not self.has_store


def detect(environ: Mapping[str, str] = os.environ) -> Optional[LaunchedProcess]:
    """
    Detects the launcher of this process.

    # Returns

    `Optional[LaunchedProcess]`
        `None` if this process is the only one.

    # Raises

    `ConfigurationError`
        If there are other processes, but the environment doesn't define how they connect to each
        other.
    """
    # As DeepSpeed's launcher calls it.
    environ = {"LOCAL_WORLD_SIZE": environ.get("LOCAL_SIZE", ""), **environ}
    size = environ.get("WORLD_SIZE")
    for launcher, names in _VARIABLES.items():
        if all(environ.get(name) for name in names):
            process = read_environment(environ, launcher)
            if size in (None, "", str(process.world_size)):
                return process if process.world_size > 1 else None
            break
    else:
        if size in (None, "", "1"):
            return None
    raise ConfigurationError(
        f"The environment has WORLD_SIZE={size}, but not the rank of this process. Set RANK, "
        "LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, "
        "or start them by torchrun, deepspeed, accelerate, srun or mpirun. For a single process, "
        "unset WORLD_SIZE."
    )


def read_environment(environ: Mapping[str, str], launcher: str = _TORCH) -> LaunchedProcess:
    """
    Reads the variables of one launcher.

    # Parameters

    environ : `Mapping[str, str]`, required.
    launcher : `str`, optional (default = PyTorch's own)
        The launcher.

    # Raises

    `ConfigurationError`
        If the variables are invalid.
    """
    rank, local_rank, size, local_size = (_integer(environ, name) for name in _VARIABLES[launcher])
    is_possible = 0 <= rank < size and local_size > 0 and size % local_size == 0
    if not is_possible or rank % local_size != local_rank:
        raise ConfigurationError(
            f"According to {launcher}, this is rank {rank} of {size}, and local rank {local_rank} "
            f"of {local_size}. Ranks must be from 0 to {size - 1} in the order of the nodes, with "
            "the same number of processes on each node, for example by srun's --ntasks-per-node "
            "and --distribution=block."
        )
    return LaunchedProcess(
        launcher=launcher,
        rank=rank,
        local_rank=local_rank,
        world_size=size,
        local_world_size=local_size,
        address=_address(environ, launcher, is_one_node=size == local_size),
        port=_port(environ, launcher, is_one_node=size == local_size),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    """Parses the integer of a variable, for which Slurm writes `4(x2)` if two nodes have it."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", environ[name])
    if match is None:
        raise ConfigurationError(
            f"The environment variable {name} is '{environ[name]}', but must be a number, and the "
            "same for each node if it is the number of processes per node."
        )
    return int(match[1])


def _address(environ: Mapping[str, str], launcher: str, is_one_node: bool) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if is_one_node:
        return "127.0.0.1"
    # The first of a list such as `gpu[003-005,9],login1`.
    nodes = environ.get("SLURM_STEP_NODELIST", "") if launcher == "srun" else ""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ConfigurationError(
            "There are processes on several nodes, but MASTER_ADDR is unset: set MASTER_ADDR to a "
            "name or address of the node of rank 0, and MASTER_PORT to a free port there, for all "
            "processes (Open MPI: -x MASTER_ADDR=..., MPICH: -genv MASTER_ADDR ...)."
        )
    return "".join(filter(None, match.groups()))


def _port(environ: Mapping[str, str], launcher: str, is_one_node: bool) -> int:
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT")
    if launcher == "srun":
        step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    elif launcher != _TORCH and is_one_node:
        # What mpirun's processes on a machine have in common.
        step = environ.get("PMIX_NAMESPACE", str(os.getppid()))
    else:
        return 0
    # Not `hash`, which is another in each process.
    return _FIRST_PORT + zlib.crc32(step.encode()) % _NUM_PORTS


def fill_distributed(params: Params, process: LaunchedProcess, arguments: Dict[str, Any]) -> None:
    """
    Fills the section "distributed" of a config from the launcher's environment.

    # Parameters

    params : `Params`, required.
        A complete training configuration. It is changed in place.
    process : `LaunchedProcess`, required.
        This process.
    arguments : `Dict[str, Any]`, required.
        The arguments of AllenNLP's `train_model`. `node_rank` is set.

    # Raises

    `ConfigurationError`
        If the config and the launcher contradict each other.
    """
    config = params.as_dict(quiet=True)
    distributed: Dict[str, Any] = config.get("distributed") or {}
    _check(distributed, process)
    devices = distributed.get("cuda_devices")
    address, port = process.address, process.port
    if not process.has_store:
        address = distributed.get("primary_address") or address
        port = distributed.get("primary_port") or port
    if not port:
        raise ConfigurationError(
            f"There are {process.world_size} processes, but no port for the rendezvous: set "
            "MASTER_PORT for all of them, or write 'distributed.primary_port'."
        )
    params["distributed"] = {
        **distributed,
        "cuda_devices": _devices(config, process) if devices is None else devices,
        "num_nodes": process.num_nodes,
        "primary_address": address,
        "primary_port": port,
    }
    arguments["node_rank"] = process.node_rank


def _check(distributed: Dict[str, Any], process: LaunchedProcess) -> None:
    devices: Any = distributed.get("cuda_devices")
    num_nodes = distributed.get("num_nodes")
    # One process on each node starts the others. Below torchrun it can't: the port is that of
    # torchrun's own store.
    is_agent = process.local_world_size == 1 and not process.has_store
    is_list = isinstance(devices, list) and len(devices) > 0
    if is_list and len(devices) != process.local_world_size and not is_agent:
        raise ConfigurationError(
            f"'distributed.cuda_devices' has {len(devices)} entries, but {process.launcher} "
            f"started {process.local_world_size} processes on each node: remove the key, or "
            "start as many processes (torchrun: --nproc-per-node)."
        )
    if num_nodes not in (None, process.num_nodes):
        raise ConfigurationError(
            f"'distributed.num_nodes' is {num_nodes}, but {process.launcher} started "
            f"{process.num_nodes} nodes: remove the key."
        )


def is_worker(config: Dict[str, Any], process: LaunchedProcess) -> bool:
    """
    Returns whether this process trains one rank. If not, it starts the workers of its node.

    # Parameters

    config : `Dict[str, Any]`, required.
        The config after `fill_distributed`.
    process : `LaunchedProcess`, required.
    """
    return len(config["distributed"]["cuda_devices"]) == process.local_world_size


def _devices(config: Dict[str, Any], process: LaunchedProcess) -> List[int]:
    """Returns the devices of a node's workers, by local rank."""
    trainer, size = config.get("trainer"), process.local_world_size
    wants_cpu = isinstance(trainer, dict) and trainer.get("cuda_device") == -1
    count = 0 if wants_cpu else torch.cuda.device_count()
    if count == 0:
        return [-1] * size
    # Where each process sees its own only, as with srun's --gpus-per-task, all are number 0.
    return list(range(size)) if count > 1 else [0] * size
