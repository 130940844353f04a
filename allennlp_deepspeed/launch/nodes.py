"""
Nodes of a training, from the config's section "distributed", `--node-rank` and a launcher's
environment.
"""

from typing import Any, Dict

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import DISTRIBUTED_KEYS
from allennlp_deepspeed.config.json_types import is_integer
from allennlp_deepspeed.config.key_validation import FORMER_KEYS, check_names, check_values
from allennlp_deepspeed.launch.agent import Node

# What others call the number of workers.
_NUMBERS_OF_WORKERS = {
    "num_workers",
    "num_processes",
    "num_gpus",
    "n_gpu",
    "world_size",
    "nproc_per_node",
    "num_gpus_per_node",
}

_LOCAL = ("127.0.0.1", "0.0.0.0", "localhost")


def check(distributed: Any, errors: ConfigErrors) -> None:
    """
    Checks the section "distributed".

    # Parameters

    distributed : `Any`, required.
        The section of the config, `None` if there is none.
    errors : `ConfigErrors`, required.
        Collects a line for each wrong key.
    """
    if not isinstance(distributed, dict):
        return
    keys = DISTRIBUTED_KEYS
    num_lines = len(errors.lines)
    for name in _NUMBERS_OF_WORKERS.intersection(distributed):
        errors.add(
            f"unknown key '{name}' in 'distributed': the entries of 'distributed.cuda_devices' are "
            "the workers of a node, such as [0, 1], or [-1, -1] on the CPU"
        )
    others = {key: v for key, v in distributed.items() if key not in _NUMBERS_OF_WORKERS}
    check_names("distributed", list(keys), others, errors)
    # An unknown key may be a misspelt "cuda_devices".
    required = {"cuda_devices": None} if len(errors.lines) == num_lines else {}
    check_values("distributed", keys, {**required, **distributed}, errors)
    if any(f"distributed.{name}" in FORMER_KEYS for name in distributed):
        return  # what follows is for nodes that torchrun doesn't start
    num_nodes = distributed.get("num_nodes", 1)
    restarts = distributed.get("max_restarts")
    if is_integer(restarts) and restarts > 0 and is_integer(num_nodes) and num_nodes > 1:
        errors.add(
            f"'distributed.max_restarts' is {restarts}, but is for one node, and "
            f'\'distributed.num_nodes\' is {num_nodes}: remove it, write "resume": "auto" '
            f"in 'trainer', and start `torchrun --nnodes {num_nodes} --max-restarts {restarts} "
            "... -m allennlp train ...` on each node."
        )
    for key in ("primary_address", "primary_port"):
        if num_nodes != 1 and not distributed.get(key):
            errors.add(
                f"'distributed.num_nodes' is {num_nodes}, but 'distributed.{key}' is unset: write "
                f"{'an address' if key == 'primary_address' else 'a port'} of node 0 that all "
                "nodes can reach, the same on each."
            )


def setting(distributed: Dict[str, Any], name: str) -> Any:
    """Returns the value of one of `DISTRIBUTED_KEYS`, or its default."""
    return distributed.get(name, DISTRIBUTED_KEYS[name].default)


def num_workers(config: Dict[str, Any]) -> int:
    """Returns the number of workers on all nodes."""
    distributed = config.get("distributed")
    if not distributed:
        return 1
    return len(distributed.get("cuda_devices") or []) * distributed.get("num_nodes", 1)


def has_workers(config: Dict[str, Any]) -> bool:
    """
    Returns whether several workers train. AllenNLP itself checks the settings of a single one.
    """
    return num_workers(config) > 1


def local_node(config: Dict[str, Any], node_rank: int) -> Node:
    """
    Returns the node whose workers this process starts.

    # Parameters

    config : `Dict[str, Any]`, required.
        A config that has been checked, and for which `has_workers` is true.
    node_rank : `int`, required.

    # Raises

    `ConfigurationError`
        If there is no such node.
    """
    distributed = config["distributed"]
    num_nodes = distributed.get("num_nodes", 1)
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(
            f"--node-rank is {node_rank}, but 'distributed.num_nodes' is {num_nodes}: write a "
            f"number from 0 to {num_nodes - 1}."
        )
    address = distributed.get("primary_address", _LOCAL[0])
    names = ("shutdown_timeout", "max_restarts")
    return Node(
        rank=node_rank,
        num_nodes=num_nodes,
        num_workers=len(distributed["cuda_devices"]),
        address=_LOCAL[0] if address in _LOCAL else address,
        port=distributed.get("primary_port") or 0,
        **{name: setting(distributed, name) for name in names},
    )
