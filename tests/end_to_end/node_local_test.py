"""Two nodes without a file system in common, here two commands with a directory each."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

from allennlp.common.util import find_open_port

from tests.support.command import Run, allennlp
from tests.support.experiment import (
    INCLUDED,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)

CHECKPOINTS = {
    "trainer.checkpointer": {"save_every_num_batches": 3, "keep_most_recent_by_count": None},
    "trainer.moving_average": {"decay": 0.9},
}
NODES = range(2)


def train_on_two_nodes(config: Dict[str, Any], directory: Path, *arguments: str) -> List[Run]:
    path = directory / "config.json"
    path.write_text(json.dumps(config))

    def train(node: int) -> Run:
        return allennlp(
            "train",
            path,
            "-s",
            directory / f"node_{node}",
            "--node-rank",
            node,
            *arguments,
            include_packages=("allennlp_deepspeed", INCLUDED),
        )

    with ThreadPoolExecutor() as pool:
        return [run.check() for run in pool.map(train, NODES)]


def test_nodes_without_a_shared_directory_recover_from_what_all_of_them_hold(
    experiments: Experiments, tmp_path: Path
):
    config = load_config("tagger", CHECKPOINTS)
    two_workers = {**config, "distributed": {"cuda_devices": [-1, -1]}}
    expected = experiments.run(deepspeed(two_workers, 3)).weights()
    config = deepspeed(config, 3, checkpoint={"use_node_local_storage": True})
    config["distributed"] = {
        "cuda_devices": [-1],
        "num_nodes": len(NODES),
        "primary_address": "127.0.0.1",
        "primary_port": find_open_port(),
    }
    train_on_two_nodes(config, tmp_path)
    results = [Result(tmp_path / f"node_{node}") for node in NODES]
    for node, result in zip(NODES, results):
        assert_same_weights(result.weights(), expected, tolerance=0)
        # As if both had died, the first after it had committed e1_b6 and the second before.
        result.archive.unlink()
        for newer in ("checkpoint_e2_b0", "checkpoint_e1_b6")[: 1 + node]:
            shutil.rmtree(result.serialization_dir / newer)

    for result, run in zip(results, train_on_two_nodes(config, tmp_path, "--recover")):
        common = result.serialization_dir / "checkpoint_e1_b3"
        assert f"Continuing from the checkpoint in {common}" in run.output
        assert_same_weights(result.weights(), expected, tolerance=0)
