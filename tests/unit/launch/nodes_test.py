"""What is said of the section "distributed", and what nodes have to have alike."""

import copy
from typing import Any, Dict, List

import pytest
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.launch import node_comparison, nodes
from allennlp_deepspeed.launch.agent import Node
from allennlp_deepspeed.versions import differences
from tests.support.experiment import Config, deepspeed, load_config

TWO_NODES: Config = {
    "cuda_devices": [0, 1],
    "num_nodes": 2,
    "primary_address": "10.0.0.1",
    "primary_port": 29500,
}


@pytest.mark.parametrize(
    "section, expected",
    [
        ({"timeuot": 60}, 'did you mean "timeout"?'),
        ({"cuda_devices": [0, -1]}, "'distributed.cuda_devices' is [0, -1], but workers on GPUs"),
        ({"timeout": 0}, "'distributed.timeout' is 0: must be a number of seconds above 0"),
        ({"max_restarts": -1}, "'distributed.max_restarts' is -1: must be an integer, at least 0"),
        ({"primary_port": 0}, "'distributed.primary_port' is unset"),
        ({"primary_port": None}, "'distributed.primary_port' is unset: write a port of node 0"),
        ({"primary_address": None}, "'distributed.primary_address' is unset"),
        ({"min_nodes": 1}, "'distributed.min_nodes' no longer exists"),
        ({"rendezvous_endpoint": "host:1"}, "'distributed.rendezvous_endpoint' no longer exists"),
        ({"max_restarts": 3}, "start `torchrun --nnodes 2 --max-restarts 3"),
    ],
)
def test_what_is_wrong_with_the_section_is_said(section: Config, expected: str) -> None:
    errors = ConfigErrors()
    nodes.check({**TWO_NODES, **section}, errors)
    assert len(errors.lines) == 1 and expected in errors.lines[0]


def test_the_section_says_who_the_process_is() -> None:
    section = {**TWO_NODES, "shutdown_timeout": 10.5}
    nodes.check(section, ConfigErrors())
    node = nodes.local_node({"distributed": section}, node_rank=1)
    assert node == Node(1, 2, 2, "10.0.0.1", 29500, shutdown_timeout=10.5)
    assert nodes.has_workers({"distributed": section})
    assert not nodes.has_workers({"distributed": {"cuda_devices": [0]}})
    assert not nodes.has_workers({"trainer": {}})


def test_without_an_address_the_node_is_alone_and_any_port_will_do() -> None:
    node = nodes.local_node({"distributed": {"cuda_devices": [-1, -1]}}, 0)
    assert node == Node(0, 1, 2, "127.0.0.1", 0)


@pytest.mark.parametrize("node_rank", [-1, 2])
def test_a_node_that_there_is_not_is_refused(node_rank: int) -> None:
    with pytest.raises(ConfigurationError, match="write a number from 0 to 1"):
        nodes.local_node({"distributed": TWO_NODES}, node_rank)


def difference(config: Config, other: Config) -> List[str]:
    prints = [
        (name, node_comparison.comparable_values(c, {}))
        for name, c in (("a", config), ("b", other))
    ]
    return differences(prints)


@pytest.fixture
def config() -> Config:
    config = deepspeed(load_config("classifier"), 2, nvme_path="/local_a")
    return {**config, "distributed": dict(TWO_NODES)}


@pytest.mark.parametrize(
    "path, value",
    [
        ("trainer.optimizer.lr", 0.5),
        ("trainer.deepspeed_config.zero_optimization.stage", 3),
        ("distributed.num_nodes", 3),
        ("trainer.callbacks.0", "track_epoch_callback"),
    ],
)
def test_another_value_on_one_node_is_named(config: Config, path: str, value: Any) -> None:
    other = copy.deepcopy(config)
    section: Dict[str, Any] = other
    *sections, key = path.split(".")
    for name in sections:
        section = section[name]
    section[int(key) if isinstance(section, list) else key] = value  # type: ignore[index]
    [line] = difference(config, other)
    assert line.startswith(f"'{path}' is ") and " on a, " in line and line.endswith(" on b")


def test_paths_addresses_and_devices_may_be_others(config: Config) -> None:
    other = copy.deepcopy(config)
    other["distributed"].update(cuda_devices=[2, 3], primary_address="node-0", primary_port=1)
    other["train_data_path"] = "elsewhere/train.jsonl"
    other["trainer"]["deepspeed_config"]["nvme_path"] = "/local_b"
    config["model"]["pretrained"] = "/models/a"
    other["model"]["pretrained"] = "/models/b"
    config["trainer"]["callbacks"] = [{"type": "a", "log_dir": "a", "files": ["/tmp/a"]}]
    other["trainer"]["callbacks"] = [{"type": "a", "log_dir": "b"}]
    config["datasets"], other["datasets"] = ["/data/a"], ["/data/b"]
    config["test_data_path"], other["test_data_path"] = {"one": "a"}, {"one": "b"}
    assert difference(config, other) == []


def test_a_training_that_is_recovered_on_one_node_only_is_named(config: Config) -> None:
    prints = [
        (name, node_comparison.comparable_values(config, {"recover": recover}))
        for name, recover in (("a", True), ("b", False))
    ]
    assert differences(prints) == ["'--recover' is true on a, false on b"]


def test_other_versions_are_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    first = node_comparison.comparable_values(config, {})
    monkeypatch.setattr("allennlp_deepspeed.versions.version", lambda _: "0.0.1")
    lines = differences([("a", first), ("b", node_comparison.comparable_values(config, {}))])
    for package in ("torch", "deepspeed", "allennlp", "transformers"):
        assert any(line.startswith(f"'version of {package}' is ") for line in lines)
