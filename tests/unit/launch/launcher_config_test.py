"""A launcher's environment in the section "distributed" of a config."""

from dataclasses import replace
from typing import Any, Dict, Optional

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import nodes
from allennlp_deepspeed.launch.agent import Node
from allennlp_deepspeed.launch.launcher import Launched
from allennlp_deepspeed.launch.launcher_config import into_config, is_worker

# The third of four processes on two nodes.
LAUNCHED = Launched("srun", 2, 0, 4, 2, "node-0", 23456)

ONE_A_NODE = Launched("srun", 1, 0, 2, 1, "node-0", 23456)


def filled(
    launched: Launched, distributed: Optional[Dict[str, Any]] = None, **arguments: Any
) -> Dict[str, Any]:
    config: Dict[str, Any] = {"trainer": {"type": "deepspeed", "cuda_device": -1}}
    if distributed is not None:
        config["distributed"] = distributed
    params = Params(config)
    into_config(params, launched, arguments)
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
    node = nodes.node(config, 1)
    assert node == Node(1, 2, 3, "node-0", 23456)


def test_where_to_meet_may_be_in_the_config() -> None:
    section = {"primary_address": "10.0.0.7", "primary_port": 1234}
    config = filled(LAUNCHED, section)
    assert config["distributed"]["primary_address"] == "10.0.0.7"
    assert config["distributed"]["primary_port"] == 1234


@pytest.mark.parametrize(
    "launched, section, arguments, message",
    [
        (LAUNCHED, {"cuda_devices": [0]}, {}, "'distributed.cuda_devices' has 1, but srun"),
        (
            replace(ONE_A_NODE, has_store=True),
            {"cuda_devices": [0, 1]},
            {},
            "'distributed.cuda_devices' has 2, .* --nproc-per-node",
        ),
        (ONE_A_NODE, {"cuda_devices": []}, {}, r"'distributed.cuda_devices' is \[\], but must be"),
        (LAUNCHED, {"cuda_devices": 0}, {}, "'distributed.cuda_devices' is 0, but must be a list"),
        (LAUNCHED, {"num_nodes": 4}, {}, "'distributed.num_nodes' is 4, but srun says 2"),
        (ONE_A_NODE, {}, {"node_rank": 2}, "'--node-rank' is 2, but srun says 1"),
        (
            replace(LAUNCHED, has_store=True),
            {"primary_port": 1},
            {},
            "'distributed.primary_port' is 1, but srun says 23456",
        ),
        (replace(LAUNCHED, port=0), {}, {}, "no port is known .* write MASTER_PORT"),
    ],
)
def test_contradictions_are_refused(
    launched: Launched, section: Dict[str, Any], arguments: Dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        filled(launched, section, **arguments)
