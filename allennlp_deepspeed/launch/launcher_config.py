"""
Trainings whose processes a launcher has started. What the launcher's environment says becomes the
section "distributed" of the config. If there is one process for each worker, it is the worker; if
there is one on each node, it starts the node's.
"""

import json
import logging
from typing import Any, Dict, List, Tuple

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch.launcher import Launched

logger = logging.getLogger(__name__)


def into_config(params: Params, launched: Launched, arguments: Dict[str, Any]) -> None:
    """
    # Parameters

    params : `Params`, required.
        A whole training configuration. What `launched` says is written into it.
    launched : `Launched`, required.
        What a launcher says of this process.
    arguments : `Dict[str, Any]`, required.
        Those of AllenNLP's `train_model`. `node_rank` is set.

    # Raises

    `ConfigurationError`
        If they contradict one another.
    """
    config = params.as_dict(quiet=True)
    distributed: Dict[str, Any] = config.get("distributed") or {}
    devices = distributed.get("cuda_devices")
    if devices is None:
        devices = _devices(config, launched)
    elif not isinstance(devices, list) or not devices:
        raise ConfigurationError(
            f"'distributed.cuda_devices' is {json.dumps(devices)}, but must be a list with a "
            "device for each worker of a node, -1 for the CPU: write that, or leave it out."
        )
    elif launched.local_world_size != len(devices) and not _may_start_workers(launched):
        raise ConfigurationError(
            f"'distributed.cuda_devices' has {len(devices)}, but {launched.launcher} has started "
            f"{launched.local_world_size} processes on each node: leave the key out, or have as "
            "many started (torchrun: --nproc-per-node)."
        )
    for key in ("min_nodes", "rendezvous_endpoint"):
        if distributed.get(key) is not None:
            raise ConfigurationError(
                f"'distributed.{key}' is for nodes on which 'allennlp train' is started by itself, "
                f"but {launched.launcher} has started this process: leave it out (torchrun has "
                "--nnodes MIN:MAX and --rdzv-endpoint)."
            )
    address, port = _where(distributed, launched)
    _check_same("distributed.num_nodes", distributed.get("num_nodes"), launched.num_nodes, launched)
    node_rank = arguments.get("node_rank") or None
    _check_same("--node-rank", node_rank, launched.node_rank, launched)
    params["distributed"] = {
        **distributed,
        "cuda_devices": devices,
        "num_nodes": launched.num_nodes,
        "primary_address": address,
        "primary_port": port,
    }
    arguments["node_rank"] = launched.node_rank
    logger.info(
        "%s has started this process as number %d of %d.",
        launched.launcher,
        launched.rank,
        launched.world_size,
    )


def is_worker(config: Dict[str, Any], launched: Launched) -> bool:
    """
    Whether this process trains one rank. Otherwise it starts the workers of its node.

    # Parameters

    config : `Dict[str, Any]`, required.
        After `into_config`.
    launched : `Launched`, required.
    """
    return len(config["distributed"]["cuda_devices"]) == launched.local_world_size


def _may_start_workers(launched: Launched) -> bool:
    """
    Whether this process can be the agent of its node. Below another agent, which has a store, it
    can't: the store of a start that has ended is closed, so that a restart would find no others.
    """
    return launched.local_world_size == 1 and not launched.has_store


def _where(distributed: Dict[str, Any], launched: Launched) -> Tuple[str, int]:
    """Where the processes meet."""
    address, port = distributed.get("primary_address"), distributed.get("primary_port")
    if launched.has_store:
        # Nothing else is there.
        _check_same("distributed.primary_address", address, launched.address, launched)
        _check_same("distributed.primary_port", port, launched.port, launched)
    address, port = address or launched.address, port or launched.port
    if not port:
        raise ConfigurationError(
            f"{launched.launcher} has started {launched.world_size} processes, but no port is "
            "known at which they can meet: write MASTER_PORT into the environment of all, or "
            "'distributed.primary_port' into the config."
        )
    return address, port


def _check_same(key: str, said: Any, launchers: Any, launched: Launched) -> None:
    if said not in (None, launchers):
        raise ConfigurationError(
            f"'{key}' is {said}, but {launched.launcher} says {launchers}: leave it out."
        )


def _devices(config: Dict[str, Any], launched: Launched) -> List[int]:
    """Of the workers of a node, by local rank."""
    trainer = config.get("trainer")
    wants_cpu = isinstance(trainer, dict) and trainer.get("cuda_device") == -1
    count = 0 if wants_cpu else torch.cuda.device_count()
    size = launched.local_world_size
    if count == 0:
        return [-1] * size
    if count >= size:
        return list(range(size))
    if count == 1:
        # Each process sees its own only, as with srun's --gpus-per-task.
        return [0] * size
    raise ConfigurationError(
        f"{launched.launcher} has started {size} processes on this node, but it has {count} GPUs: "
        "have as many started, or write 'distributed.cuda_devices', with -1 for the CPU."
    )
