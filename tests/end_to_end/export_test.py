"""Weights and archives out of checkpoints."""

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import import_module_and_submodules
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord, FileRecord
from allennlp_deepspeed.checkpoint.export import export
from allennlp_deepspeed.checkpoint.offline import find_checkpoint
from allennlp_deepspeed.checkpoint.state_files import StateFiles
from tests.end_to_end.resize_test import BF16, FP32_GRADIENTS, dumped, resizable
from tests.support.command import REPOSITORY, allennlp, subprocess_allennlp
from tests.support.experiment import INCLUDED, Config, Experiments, Result, deepspeed, load_config
from tests.support.tensor_memory import TensorMemory


def exported(result: Result, output: Path, **arguments: Any) -> Dict[str, torch.Tensor]:
    """What is in `weights.th`, and in the archive too."""
    import_module_and_submodules(INCLUDED)
    assert export(str(result.serialization_dir), output_dir=str(output), **arguments) == str(output)
    assert sorted(path.name for path in output.iterdir()) == ["model.tar.gz", "weights.th"]
    weights = torch.load(output / "weights.th", weights_only=True)
    with tarfile.open(output / "model.tar.gz") as archive:
        archived = archive.extractfile("weights.th").read()
    assert archived == (output / "weights.th").read_bytes()
    return weights


def assert_identical(actual: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> None:
    """The same to the last bit, with the same names of the same tensors."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
    assert _ties(actual) == _ties(expected)


def _ties(weights: Dict[str, torch.Tensor]) -> List[List[str]]:
    names: Dict[int, List[str]] = {}
    for name, tensor in weights.items():
        names.setdefault(tensor.data_ptr(), []).append(name)
    return list(names.values())


@pytest.mark.parametrize("stage, sections", [(0, {}), (2, BF16), (3, {})])
def test_exported_weights_are_those_of_training(
    experiments: Experiments, tmp_path: Path, stage: int, sections: Config
):
    result = experiments.run(deepspeed(resizable(2), stage, **sections))
    weights = exported(result, tmp_path / "newest")
    assert_identical(weights, dumped(result, "e1_b4")["weights"])
    weights = exported(result, tmp_path / "first", epoch=1)
    assert_identical(weights, dumped(result, "e0_b4")["weights"])
    # RFC 1952: 2 for an archive compressed by the slowest algorithm.
    assert result.archive.read_bytes()[8] != 2
    assert (tmp_path / "first" / "model.tar.gz").read_bytes()[8] != 2


@pytest.mark.parametrize("stage, sections, async_save", [(0, BF16, True), (3, {}, False)])
def test_tied_and_frozen_parameters_and_buffers_are_exported(
    experiments: Experiments, tmp_path: Path, stage: int, sections: Config, async_save: bool
):
    overrides = {
        "model": {"type": "tied_classifier"},
        "trainer.validation_metric": "-loss",
        "trainer.no_grad": ["_projection.weight"],
    }
    config = deepspeed(resizable(2, overrides, fixture="classifier"), stage, **sections)
    config["trainer"]["checkpointer"]["async_save"] = async_save
    result = experiments.run(config)
    expected = dumped(result, "e1_b4")["weights"]
    assert ["_embedding.weight", "_same_embedding.weight", "_decoder.weight"] in _ties(expected)
    assert_identical(exported(result, tmp_path / "export"), expected)


def test_the_moving_average_is_exported(experiments: Experiments, tmp_path: Path):
    average = {"trainer.moving_average": {"decay": 0.9}}
    config = deepspeed(resizable(2, average), 1, **FP32_GRADIENTS)
    result = experiments.run(config)
    weights = exported(result, tmp_path / "export")
    assert_identical(weights, dumped(result, "e1_b4")["moving_average"])


def test_an_export_takes_the_memory_of_one_full_copy(experiments: Experiments):
    result = experiments.run(deepspeed(resizable(2), 3))
    checkpoint = StateFiles(find_checkpoint(str(result.serialization_dir))[0])
    with TensorMemory() as memory:
        weights = checkpoint.state_dict()
    assert memory.peak == sum(weight.nbytes for weight in weights.values())


def test_a_checkpoint_is_evaluated_as_its_export(experiments: Experiments, tmp_path: Path):
    result = experiments.run(deepspeed(resizable(2), 3))
    exported(result, tmp_path / "export", epoch=1)
    before = sorted(os.listdir(result.serialization_dir))
    checkpoint = find_checkpoint(str(result.serialization_dir), 1)[0]
    data = load_config("tagger")["validation_data_path"]
    written = {}
    for source in (checkpoint, tmp_path / "export" / "model.tar.gz"):
        output = tmp_path / f"metrics_{len(written)}.json"
        allennlp("evaluate", source, data, "--output-file", output).check()
        written[source] = json.loads(output.read_text())
    assert len(written) == 2
    assert written[checkpoint] == written[tmp_path / "export" / "model.tar.gz"]
    assert sorted(os.listdir(result.serialization_dir)) == before


def test_the_installed_command_finds_the_commands_of_this_package(
    experiments: Experiments, tmp_path: Path
):
    result = experiments.run(deepspeed(resizable(2), 3))
    output = tmp_path / "export"
    arguments = (result.serialization_dir, "--output", output, "--epoch", 1)
    environment = {**os.environ, "HOME": str(tmp_path)}
    run = subprocess_allennlp(
        "deepspeed", "export", *arguments, cwd=REPOSITORY, env=environment
    ).check()
    assert run.output.endswith(f"{output}\n")
    weights = torch.load(output / "weights.th", weights_only=True)
    assert_identical(weights, dumped(result, "e0_b4")["weights"])


def test_the_command_prints_the_directory_alone_and_replaces_nothing_unasked(
    experiments: Experiments, tmp_path: Path
) -> None:
    result = experiments.run(deepspeed(resizable(2), 3))
    files = tmp_path / "export" / "weights.th", tmp_path / "export" / "model.tar.gz"
    arguments = ("deepspeed", "export", result.serialization_dir, "--output", tmp_path / "export")
    quiet = {"ALLENNLP_LOG_LEVEL": ""}
    run = allennlp(*arguments, "--epoch", 1, environment=quiet).check()
    assert run.lines() == [str(tmp_path / "export")]
    before = [file.read_bytes() for file in files]
    run = allennlp(*arguments, environment=quiet)
    assert run.returncode == 1 and "--force" in run.lines()[-1]
    assert [file.read_bytes() for file in files] == before
    allennlp(*arguments, "--force", environment=quiet).check()
    weights = torch.load(files[0], weights_only=True)
    assert_identical(weights, dumped(result, "e1_b4")["weights"])


def test_files_are_beside_the_checkpoint_by_default(experiments: Experiments, tmp_path: Path):
    """With those that the config names."""
    copy = tmp_path / "out"
    shutil.copytree(experiments.run(deepspeed(resizable(2), 3)).serialization_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    config["include_in_archive"] = ["metrics_epoch_*.json"]
    (copy / "config.json").write_text(json.dumps(config))
    assert export(str(copy), epoch=1) == str(copy / "export_e1_b0")
    with tarfile.open(copy / "export_e1_b0" / "model.tar.gz") as archive:
        assert {"metrics_epoch_0.json", "vocabulary/tokens.txt"} <= set(archive.getnames())


def _of_another_model(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["model"]["encoder"]["hidden_size"] += 1
    (directory / "config.json").write_text(json.dumps(config))


def _of_a_larger_model(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["model"]["encoder"]["num_layers"] = 2
    (directory / "config.json").write_text(json.dumps(config))


def _no_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _no_object(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def _archives_others(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "include_in_archive": ["../*"]}))


def _leads_elsewhere(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir()
    (directory / "export_e2_b0").symlink_to(directory.parent / "elsewhere")


@pytest.mark.parametrize(
    "change, text",
    [
        (_of_another_model, "size mismatch for encoder"),
        (_of_a_larger_model, "missing encoder"),
        (_no_json, "config.json could not be read"),
        (_no_config, "config.json is missing"),
        (_no_object, "config.json has no object"),
        (_archives_others, "include_in_archive"),
        (_leads_elsewhere, "export_e2_b0 is a link"),
    ],
)
def test_an_export_is_refused_before_anything_is_written(
    experiments: Experiments, tmp_path: Path, change: Callable[[Path], None], text: str
):
    import_module_and_submodules(INCLUDED)
    copy = tmp_path / "out"
    shutil.copytree(experiments.run(deepspeed(resizable(2), 3)).serialization_dir, copy)
    change(copy)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError) as error:
        export(str(copy))
    assert text in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def _without_fragments(record: Dict[str, Any]) -> Any:
    return {**record, "fragments": None}


def _of_other_sizes(record: Dict[str, Any]) -> Any:
    return {**record, "fragments": {name: [0, 2**40, 0] for name in record["fragments"]}}


@pytest.mark.parametrize("change", [_without_fragments, _of_other_sizes, lambda record: [record]])
def test_files_with_other_contents_are_refused(
    experiments: Experiments, tmp_path: Path, change: Callable[[Any], Any]
):
    copy = tmp_path / "out"
    shutil.copytree(experiments.run(deepspeed(resizable(2), 3)).serialization_dir, copy)
    checkpoint = copy / "checkpoint_e2_b0"
    record = CommitRecord.read(str(checkpoint))
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            of_tensors = json.loads(file.metadata()["allennlp_deepspeed"])
        metadata = {"allennlp_deepspeed": json.dumps(change(of_tensors))}
        save_file(load_file(path), path, metadata)
        record.files[path.name] = FileRecord.from_file(str(path))
    record.write(str(checkpoint))
    with pytest.raises(CheckpointError):
        export(str(copy))
    assert not (copy / "export_e2_b0").exists()


def test_an_output_that_is_a_file_is_refused(experiments: Experiments, tmp_path: Path):
    result = experiments.run(deepspeed(resizable(2), 3))
    (tmp_path / "notes").write_text("all of it")
    run = allennlp("deepspeed", "export", result.serialization_dir, "--output", tmp_path / "notes")
    assert run.returncode == 1 and "Traceback" not in run.output
    assert f"{tmp_path / 'notes'} is not a directory" in run.output.splitlines()[-1]
    assert (tmp_path / "notes").read_text() == "all of it"


def test_what_cannot_be_exported_is_refused_by_name(experiments: Experiments, tmp_path: Path):
    result = experiments.run(deepspeed(resizable(2), 3))
    copy = tmp_path / "out"
    shutil.copytree(result.serialization_dir, copy)
    with pytest.raises(CheckpointError, match="no checkpoint of 7 epochs in .*checkpoint_e2_b0"):
        export(str(copy), epoch=7)
    with pytest.raises(CheckpointError, match="no checkpoint in .*none"):
        export(str(tmp_path / "nothing"))
    damaged = copy / "checkpoint_e2_b0" / "state_w1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{damaged} has .* bytes instead of"):
        export(str(copy))
    assert not (copy / "export_e2_b0").exists()
    run = allennlp("deepspeed", "export", copy)
    assert run.returncode != 0 and str(damaged) in run.output
