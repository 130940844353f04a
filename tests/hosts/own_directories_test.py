"""Hosts without a file system in common: each has a serialization directory of its own."""

import shutil
from pathlib import Path
from typing import Any, Callable, List

import pytest
from filelock import FileLock

from allennlp_deepspeed.checkpoint.commit_record import CommitRecord
from tests.support.command import Run, allennlp
from tests.support.experiment import (
    INCLUDED,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Hosts, on_one_host, write_config

CHECKPOINTS = {
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": None},
    "trainer.moving_average": {"decay": 0.9},
}
NEWEST = "checkpoint_e1_b2"
INCLUDED_PACKAGES = ("allennlp_deepspeed", INCLUDED)


class Training:
    """
    A training on two hosts that has ended after `checkpoint_e1_b2`, and the weights with which one
    that nothing has ended does.
    """

    def __init__(self, hosts: Hosts, config: Config, weights: Any, directory: Path) -> None:
        self.hosts = hosts
        self.config = config
        self.weights = weights
        self.directories = directories_in(directory)

    def checkpoint(self, host: int) -> Path:
        return self.directories[host] / NEWEST

    def recover(self, directories: List[Path]) -> List[Run]:
        return self.hosts.train(self.config, directories, "--recover")

    def check_same_end(self, runs: List[Run], directories: List[Path]) -> None:
        for run, directory in zip(runs, directories):
            run.check()
            assert_same_weights(Result(directory).weights(), self.weights, tolerance=0)


def directories_in(root: Path) -> List[Path]:
    return [root / "of-host-0", root / "of-host-1"]


def train_on(hosts: Hosts, config: Config, root: Path, weights: Any) -> None:
    """Trains, and removes what comes after `NEWEST`."""
    directories = directories_in(root)
    for run in hosts.train(config, directories):
        run.check()
    for directory in directories:
        assert_same_weights(Result(directory).weights(), weights, tolerance=0)
        Result(directory).archive.unlink()
        for name in ("checkpoint_e1_b4", "checkpoint_e2_b0"):
            shutil.rmtree(directory / name, ignore_errors=True)


@pytest.fixture
def train(
    two_hosts: Hosts, experiments: Experiments, session_directory: Path, tmp_path: Path
) -> Callable[[int], Training]:
    """Trains at a ZeRO stage, once a test session, and copies what that leaves."""

    def train(stage: int) -> Training:
        config = deepspeed(load_config("tagger", CHECKPOINTS), stage)
        weights = experiments.run(on_one_host(config)).weights()
        trained = session_directory / "own_directories" / str(stage)
        trained.mkdir(parents=True, exist_ok=True)
        with FileLock(trained / "lock"):
            if not (trained / "done").exists():
                train_on(two_hosts, config, trained, weights)
                (trained / "done").touch()
        for directory in directories_in(trained):
            shutil.copytree(directory, tmp_path / directory.name)
        return Training(two_hosts, config, weights, tmp_path)

    return train


def test_each_host_continues_with_its_own_files(train: Callable[[int], Training]):
    training = train(3)
    records = [CommitRecord.read(str(training.checkpoint(host))) for host in (0, 1)]
    assert [record.ranks for record in records] == [[0, 1], [2, 3]]
    assert records[0].id == records[1].id
    # As if it had not been written there.
    newest = training.checkpoint(1)
    newest.rename(newest.with_suffix(".unfinished"))
    (newest.with_suffix(".unfinished") / "commit_w2.json").write_text("{")
    runs = training.recover(training.directories)
    training.check_same_end(runs, training.directories)
    first = training.checkpoint(0)
    assert f"{first} exists for ranks 0, 1 on host-0" in runs[0].output
    older = first.with_name("checkpoint_e1_b0")
    assert f"ranks 2, 3 on host-1 have not. Resuming from {older} " in runs[0].output


@pytest.mark.parametrize("stage", [2, 3])
def test_what_one_host_has_committed_when_the_other_died_is_continued_from(
    train: Callable[[int], Training], stage: int
):
    training = train(stage)
    # The first commit, so that the other host has no checkpoint at all.
    for directory in training.directories:
        for checkpoint in directory.glob("checkpoint_*"):
            if checkpoint.name != NEWEST:
                shutil.rmtree(checkpoint)
    unfinished = training.checkpoint(1).with_suffix(".unfinished")
    training.checkpoint(1).rename(unfinished)
    training.config["trainer"]["resume"] = "auto"
    runs = training.recover(training.directories)
    training.check_same_end(runs, training.directories)
    assert f"Committing {unfinished}, which other nodes have committed" in runs[1].output


def test_copied_into_one_directory_they_are_continued_from_on_one_host(
    train: Callable[[int], Training], tmp_path: Path
):
    training = train(3)
    whole = tmp_path / "whole"
    for directory in training.directories:
        shutil.copytree(directory, whole, dirs_exist_ok=True)
    path = write_config(on_one_host(training.config), whole)
    allennlp("train", path, "-s", whole, "--recover", include_packages=INCLUDED_PACKAGES).check()
    assert_same_weights(Result(whole).weights(), training.weights, tolerance=0)


def test_a_command_that_is_not_given_all_parts_names_the_hosts(train: Callable[[int], Training]):
    training = train(3)
    run = allennlp("deepspeed", "export", training.directories[0])
    assert run.returncode == 1
    assert "has the files of ranks 0, 1 of 4 (written on host-0)" in run.output
    assert "the files of ranks 2, 3 of 4 (written on host-1)" in run.output


def check_refused(runs: List[Run], *messages: str) -> None:
    for run in runs:
        assert run.returncode == 1
        for message in (*messages, "rsync -a host:DIRECTORY/"):
            assert message in run.output


def test_other_ranks_are_refused_with_the_hosts_that_have_the_files(
    train: Callable[[int], Training],
):
    training = train(3)
    check_refused(
        training.recover(training.directories[::-1]),
        "has the files of ranks 2, 3 of 4 (written on host-1), but ranks 0, 1 of 4 are resuming on",
        "has the files of ranks 0, 1 of 4 (written on host-0), but ranks 2, 3 of 4 are resuming on",
    )
    for directory in training.directories:
        assert (directory / NEWEST).is_dir()


def test_without_the_files_of_a_host_it_is_said_whose_are_missing(
    train: Callable[[int], Training],
):
    training = train(3)
    for checkpoint in training.directories[1].glob("checkpoint_*"):
        shutil.rmtree(checkpoint)
    check_refused(
        training.recover(training.directories),
        f"{NEWEST} exists for ranks 0, 1 on host-0, and ranks 2, 3 on host-1 have not",
    )
