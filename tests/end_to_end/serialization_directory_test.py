"""A serialization directory is that of one training, with the vocabulary that it was begun with."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp.common.util import find_open_port

from tests.support.command import Command, Run, allennlp, wait_for_all
from tests.support.experiment import (
    INCLUDED,
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
    write_config,
)

NAMES = ("allennlp_deepspeed", INCLUDED)
ONE_EPOCH = {"trainer.num_epochs": 1}


def tagger(workers: Dict[str, Any], *overrides: Config) -> Config:
    return deepspeed(load_config("tagger", workers, *overrides), 2)


def test_a_second_training_is_refused_and_the_first_not_harmed(
    experiments: Experiments, tmp_path: Path
) -> None:
    slow = {"type": "tell_steps", "pause": 1.5}
    plain = tagger(TWO_WORKERS, ONE_EPOCH)
    config = {**plain, "trainer": {**plain["trainer"], "callbacks": ["record_steps", slow]}}
    path, out = write_config(config, tmp_path), tmp_path / "out"
    first = Command("train", path, "-s", out, include_packages=NAMES)
    first.wait_until_it_prints("step 1 of epoch 0")
    before = {name.name for name in out.iterdir()}
    for flag in ("--recover", "--force"):
        second = allennlp("train", path, "-s", out, flag, include_packages=NAMES)
        assert second.returncode == 1 and "Traceback" not in second.output
        assert f"Another training writes to {out}: process " in second.output
        assert f" on {socket.gethostname()}" in second.output
        assert before <= {name.name for name in out.iterdir()}
    assert first.is_running
    wait_for_all([first], 60)[0].check()
    assert not list(out.glob("*.lock"))
    weights = experiments.run(plain).weights()
    assert_same_weights(Result(out).weights(), weights, tolerance=0)


def assert_other_vocabulary(run: Run, checkpoint: Path) -> None:
    assert run.returncode == 1
    assert "Traceback" not in run.output, run.output[-3000:]
    assert f"{checkpoint} was trained with another vocabulary" in run.output
    assert f"{checkpoint.parent}/vocabulary/tokens.txt" in run.output


@pytest.mark.parametrize("workers", [ONE_PROCESS, TWO_WORKERS], ids=["one process", "workers"])
def test_another_vocabulary_is_refused(
    experiments: Experiments, workers: Dict[str, Any], tmp_path: Path
) -> None:
    config, out = tagger(workers, ONE_EPOCH), tmp_path / "out"
    data = Path(config["train_data_path"]).read_text().splitlines()
    path = tmp_path / "data.tsv"
    path.write_text("\n".join(data))
    config["train_data_path"] = str(path)
    shutil.copytree(experiments.run(config).serialization_dir, out)
    (out / "model.tar.gz").unlink()
    checkpoint = out / "checkpoint_e1_b0"
    if workers is ONE_PROCESS:
        # It makes the vocabulary again. Of what isn't used the model's parameters have their sizes.
        path.write_text("\n".join(reversed(data)))
    else:
        tokens = out / "vocabulary" / "tokens.txt"
        tokens.write_text("".join(sorted(tokens.read_text().splitlines(keepends=True))))
    flags = ["--recover"]
    longer = write_config({**config, "trainer": {**config["trainer"], "num_epochs": 2}}, tmp_path)
    run = allennlp("train", longer, "-s", out, *flags, include_packages=NAMES)
    assert_other_vocabulary(run, checkpoint)
    export = ("deepspeed", "export", out, "--output", tmp_path / "exported")
    assert_other_vocabulary(allennlp(*export, include_packages=NAMES), checkpoint)


def start_node(rank: int, hash_seed: int, directory: Path) -> subprocess.Popen:
    arguments: List[Any] = ["train", directory / "config.json", "-s", directory / f"out_{rank}"]
    for name in NAMES:
        arguments += ["--include-package", name]
    command = shutil.which("allennlp", path=os.path.dirname(sys.executable))
    return subprocess.Popen(
        [str(command), *map(str, arguments), "--node-rank", str(rank)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=(directory / f"output_{rank}").open("w"),
        stderr=subprocess.STDOUT,
    )


def test_nodes_may_hash_in_another_order(tmp_path: Path) -> None:
    nodes = {"cuda_devices": [-1], "num_nodes": 2, "primary_address": "127.0.0.1"}
    config = tagger({"distributed": {**nodes, "primary_port": find_open_port()}}, ONE_EPOCH)
    write_config(config, tmp_path)
    commands = [start_node(rank, rank, tmp_path) for rank in range(2)]
    try:
        for rank, command in enumerate(commands):
            assert command.wait(240) == 0, (tmp_path / f"output_{rank}").read_text()[-5000:]
    finally:
        for command in commands:
            command.kill()
    texts = {
        (tmp_path / f"out_{rank}/vocabulary/non_padded_namespaces.txt").read_text()
        for rank in range(2)
    }
    assert len(texts) == 2, "The seeds show nothing."


@pytest.mark.parametrize(
    "name, workers, stage",
    [
        ("out[lr=0.1]", ONE_PROCESS, 0),
        ("out[!a-z] ?*", TWO_WORKERS, 2),
        ("100% {0} 'sü\u4e2d\"", TWO_WORKERS, 3),
    ],
)
def test_a_directory_may_have_any_name(
    experiments: Experiments, name: str, workers: Dict[str, Any], stage: int, tmp_path: Path
) -> None:
    """It is resumed, and its archive has what is added to it."""
    config = deepspeed(load_config("tagger", workers), stage)
    expected = experiments.run(config)
    path, out = (
        write_config({**config, "include_in_archive": ["metrics_*.json"]}, tmp_path),
        tmp_path / name,
    )
    train = ("train", path, "-s", out)
    allennlp(*train, "-o", '{"trainer.num_epochs": 1}', include_packages=NAMES).check()
    run = allennlp(*train, "--recover", include_packages=NAMES).check()
    assert f"Loading checkpoint {out / 'checkpoint_e1_b0'}" in run.output
    result = Result(out)
    assert_same_weights(result.weights(), expected.weights(), tolerance=0)
    with tarfile.open(result.archive) as archive:
        assert "metrics_epoch_0.json" in archive.getnames()
    data, metrics = config["validation_data_path"], tmp_path / "metrics.json"
    exported = (
        "deepspeed",
        "export",
        out,
        "--epoch",
        "1",
        "--output",
        tmp_path / f"exported {name}",
    )
    evaluate = ("evaluate", result.archive, data, "--output-file", metrics)
    for command in (exported, evaluate, ("deepspeed", "report", out)):
        allennlp(*command, include_packages=NAMES).check()
    accuracy = json.loads(metrics.read_text())["accuracy"]
    assert accuracy == pytest.approx(result.final_metrics()["best_validation_accuracy"])
