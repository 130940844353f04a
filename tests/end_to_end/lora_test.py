"""Adapters train as with AllenNLP's own trainer, and checkpoints can hold them alone."""

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Dict

import pytest
import torch

from allennlp_deepspeed.checkpoint import serialization
from allennlp_deepspeed.checkpoint.commit_record import CommitRecord
from allennlp_deepspeed.frozen_records import FrozenRecord
from tests.end_to_end.checkpoint_test import assert_ends_alike, recover
from tests.end_to_end.export_test import assert_identical, exported
from tests.fixtures.tiny_bert import tiny_bert
from tests.support.command import allennlp
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.state_files import saved_tensors

IDS = torch.tensor([[2, 7, 8, 3]])


@pytest.fixture(scope="module")
def bert(session_directory: Path) -> str:
    return tiny_bert(session_directory / "tiny_bert")


def adapted(bert: str, *overrides: Config) -> Config:
    """A classifier on a transformer with adapters, and with dropout in all of them."""
    transformer = {"type": "pretrained_transformer", "model_name": bert}
    embedder = {
        "type": "lora",
        "embedder": transformer,
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["query", "value", "intermediate.dense"],
        "lora_dropout": 0.1,
    }
    return load_config(
        "classifier",
        TWO_WORKERS,
        {
            "dataset_reader.tokenizer": transformer,
            "dataset_reader.token_indexers": {"tokens": transformer},
            "model.text_field_embedder.token_embedders.tokens": embedder,
            "model.seq2vec_encoder": {"type": "bert_pooler", "pretrained_model": bert},
            "trainer.no_grad": ["pooler"],
            "trainer.num_gradient_accumulation_steps": 2,
            "trainer.validation_metric": "-loss",
            # So that the second epoch is the best, and gradients that are zero but for rounding
            # make no steps.
            "trainer.optimizer": {"type": "adam", "lr": 0.03, "eps": 1e-4},
        },
        *overrides,
    )


def checkpointed(bert: str, stage: int, *overrides: Config, **sections: Config) -> Config:
    checkpointer = {
        "type": "deepspeed",
        "save_every_num_batches": 4,
        "keep_most_recent_by_count": None,
        "exclude_frozen_parameters": True,
        "async_save": stage == 3,
    }
    config = adapted(bert, *overrides)
    config = {**config, "trainer": {**config["trainer"], "checkpointer": checkpointer}}
    return deepspeed(config, stage, **sections)


def is_trained(name: str) -> bool:
    return "lora_" in name or "_classification_layer" in name


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_hold_what_is_trained(experiments: Experiments, bert: str, stage: int) -> None:
    result = experiments.run(checkpointed(bert, stage))
    weights = result.weights()
    trained = {name: weight for name, weight in weights.items() if is_trained(name)}
    frozen_bytes = sum(w.nbytes for name, w in weights.items() if name not in trained)
    checkpoint = result.serialization_dir / "checkpoint_e2_b0"
    assert serialization.load(checkpoint / "best.th").keys() == trained.keys()
    assert saved_tensors(checkpoint).keys() == trained.keys()
    paths = [checkpoint / "best.th", *checkpoint.glob("*.safetensors")]
    # Weights, the optimizer's copies and states of them, and what a file has besides.
    trained_bytes = sum(weight.nbytes for weight in trained.values())
    size = sum(path.stat().st_size for path in paths)
    assert size < 6 * trained_bytes + 16_000 * len(paths)
    assert frozen_bytes > 6 * trained_bytes


def test_a_recovered_run_ends_as_an_uninterrupted_one(
    experiments: Experiments, tmp_path: Path, bert: str
) -> None:
    config = checkpointed(bert, 3)
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e1_b4")
    assert_ends_alike(recovered, uninterrupted)


def test_tied_frozen_parameters_are_left_out_and_found_by_another_number_of_workers(
    experiments: Experiments, tmp_path: Path
) -> None:
    overrides = {
        "model": {"type": "tied_classifier"},
        "trainer.validation_metric": "-loss",
        "trainer.no_grad": ["embedding.weight"],
        "trainer.num_epochs": 1,
    }
    config = deepspeed(load_config("classifier", TWO_WORKERS, overrides), 3)
    config["trainer"]["checkpointer"] = {"exclude_frozen_parameters": True}
    result = experiments.run(config)
    tied = {"_embedding.weight", "_same_embedding.weight", "_decoder.weight"}
    left = serialization.load(result.serialization_dir / "checkpoint_e1_b0" / "best.th")
    assert left.keys() == result.weights().keys() - tied
    weights = exported(result, tmp_path / "export")
    assert_identical(weights, result.weights())
    config["distributed"] = {"cuda_devices": [-1, -1, -1]}
    recovered = recover(result, tmp_path, config, "checkpoint_e1_b0")
    assert_same_weights(recovered.weights(), result.weights(), tolerance=0)


def test_other_frozen_weights_are_refused(
    experiments: Experiments, tmp_path: Path, bert: str
) -> None:
    config = checkpointed(bert, 3)
    result = experiments.run(config)
    checkpoint = result.serialization_dir / "checkpoint_e2_b0"
    record = CommitRecord.read(str(checkpoint))
    name = next(name for name in record.frozen if name.endswith("word_embeddings.weight"))
    record.frozen[name] = FrozenRecord.from_weight(torch.zeros(3))
    copy = tmp_path / "changed"
    shutil.copytree(result.serialization_dir, copy)
    record.write(str(copy / "checkpoint_e2_b0"))
    recover(Result(copy), tmp_path, config, "checkpoint_e2_b0", check=False)
    message = f"checkpoint_e2_b0 has no frozen parameters, and .* original ones: {name}"
    assert re.search(message, (tmp_path / "output").read_text())
    run = allennlp("deepspeed", "export", copy)
    assert run.returncode != 0 and re.search(message, run.output)


def test_exported_weights_are_whole(experiments: Experiments, tmp_path: Path, bert: str) -> None:
    result = experiments.run(checkpointed(bert, 3))
    assert result.final_metrics()["best_epoch"] == 1
    assert_identical(exported(result, tmp_path / "export"), result.weights())


def test_a_model_with_merged_adapters_needs_nothing_but_allennlp(
    experiments: Experiments, tmp_path: Path, bert: str
) -> None:
    config = checkpointed(bert, 3)
    result = experiments.run(config)
    arguments = (result.serialization_dir, "--output", tmp_path / "merged", "--merge-adapters")
    allennlp("deepspeed", "export", *arguments).check()
    weights = torch.load(tmp_path / "merged" / "weights.th", weights_only=True)
    assert not any(re.search("lora|base_layer", name) for name in weights)
    data = config["validation_data_path"]
    archives = {"merged": tmp_path / "merged" / "model.tar.gz", "adapted": result.archive}
    metrics: Dict[str, Dict[str, float]] = {}
    for name, archive in archives.items():
        packages = () if name == "merged" else ("allennlp_deepspeed",)
        output = tmp_path / f"{name}.json"
        allennlp(
            "evaluate", archive, data, "--output-file", output, include_packages=packages
        ).check()
        metrics[name] = json.loads(output.read_text())
    assert metrics["merged"] == pytest.approx(metrics["adapted"])
    with tarfile.open(archives["merged"]) as archive:
        assert '"lora"' not in archive.extractfile("config.json").read().decode()  # type: ignore
