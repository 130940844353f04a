"""Commands of `allennlp deepspeed` end with a line where they can't do what they are asked for."""

import json
import tarfile
from pathlib import Path
from typing import Any, Dict, List

import pytest

from allennlp_deepspeed.checkpoint.commit_record import CommitRecord
from tests.support.command import Command as AllenNlp
from tests.support.command import Run, allennlp, wait_for_all
from tests.support.experiment import ONE_PROCESS, load_config
from tests.unit.report_page.report_page_test import write_run

NAMES = ("allennlp_deepspeed", "tests.fixtures")


def assert_ends_with_line(run: Run, text: str) -> None:
    assert run.returncode == 1, run.output[-3000:]
    assert "Traceback" not in run.output, run.output[-3000:]
    assert text in run.output.splitlines()[-1], run.output[-3000:]


def classifier(*overrides: Dict[str, Any]) -> Dict[str, Any]:
    return load_config("classifier", {"trainer.type": "deepspeed"}, ONE_PROCESS, *overrides)


def test_commands_without_what_they_work_on(tmp_path: Path) -> None:
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(classifier()))
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "config.json", "config.json")
    no_archive = tmp_path / "broken.tar.gz"
    no_archive.write_text("no archive")
    (empty / "checkpoint_e1_b0").mkdir()
    huge = tmp_path / "huge"
    (huge / "checkpoint_e1_b0").mkdir(parents=True)
    CommitRecord(1, 0, 10**12, 0, {}, ranks=[0]).write(str(huge / "checkpoint_e1_b0"))
    page = write_run(tmp_path / "page")
    (page / "link.html").symlink_to(archive)
    export = ("deepspeed", "export")
    cases: List[Any] = [
        ((*export, nowhere), "There is no checkpoint in"),
        ((*export, empty, "--epoch", 7), "There is no checkpoint of 7 epochs in"),
        ((*export, empty), "commit.json is missing"),
        ((*export, empty, "--best"), "--best needs --format huggingface"),
        ((*export, no_archive, "--format", "huggingface"), "is not an AllenNLP archive"),
        ((*export, archive, "--format", "huggingface"), "is an archive without weights"),
        ((*export, huge), "wrong value of 'world_size'"),
        (("deepspeed", "report", nowhere), "There is no metrics.jsonl in"),
        (("deepspeed", "report", page, "--output", nowhere / "a"), f"{nowhere} is not a directory"),
        (("deepspeed", "report", page, "--output", empty), f"{empty}, which is not a file"),
        (("deepspeed", "report", page, "--output", page / "link.html"), "which is not a file"),
        (("deepspeed", "estimate", nowhere), "nowhere"),
    ]
    commands = [AllenNlp(*arguments, include_packages=NAMES) for arguments, _ in cases]
    for result, (_, text) in zip(wait_for_all(commands, 120), cases, strict=True):
        assert_ends_with_line(result, text)


def test_values_of_other_types_are_named(tmp_path: Path) -> None:
    cases: List[Any] = [
        ("check", {"distributed": False}, "'distributed' is false"),
        ("check", {"trainer": "deepspeed", "distributed": 0}, "'distributed' is 0"),
        ("check", {"trainer.optimizer.type": {"a": 1}}, "'trainer.optimizer.type' is"),
        ("estimate", {"trainer": [1]}, "'trainer' is [1]"),
        ("estimate", {"model.seq2vec_encoder.num_filters": "x"}, "'model' of the config"),
        ("estimate", {"vocabulary": None}, "'vocabulary' of the config"),
    ]
    commands = []
    for number, (command, changes, _) in enumerate(cases):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(classifier()))
        overrides = ("-o", json.dumps(changes))
        commands.append(AllenNlp("deepspeed", command, path, *overrides, include_packages=NAMES))
    for result, (_, _, text) in zip(wait_for_all(commands, 120), cases, strict=True):
        assert_ends_with_line(result, text)


@pytest.mark.parametrize("markup", ["[bold]", "[/b]"])
def test_markup_of_rich_is_text(markup: str, tmp_path: Path) -> None:
    path = f"logs/{markup}"
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": path},
        "offload_optimizer": {"device": "nvme", "nvme_path": path},
    }
    sections = {"zero_optimization": zero, "csv_monitor": {"enabled": True, "output_path": path}}
    config = tmp_path / "config.json"
    embedder = {"type": "embedding", "embedding_dim": 12}
    named = {
        "dataset_reader.token_indexers": {markup: {"type": "single_id"}},
        "model.text_field_embedder.token_embedders": {markup: embedder},
        "trainer.deepspeed_config": sections,
    }
    config.write_text(json.dumps(classifier(named)))
    shown = allennlp("deepspeed", "check", config, include_packages=NAMES).check().output
    assert shown.count(f'"{path}"') == 3
    advice = allennlp(
        *("deepspeed", "estimate", config, "--gpu-memory", "80GB"), include_packages=NAMES
    )
    assert f"token_embedder_{markup}.weight" in advice.check().output
    changed = classifier({"trainer.deepspeed_config": path})
    config.write_text(json.dumps(changed))
    assert_ends_with_line(
        allennlp("deepspeed", "check", config, include_packages=NAMES),
        f'"{path}", which is not a preset',
    )


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    others = tmp_path / "thesis.html"
    others.write_text("all of it")
    (directory / "report.html").symlink_to(others)
    allennlp("deepspeed", "report", directory).check()
    assert others.read_text() == "all of it"
    report = directory / "report.html"
    assert not report.is_symlink() and report.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_report_has_no_files_of_others(name: str, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    others = tmp_path / "others"
    (directory / name).rename(others)
    (directory / name).symlink_to(others)
    run = allennlp("deepspeed", "report", directory)
    assert_ends_with_line(run, f"{name} is a symbolic link to {others}")
    assert not (directory / "report.html").exists()
