"""With `max_restarts` workers of all hosts are restarted, and end as if nothing had happened."""

from pathlib import Path

import pytest

from tests.support.experiment import (
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Hosts, on_one_host

CONFIG = deepspeed(load_config("classifier"), 2)
KILL = {"type": "send_signal", "signal_name": "SIGKILL", "rank": 3}


@pytest.mark.parametrize(
    "point, after, flags",
    [
        ("step 2 of epoch 1", "checkpoint_e1_b0", []),
        ("step 2 of epoch 1", "checkpoint_e1_b0", ["--force"]),
        ("step 2 of epoch 0", None, ["--force"]),
    ],
)
def test_a_killed_worker_is_replaced_on_all_hosts(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, point: str, after: str, flags: list
) -> None:
    kill = {**KILL, "point": point, "after": after}
    distributed = {**two_hosts.distributed(), "max_restarts": 1}
    trainer = {**CONFIG["trainer"], "callbacks": ["record_steps", kill]}
    directory = tmp_path / "shared"
    if flags:
        directory.mkdir()
        (directory / "config.json").write_text("of a former training")
    config = {**CONFIG, "trainer": trainer, "distributed": distributed}
    runs = [run.check() for run in two_hosts.train(config, [directory, directory], *flags)]
    assert "Rank 3 on host-1 was ended by SIGKILL" in runs[1].output
    assert "Restarts left after this one: 0" in runs[1].output
    expected = experiments.run(on_one_host(CONFIG))
    assert_same_weights(Result(directory).weights(), expected.weights(), tolerance=0)
    assert Result(directory).epochs() == expected.epochs()
