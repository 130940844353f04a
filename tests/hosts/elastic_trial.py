"""
Trainings on three hosts with `min_nodes` and `max_restarts`, in which a worker, an agent or a host
is killed at a moment drawn at random. What is expected of each: that it comes to the weights of a
training without a fault, to float tolerance, and leaves nothing.
"""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import List, NamedTuple

import psutil

from tests.hosts.elastic_nodes_test import STORE_PORT, experiment, start_store
from tests.hosts.trial import Moment, Outcome
from tests.support.command import Command, wait_for_all
from tests.support.experiment import Config, Result, assert_same_weights
from tests.support.hosts import Hosts, write_config

NUM_NODES, NUM_EPOCHS, STEPS_IN_EPOCH = 3, 4, 7
PAUSE = 0.3

SHARED_MEMORY = Path("/dev/shm")

# Seconds, for a training with a fault.
TIME_LIMIT = 180

KINDS = ("kill a worker", "kill an agent", "kill a node")

# The sums of gradients are of other parts with another number of workers.
PLAIN: Config = {
    "trainer.optimizer": {"type": "sgd", "lr": 0.5},
    "trainer.num_epochs": NUM_EPOCHS,
    "trainer.callbacks": [{"type": "tell_steps", "pause": PAUSE}],
}


class ElasticTrial(NamedTuple):
    """
    # Parameters

    stage : `int`
        Of ZeRO.
    kind : `str`
        One of `KINDS`.
    node : `int`
        That has the fault. It may be node 0, because the store is elsewhere.
    moment : `Moment`
    comes_back : `bool`
        Whether the node is started again when it is lost.
    """

    stage: int
    kind: str
    node: int
    moment: Moment
    comes_back: bool

    def __str__(self) -> str:
        back = ", and start it again" if self.comes_back else ""
        return f"stage {self.stage}, {self.kind}: node {self.node} {self.moment}{back}"


def draw(generator: random.Random, stage: int, kind: str) -> ElasticTrial:
    if generator.random() < 0.2:
        moment = Moment(None, generator.uniform(0, 4))
    else:
        epoch, step = divmod(generator.randrange(NUM_EPOCHS * STEPS_IN_EPOCH), STEPS_IN_EPOCH)
        moment = Moment(f"step {step + 1} of epoch {epoch}", generator.uniform(0, PAUSE))
    comes_back = kind != "kill a worker" and generator.random() < 0.5
    return ElasticTrial(stage, kind, generator.randrange(NUM_NODES), moment, comes_back)


def one_host(stage: int) -> Config:
    return experiment(stage, {"cuda_devices": [-1] * NUM_NODES}, PLAIN)


def run_elastic_trial(trial: ElasticTrial, expected: Result, directory: Path) -> Outcome:
    """Arguments are those of `run_trial`."""
    # Its own for the trial, unless it is where the trial's files are.
    is_seen = SHARED_MEMORY not in directory.parents
    hosts = Hosts(NUM_NODES + 1, directory, {SHARED_MEMORY: 2**28} if is_seen else {})
    try:
        store_host = hosts[NUM_NODES]
        store = start_store(store_host)
        try:
            distributed = {
                "cuda_devices": [-1],
                "num_nodes": NUM_NODES,
                "min_nodes": 1,
                "max_restarts": 3,
                "rendezvous_timeout": 60,
                "rendezvous_endpoint": f"{store_host.address}:{STORE_PORT}",
            }
            config = experiment(trial.stage, distributed, PLAIN)
            outcome = _run(trial, hosts, config, expected, directory)
            left = list(hosts.seen(SHARED_MEMORY).iterdir()) if is_seen else []
            if left:
                outcome.problems.append(f"Shared memory is left: {left}")
            return outcome
        finally:
            store.kill()
            store.wait()
    finally:
        hosts.remove()


def _run(
    trial: ElasticTrial, hosts: Hosts, config: Config, expected: Result, directory: Path
) -> Outcome:
    path = write_config(config, directory / "config")
    temporary = directory / "tmp"
    temporary.mkdir()

    def start(node: int) -> Command:
        environment = {"TMPDIR": str(temporary)}
        return hosts[node].train(path, directory / "out", environment=environment)

    commands = [start(node) for node in range(NUM_NODES)]
    trial.moment.wait(commands)
    begin = time.monotonic()
    _kill(trial, commands[trial.node])
    if trial.comes_back:
        time.sleep(random.uniform(0, 15))
        commands.append(start(trial.node))
    runs = wait_for_all(commands, TIME_LIMIT)
    problems: List[str] = []
    for i, run in enumerate(runs):
        is_killed = i == trial.node and trial.kind != "kill a worker"
        # One that comes back may come after the end.
        is_late = i == NUM_NODES and re.search("ended the training|already exists", run.output)
        if run.timed_out or run.processes:
            problems.append(f"node {i} is still there: {run.processes}\n{run.output[-6000:]}")
        elif run.returncode != 0 and not is_killed and not is_late:
            problems.append(f"node {i} failed\n{run.output[-6000:]}")
    for host in hosts.hosts[:NUM_NODES]:
        listening = subprocess.run(host.command("ss", "-ltnH"), capture_output=True, text=True)
        if listening.stdout:
            problems.append(f"{host.name} has ports: {listening.stdout}")
    # An agent that is killed can't remove its own.
    left = list(temporary.glob("allennlp_deepspeed_*"))
    if len(left) > (trial.kind != "kill a worker"):
        problems.append(f"Files are left: {left}")
    try:
        assert_same_weights(Result(directory / "out").weights(), expected.weights())
    except (AssertionError, OSError) as error:
        outputs = "\n".join(run.output[-6000:] for run in runs)
        problems.append(f"{error}\n{outputs}")
    return Outcome([time.monotonic() - begin], [float(TIME_LIMIT)], problems)


def _kill(trial: ElasticTrial, command: Command) -> None:
    if trial.kind == "kill a node":
        command.signal(signal.SIGKILL)
        return
    pid = command.pid
    if trial.kind == "kill a worker":
        workers = psutil.Process(pid).children()
        if not workers:
            return  # it hasn't started any yet
        pid = workers[-1].pid
    os.kill(pid, signal.SIGKILL)
