"""A host that is killed while it trains."""

import random
import signal
from pathlib import Path

import pytest

from tests.support.experiment import (
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import TIME_LIMIT, Hosts, on_one_host, wait_for_all, write_config

CHECKPOINTS = {
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": 2},
    "trainer.num_epochs": 4,
}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_all_recover_bitwise_after_a_host_was_killed(
    experiments: Experiments,
    two_hosts: Hosts,
    tmp_path: Path,
    stage: int,
    is_shared: bool,
    seed: int,
):
    config = deepspeed(load_config("tagger", CHECKPOINTS), stage)
    one_host = experiments.run(on_one_host(config))
    directories = [tmp_path / ("shared" if is_shared else host.name) for host in two_hosts.hosts]
    config["distributed"] = two_hosts.distributed()
    path = write_config(config, directories[0])
    generator = random.Random(f"{stage} {is_shared} {seed}")
    for recovers in (False, True):
        commands = [
            host.train(path, directory, *["--recover"][: int(recovers)])
            for host, directory in zip(two_hosts.hosts, directories)
        ]
        killed, epoch = generator.choice(commands), generator.choice([1, 2])
        killed.wait_until_it_prints(f"Epoch {epoch + recovers}/3")
        killed.signal(signal.SIGKILL)
        for run in wait_for_all(commands, TIME_LIMIT):
            assert run.returncode != 0 and not run.timed_out, run.output[-6000:]
            assert not run.processes

    for run in two_hosts.train(config, directories, "--recover"):
        run.check()
        assert "Continuing from the checkpoint in" in run.output
    for directory in directories:
        assert_same_weights(Result(directory).weights(), one_host.weights(), tolerance=0)
