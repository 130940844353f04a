"""Hosts that share one serialization directory, as by NFS."""

import shutil
from pathlib import Path

from tests.support.experiment import (
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Hosts, on_one_host

CHECKPOINTS = {
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": None}
}


def test_one_host_makes_the_directory_and_all_continue_in_it(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path
):
    plain = load_config("tagger", CHECKPOINTS)
    expected = experiments.run(on_one_host(deepspeed(plain, 2)))
    config = deepspeed(plain, 2, checkpoint={"use_node_local_storage": True})
    shared = Result(tmp_path / "shared")
    directories = [shared.serialization_dir] * 2
    for run in two_hosts.train(config, directories):
        run.check()
    assert_same_weights(shared.weights(), expected.weights(), tolerance=0)
    assert_same_metrics(shared.metrics_of_epochs(), expected.metrics_of_epochs(), tolerance=0)
    log = (shared.serialization_dir / "out_worker2_host-1.log").read_text()
    assert all(line.startswith("2 host-1 | ") for line in log.splitlines() if " - INFO - " in line)
    assert "All ranks share one serialization directory. 'trainer.deepspeed_config" in log

    for run in two_hosts.train(config, directories):
        assert run.returncode == 1
        assert "already exists" in run.output

    shared.archive.unlink()
    for newer in ("checkpoint_e1_b4", "checkpoint_e2_b0"):
        shutil.rmtree(shared.serialization_dir / newer, ignore_errors=True)
    for run in two_hosts.train(config, directories, "--recover"):
        run.check()
        assert f"Loading checkpoint {directories[0]}/checkpoint_e1_b2" in run.output
    assert_same_weights(shared.weights(), expected.weights(), tolerance=0)
    assert_same_metrics(shared.metrics_of_epochs(), expected.metrics_of_epochs(), tolerance=0)
