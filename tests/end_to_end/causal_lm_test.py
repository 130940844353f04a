"""
A causal language model trains on several workers as in a single process with one batch a step, with
everything that its trainer and its keys do to it, and its archive needs nothing else.
"""

import json
import shutil
from pathlib import Path
from typing import Dict, Optional

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.models.archival import load_archive
from allennlp.training.util import evaluate
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.end_to_end.checkpoint_test import recover
from tests.end_to_end.export_test import exported
from tests.fixtures.tiny_gguf import VOCABULARY, tiny_gguf
from tests.fixtures.tiny_lm import LLAMA
from tests.support.command import allennlp
from tests.support.experiment import (
    FP16,
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
)
from tests.support.language_model import (
    assert_loss_is_of_all_tokens,
    assert_readings_are_of_all_tokens,
    language_model,
    token_metrics,
)

# Of which both a step of one process has 12 examples, and one of two workers.
ONE_BATCH = {**ONE_PROCESS, "data_loader.batch_size": 12}
MICRO_BATCHES = {
    **TWO_WORKERS,
    "data_loader.batch_size": 3,
    "trainer.num_gradient_accumulation_steps": 2,
}

LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
PACKED = {
    f"{reader}.{key}": value
    for reader in ("dataset_reader", "validation_dataset_reader")
    for key, value in {"pack": True, "max_length": 24}.items()
}


def check(
    experiments: Experiments,
    tokenizer: str,
    stage: int,
    changes: Optional[Config] = None,
    of_engine: Optional[Config] = None,
    zero: Optional[Config] = None,
) -> Result:
    """Compares with one process and one batch, without what only the engine does."""
    expected = experiments.run(language_model(tokenizer, ONE_BATCH, changes or {}))
    config = deepspeed(
        language_model(tokenizer, MICRO_BATCHES, changes or {}, of_engine or {}), stage
    )
    config["trainer"]["deepspeed_config"]["zero_optimization"].update(zero or {})
    actual = experiments.run(config)
    assert_same_weights(actual.weights(), expected.weights(), tolerance=1e-5)
    assert token_metrics(actual) == pytest.approx(token_metrics(expected), rel=1e-5)
    assert_loss_is_of_all_tokens(actual, "validation")
    assert_readings_are_of_all_tokens(actual)
    return actual


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_workers_train_as_one_batch(
    experiments: Experiments, tokenizer: str, stage: int
) -> None:
    check(experiments, tokenizer, stage)


CHANGES: Dict[str, Config] = {
    "no_grad": {"trainer.no_grad": ["embed_tokens", r"layers\.0\."]},
    "tied": {"model.config": {**LLAMA, "tie_word_embeddings": True}},
    "packed": PACKED,
}


@pytest.mark.parametrize("name, stage", [("no_grad", 2), ("tied", 3), ("packed", 2)])
def test_keys_of_the_model_and_the_reader(
    experiments: Experiments, tokenizer: str, name: str, stage: int
) -> None:
    check(experiments, tokenizer, stage, CHANGES[name])


@pytest.mark.soak
def test_offload_and_activation_checkpointing(experiments: Experiments, tokenizer: str) -> None:
    adam = {"trainer.optimizer": {"type": "adam", "lr": 0.01, "eps": 1e-3}}
    checkpointing = {"trainer.activation_checkpointing": [r"layers\.\d+$"]}
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    check(experiments, tokenizer, 3, adam, checkpointing, zero)


def test_half_precision(experiments: Experiments, tokenizer: str) -> None:
    adam = {"trainer.num_epochs": 3, "trainer.optimizer": {"type": "adam", "lr": 0.01}}
    expected = experiments.run(language_model(tokenizer, ONE_BATCH, adam))
    config = language_model(tokenizer, MICRO_BATCHES, adam)
    actual = experiments.run(deepspeed(config, 2, **FP16))
    # As for losses of other models in `gpu_test.py`.
    assert token_metrics(actual) == pytest.approx(token_metrics(expected), rel=0.05, abs=0.02)
    # Of 57 tokens, of which none is more probable before training.
    assert token_metrics(expected)["training_perplexity"] < 0.8 * 57


def test_an_archive_needs_nothing_else(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    config = deepspeed(language_model(tokenizer, MICRO_BATCHES, {"model.lora": LORA}), 3)
    result = experiments.run(config)
    archive = tmp_path / "moved" / "model.tar.gz"
    archive.parent.mkdir()
    # Where there is no such tokenizer.
    replace_in_config(result.archive, archive, tokenizer, "/nowhere")
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text('{"prompt": "name1 name2"}\n{"text": "verb3", "label": "verb"}\n')
    path = tmp_path / "drawn.jsonl"
    drawing = json.dumps({"sample": True, "seed": 3})
    options = ("--output-file", path, "--silent", "--predictor-args", drawing)
    allennlp("predict", archive, inputs, *options).check()
    predictions = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(p) for p in predictions] == [{"response", "finish_reason"}] * 2
    # What training on a GPU may have had.
    fast = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}
    overrides = json.dumps({"model.transformer_kwargs": fast})
    model = load_archive(archive, cuda_device=-1, overrides=overrides).model
    assert isinstance(model, CausalLM)
    assert_same_weights(model.state_dict(), result.weights(), tolerance=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_archive_tokenizes_as_its_reader_did(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    # Not the end that the tokenizer of `model.tokenizer` has.
    changes = {
        f"{reader}.tokenizer_kwargs": {"eos_token": "<unk>"}
        for reader in ("dataset_reader", "validation_dataset_reader")
    }
    result = experiments.run(deepspeed(language_model(tokenizer, MICRO_BATCHES, changes), 2))
    archive = tmp_path / "moved" / "model.tar.gz"
    archive.parent.mkdir()
    replace_in_config(result.archive, archive, tokenizer, "/nowhere")
    for path in (result.archive, archive):
        loaded = load_archive(path, cuda_device=-1)
        loader = MultiProcessDataLoader(
            loaded.validation_dataset_reader, loaded.config["validation_data_path"], batch_size=5
        )
        loader.index_with(loaded.model.vocab)
        perplexity = evaluate(loaded.model, loader)["perplexity"]
        expected = result.final_metrics()["best_validation_perplexity"]
        assert perplexity == pytest.approx(expected, rel=1e-5)
    recovered = recover(result, tmp_path, recorded_config(result), "checkpoint_e1_b0")
    assert_same_weights(recovered.weights(), result.weights(), tolerance=0)
    assert_same_metrics(recovered.metrics_of_epochs(), result.metrics_of_epochs(), tolerance=0)


@pytest.fixture(scope="module")
def pretrained(session_directory: Path, tokenizer: str) -> str:
    """A directory with a model whose output layer is its embedding, and its tokenizer."""
    directory = session_directory / "tiny_lm_with_weights"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            config = AutoConfig.for_model(**{**LLAMA, "tie_word_embeddings": True})
            with torch.random.fork_rng():
                torch.manual_seed(4)
                model = AutoModelForCausalLM.from_config(config)
                for parameter in model.parameters():
                    torch.nn.init.normal_(parameter, std=0.2)
            model.save_pretrained(directory)
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    return str(directory)


def test_pretrained_weights_with_adapters(
    experiments: Experiments, pretrained: str, tmp_path: Path
) -> None:
    changes = {"model.config": None, "model.model_name": pretrained, "model.lora": LORA}
    checkpointer = {"trainer.checkpointer": {"exclude_frozen_parameters": True}}
    result = check(experiments, pretrained, 3, changes, checkpointer)
    frozen = AutoModelForCausalLM.from_pretrained(pretrained).state_dict()
    name = "model.layers.0.mlp.gate_proj.weight"
    torch.testing.assert_close(result.weights()[f"transformer.{name}"], frozen[name])

    assert result.final_metrics()["best_epoch"] == 1, "Else another checkpoint is exported."
    weights = exported(result, tmp_path / "merged", merge_adapters=True)
    assert not any("lora" in name or "base_layer" in name for name in weights)
    inputs = batch(LLAMA["vocab_size"])
    models = [
        load_archive(archive, cuda_device=-1).model.eval()
        for archive in (result.archive, tmp_path / "merged" / "model.tar.gz")
    ]
    adapted, merged = (model(**inputs)["logits"] for model in models)
    torch.testing.assert_close(merged, adapted)
    recovered = recover(result, tmp_path, recorded_config(result), "checkpoint_e1_b0")
    assert_same_weights(recovered.weights(), result.weights(), tolerance=1e-6)


@pytest.mark.parametrize(
    "stage, of_engine",
    [(2, {"bf16": {"enabled": True}}), pytest.param(3, {}, marks=pytest.mark.soak)],
)
def test_an_archive_of_adapters_only(
    experiments: Experiments, pretrained: str, tmp_path: Path, stage: int, of_engine: Config
) -> None:
    changes = {"model.config": None, "model.model_name": pretrained, "model.lora": LORA}
    checkpointer = {"trainer.checkpointer": {"exclude_frozen_parameters": True}}
    key = {"model.save_adapters_only": True}
    full, small = (
        experiments.run(
            deepspeed(
                language_model(pretrained, MICRO_BATCHES, changes, checkpointer, overrides),
                stage,
                **of_engine,
            )
        )
        for overrides in ({}, key)
    )
    assert_same_metrics(small.metrics_of_epochs(), full.metrics_of_epochs(), tolerance=0)
    tensors = [name for name, value in small.weights().items() if torch.is_tensor(value)]
    assert tensors == [name for name in full.weights() if "lora_" in name]
    for name in ("best.th", "checkpoint_e1_b0/best.th"):
        assert torch.load(small.serialization_dir / name).keys() == small.weights().keys()
    model = load_archive(small.archive, cuda_device=-1).model
    assert_same_weights(model.state_dict(), full.weights(), tolerance=0)
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text('{"prompt": "name1 name2"}\n{"text": "verb3"}\n')
    predictions = []
    for i, result in enumerate((full, small)):
        output = tmp_path / f"{i}.jsonl"
        allennlp("predict", result.archive, inputs, "--output-file", output, "--silent").check()
        predictions.append(output.read_text())
    assert predictions[0] == predictions[1]
    recovered = recover(small, tmp_path, recorded_config(small), "checkpoint_e1_b0")
    left = recovered.weights()
    assert left.pop("frozen_parameters") == small.weights()["frozen_parameters"]
    expected = {name: full.weights()[name] for name in tensors}
    assert_same_weights(left, expected, tolerance=1e-6)


@pytest.mark.soak
def test_an_archive_of_adapters_only_needs_the_weights_of_its_training(
    experiments: Experiments, pretrained: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(pretrained, base)
    changes = {"model.config": None, "model.model_name": str(base), "model.lora": LORA}
    key = {"model.save_adapters_only": True}
    result = experiments.run(deepspeed(language_model(pretrained, MICRO_BATCHES, changes, key), 2))
    full_weights = load_archive(result.archive, cuda_device=-1).model.state_dict()
    exports = tmp_path / "exported", tmp_path / "merged"
    options = ("--best", "--format", "huggingface", "--output", exports[0])
    allennlp("deepspeed", "export", result.serialization_dir, *options).check()
    options = ("--merge-adapters", "--output", exports[1])
    allennlp("deepspeed", "export", result.serialization_dir, *options).check()
    inputs = batch(LLAMA["vocab_size"])
    logits = AutoModelForCausalLM.from_pretrained(exports[0]).eval()(**inputs).logits
    base.rename(tmp_path / "moved")
    merged = load_archive(exports[1] / "model.tar.gz", cuda_device=-1).model.eval()
    torch.testing.assert_close(merged(**inputs)["logits"], logits)
    run = allennlp("predict", result.archive, tmp_path / "none.jsonl")
    assert run.returncode != 0 and "'model.save_adapters_only'" in run.output
    assert str(base) in run.output and "--overrides" in run.output
    overrides = json.dumps({"model.model_name": str(tmp_path / "moved")})
    moved = load_archive(result.archive, cuda_device=-1, overrides=overrides).model
    assert_same_weights(moved.state_dict(), full_weights, tolerance=0)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    other.model.norm.weight.data[0] += 1e-3
    other.save_pretrained(tmp_path / "moved")
    with pytest.raises(ConfigurationError, match=r"differ from the original ones: .*norm\.weight"):
        load_archive(result.archive, cuda_device=-1, overrides=overrides)


@pytest.mark.soak
def test_a_model_in_a_gguf_file(
    experiments: Experiments, session_directory: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers", minversion="5")
    file = tiny_gguf(session_directory)
    changes = {"model.config": None, "model.model_name": file, "trainer.optimizer.lr": 0.1}
    result = check(experiments, file, 3, changes)
    archive = tmp_path / "model.tar.gz"
    replace_in_config(result.archive, archive, file, "/nowhere/tiny.gguf")
    loaded = load_archive(archive, cuda_device=-1)
    assert_same_weights(loaded.model.state_dict(), result.weights(), tolerance=0)
    instance = loaded.dataset_reader.text_to_instance(text="name1")
    tokens = [VOCABULARY[i] for i in instance["input_ids"].tensor.tolist()]
    assert tokens == ["name", "1", "<eos>"]


def batch(vocabulary_size: int) -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(vocabulary_size, (2, 7), generator=generator)}


def recorded_config(result: Result) -> Config:
    return json.loads((result.serialization_dir / "config.json").read_text())


def replace_in_config(source: Path, target: Path, old: str, new: str) -> None:
    """A copy of an archive whose config has another string in the place of one."""
    directory = target.parent / "unpacked"
    shutil.unpack_archive(source, directory)
    config = directory / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    shutil.make_archive(str(target).removesuffix(".tar.gz"), "gztar", directory)
    shutil.rmtree(directory)
