"""
The nodes of a training, as the section "distributed" of its config and `--node-rank` say them.
"""

from typing import Any, Dict, Optional

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.keys import check_names, check_values
from allennlp_deepspeed.config.own_keys import ALLENNLP_DISTRIBUTED_KEYS, DISTRIBUTED_KEYS
from allennlp_deepspeed.processes.membership import Limits, Member

_LOCAL = ("127.0.0.1", "0.0.0.0", "localhost")


def check(distributed: Any, findings: Findings) -> None:
    """
    # Parameters

    distributed : `Any`, required.
        The section of the config, `None` if there is none.
    findings : `Findings`, required.
        Gets a line for each key that is wrong.
    """
    if not isinstance(distributed, dict):
        return
    keys = {**ALLENNLP_DISTRIBUTED_KEYS, **DISTRIBUTED_KEYS}
    check_names("distributed", "section 'distributed'", list(keys), distributed, findings)
    check_values("distributed", keys, {"cuda_devices": None, **distributed}, findings)
    num_nodes = distributed.get("num_nodes", 1)
    for key in ("primary_address", "primary_port"):
        if num_nodes != 1 and distributed.get(key) is None:
            findings.add(
                f"'distributed.num_nodes' is {num_nodes}, but there is no 'distributed.{key}': "
                f"write {'an address' if key == 'primary_address' else 'a port'} of node 0 that "
                "all nodes can connect to, the same on each."
            )


def member(config: Dict[str, Any], node_rank: int) -> Optional[Member]:
    """
    What this process is among those that have been started, one on each node. `None` if it trains
    by itself.

    # Parameters

    config : `Dict[str, Any]`, required.
        That has been checked.
    node_rank : `int`, required.

    # Raises

    `ConfigurationError`
        If there is no such node.
    """
    distributed = config.get("distributed")
    num_workers = len((distributed or {}).get("cuda_devices") or [])
    num_nodes = (distributed or {}).get("num_nodes", 1)
    if distributed is None or num_workers * num_nodes < 2:
        return None  # of which AllenNLP says what is wrong
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(
            f"--node-rank is {node_rank}, but 'distributed.num_nodes' is {num_nodes}: write one "
            f"from 0 to {num_nodes - 1}."
        )
    address = distributed.get("primary_address", _LOCAL[0])
    first = node_rank * num_workers
    return Member(
        ranks=tuple(range(first, first + num_workers)),
        world_size=num_workers * num_nodes,
        address=_LOCAL[0] if address in _LOCAL else address,
        port=distributed.get("primary_port") or 0,
        serves=node_rank == 0,
        limits=limits(distributed),
    )


def limits(distributed: Dict[str, Any]) -> Limits:
    """How long to wait, of the section "distributed"."""
    return Limits(
        **{name: distributed.get(name, key.default) for name, key in DISTRIBUTED_KEYS.items()}
    )
