"""What `allennlp deepspeed export --format huggingface` writes is what transformers load."""

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List

import peft
import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader
from allennlp.models import Model
from allennlp.models.archival import load_archive
from filelock import FileLock
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    T5Config,
    T5Model,
)

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.checkpoint.export import export
from allennlp_deepspeed.checkpoint.huggingface import export_huggingface
from allennlp_deepspeed.models.lora import find_transformers
from tests.end_to_end.causal_lm_test import LORA, pretrained
from tests.end_to_end.lora_test import adapted, bert
from tests.fixtures.tiny_lm import LLAMA, TEMPLATE
from tests.support.command import allennlp
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_outputs,
    deepspeed,
    load_config,
)
from tests.support.language_model import language_model

__all__ = ["bert", "pretrained"]

IDS = torch.tensor([[7, 8, 9, 30, 21, 5]])
TIED = {"model.config": {**LLAMA, "tie_word_embeddings": True}}
OTHER_END = {
    "trainer.optimizer.lr": 0.2,
    **{
        f"{reader}.tokenizer_kwargs": {"eos_token": "<assistant>"}
        for reader in ("dataset_reader", "validation_dataset_reader")
    },
}
EVERY_EPOCH = {"trainer.checkpointer": {"type": "deepspeed", "keep_most_recent_by_count": None}}


def trained(
    experiments: Experiments, tokenizer: str, stage: int, *overrides: Config, **sections: Config
) -> Result:
    """A language model that two workers have trained."""
    config = language_model(tokenizer, TWO_WORKERS, EVERY_EPOCH, *overrides)
    return experiments.run(deepspeed(config, stage, **sections))


def exported(source: Path, output: Path, **arguments: Any) -> List[str]:
    """The names of the files that are written."""
    assert export_huggingface(str(source), str(output), **arguments) == str(output)
    assert not output.with_name(f"{output.name}.unfinished").exists()
    return sorted(path.name for path in output.iterdir())


def archived_model(archive: Path) -> Model:
    return load_archive(archive, cuda_device=-1).model.eval()


def assert_same_logits(actual: PreTrainedModel, archive: Path) -> None:
    model = archived_model(archive)
    with torch.no_grad():
        expected = model(input_ids=IDS)["logits"]
        assert_same_outputs(actual.eval()(IDS).logits, expected)


@pytest.mark.parametrize(
    "stage, changes",
    [
        pytest.param(0, OTHER_END, id="other_end-0"),
        pytest.param(3, TIED, id="tied-3"),
        pytest.param(3, {"model.lora": LORA}, id="lora-3"),
    ],
)
def test_a_language_model_of_a_checkpoint_is_that_of_the_archive(
    experiments: Experiments, tokenizer: str, tmp_path: Path, stage: int, changes: Config
) -> None:
    result = trained(experiments, tokenizer, stage, changes)
    assert result.final_metrics()["best_epoch"] == 1, "Else it isn't the newest."
    names = exported(result.serialization_dir, tmp_path / "out")
    assert {"config.json", "generation_config.json", "model.safetensors"} <= set(names)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    assert_same_logits(model, result.archive)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.chat_template == TEMPLATE
    # With the end of a turn of the template, and of other texts that of the tokenizer.
    ends = model.generation_config.eos_token_id
    assert ends == ([4, 2] if changes is OTHER_END else 2)
    assert loaded.eos_token_id == model.config.eos_token_id == (4 if changes is OTHER_END else 2)
    text = "name1 verb2 <eos>"
    assert loaded(text)["input_ids"] == AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]


def test_an_older_checkpoint_is_exported(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    result = trained(experiments, tokenizer, 3, {"model.lora": LORA})
    checkpoint, out = result.serialization_dir / "checkpoint_e1_b0", tmp_path / "out"
    exported(checkpoint, out)
    export(str(checkpoint), output_dir=str(tmp_path / "expected"))
    model = AutoModelForCausalLM.from_pretrained(out)
    assert_same_logits(model, tmp_path / "expected" / "model.tar.gz")
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(model, result.archive)


def test_weights_are_in_files_of_the_size_that_is_asked_for(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    result = trained(experiments, tokenizer, 0)
    out = tmp_path / "out"
    arguments = (result.archive, "--output", out, "--max-shard-size", "4KB")
    run = allennlp("deepspeed", "export", "--format", "huggingface", *arguments).check()
    assert run.output.endswith(f"{out}\n")
    shards = list(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    # Of one weight more than that, and a header.
    assert max(path.stat().st_size for path in shards) < 8_000
    assert_same_logits(AutoModelForCausalLM.from_pretrained(out), result.archive)
    # What is left of one export would be read with another.
    with pytest.raises(ConfigurationError, match="isn't an empty directory"):
        export_huggingface(str(result.archive), str(out))


@pytest.mark.parametrize("source", ["archive", "checkpoint"])
def test_adapters_of_a_language_model_are_those_of_peft(
    experiments: Experiments, pretrained: str, tmp_path: Path, source: str
) -> None:
    changes = {
        "model.config": None,
        "model.model_name": pretrained,
        "model.lora": LORA,
        "trainer.checkpointer": {"exclude_frozen_parameters": True},
    }
    result = trained(experiments, pretrained, 3, changes)
    path = result.archive if source == "archive" else result.serialization_dir
    names = exported(path, tmp_path / "adapters", adapters_only=True)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(names)
    assert "config.json" not in names
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == pretrained
    by_itself: Any = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    assert_same_logits(by_itself, result.archive)
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    loaded: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert_same_logits(loaded, result.archive)
    exported(path, tmp_path / "merged")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), result.archive)


@pytest.mark.parametrize("adapters_only", [False, True])
def test_an_encoder_of_an_embedder_is_exported(
    experiments: Experiments, bert: str, tmp_path: Path, adapters_only: bool
) -> None:
    result = experiments.run(deepspeed(adapted(bert), 3))
    out = tmp_path / "out"
    if adapters_only:
        allennlp("deepspeed", "export", "--adapters", result.archive, "--output", out).check()
        actual: Any = AutoModel.from_pretrained(bert)
        actual = peft.PeftModel.from_pretrained(actual, out)
    else:
        exported(result.archive, out)
        actual = AutoModel.from_pretrained(out)
    (expected,) = find_transformers(archived_model(result.archive)).values()
    with torch.no_grad():
        assert_same_outputs(actual.eval()(IDS).last_hidden_state, expected(IDS).last_hidden_state)
    text = "name1 verb2"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(bert)(text)["input_ids"]


def test_a_language_model_from_an_archive_has_the_tokenizer_of_its_reader(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    archive = trained(experiments, tokenizer, 0, OTHER_END).archive
    config = deepspeed(language_model(tokenizer, TWO_WORKERS, OTHER_END), 2)
    config["model"] = {"type": "from_archive", "archive_file": str(archive)}
    exported(experiments.run(config).archive, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.chat_template == TEMPLATE and loaded.eos_token_id == 4


def test_the_tokenizer_is_that_of_the_reader(
    experiments: Experiments, bert: str, tmp_path: Path
) -> None:
    transformer = {"type": "pretrained_transformer", "model_name": bert}
    cased = {**transformer, "tokenizer_kwargs": {"do_lower_case": False}}
    indexer = {**transformer, "tokenizer_kwargs": {"do_lower_case": True}}
    config = load_config(
        "classifier",
        {
            "dataset_reader.token_indexers": {"tokens": indexer},
            "dataset_reader.tokenizer": cased,
            "model.text_field_embedder.token_embedders.tokens": transformer,
            "model.seq2vec_encoder": {"type": "bert_pooler", "pretrained_model": bert},
            "trainer.num_epochs": 1,
        },
    )
    result = experiments.run(config)
    out = tmp_path / "out"
    export_huggingface(str(result.archive), str(out))
    text = "name1 VERB2"
    reader = DatasetReader.from_params(Params(config["dataset_reader"]))
    expected = [token.text_id for token in reader.text_to_instance(text)["tokens"].tokens]
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == expected
    assert AutoTokenizer.from_pretrained(bert)(text)["input_ids"] != expected


def test_one_of_several_encoders_is_chosen_by_name(
    experiments: Experiments, bert: str, tmp_path: Path
) -> None:
    transformer = {"type": "pretrained_transformer", "model_name": bert}
    embedder = {"token_embedders": {"tokens": transformer}}
    config = load_config(
        "bi_encoder",
        {
            "dataset_reader.tokenizer": transformer,
            "dataset_reader.token_indexers": {"tokens": transformer},
            "model.text_field_embedder": embedder,
            "model.document_text_field_embedder": embedder,
            "model.seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 32},
            "trainer.num_epochs": 1,
        },
    )
    result = experiments.run(deepspeed(config, 0))
    out = str(tmp_path / "out")
    name = "_{}_encoder._text_field_embedder.token_embedder_tokens.transformer_model"
    sides = ("query", "document")
    choice = "--module with one of " + ", ".join(map(name.format, sides))
    with pytest.raises(ConfigurationError, match=f"contains 2 transformers: .*{choice}"):
        export_huggingface(str(result.archive), out)
    with pytest.raises(ConfigurationError, match=f"no transformer 'c': .*{choice}"):
        export_huggingface(str(result.archive), out, module="c")
    expected = find_transformers(archived_model(result.archive))
    weights: Dict[str, torch.Tensor] = {}
    for which in sides:
        export_huggingface(str(result.archive), f"{out}_{which}", module=name.format(which))
        state_dict = AutoModel.from_pretrained(f"{out}_{which}").state_dict()
        weights[which] = state_dict["encoder.layer.0.output.dense.weight"]
        for key, value in expected[name.format(which)].state_dict().items():
            torch.testing.assert_close(state_dict[key], value)
    assert not torch.equal(weights["query"], weights["document"])


def test_what_cannot_be_exported_is_refused_by_name(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    result = trained(experiments, tokenizer, 0)
    source, out = str(result.serialization_dir), str(tmp_path / "out")
    archive = str(result.archive)
    with pytest.raises(ConfigurationError, match="has no adapters"):
        export_huggingface(source, out, adapters_only=True)
    with pytest.raises(ConfigurationError, match="is an archive, which has one set of weights"):
        export_huggingface(archive, out, best=True)
    with pytest.raises(ConfigurationError, match="--best exports the weights of the best epoch"):
        export_huggingface(source, out, best=True, epoch=1)
    with pytest.raises(ConfigurationError, match="isn't an empty directory"):
        export_huggingface(archive, source)
    with pytest.raises(CheckpointError, match="no checkpoint of 7 epochs"):
        export_huggingface(source, out, epoch=7)
    (tmp_path / "no_archive").write_text("{}")
    with pytest.raises(ConfigurationError, match="no_archive is not an AllenNLP archive"):
        export_huggingface(str(tmp_path / "no_archive"), out)
    with pytest.raises(ConfigurationError, match="no best.th in"):
        export_huggingface(str(tmp_path), out, best=True)
    run = allennlp("deepspeed", "export", source, "--max-shard-size", "1GB")
    assert run.returncode != 0 and "--max-shard-size needs --format huggingface" in run.output
    assert [path.name for path in tmp_path.iterdir()] == ["no_archive"]


def test_weights_of_another_model_are_refused(
    experiments: Experiments, tokenizer: str, tmp_path: Path
) -> None:
    result = trained(experiments, tokenizer, 0)
    copy = tmp_path / "copy"
    shutil.copytree(result.serialization_dir, copy)
    config = copy / "config.json"
    changed = json.loads(config.read_text())
    changed["model"]["lora"] = LORA
    config.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="missing .*lora_A.*, unexpected .*q_proj.weight"):
        export_huggingface(str(copy))


def test_models_without_a_transformer_are_refused(experiments: Experiments, tmp_path: Path) -> None:
    result = experiments.run(load_config("classifier", TWO_WORKERS))
    with pytest.raises(ConfigurationError, match="contains no transformers model"):
        export_huggingface(str(result.archive), str(tmp_path / "out"))


def test_parts_of_a_model_are_refused(
    experiments: Experiments, bert: str, tmp_path: Path, session_directory: Path
) -> None:
    directory = session_directory / "tiny_t5"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            tokenizer = AutoTokenizer.from_pretrained(bert)
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
            T5Model(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    transformer = {"type": "pretrained_transformer", "model_name": str(directory)}
    embedder = {**transformer, "sub_module": "encoder"}
    config = load_config(
        "classifier",
        {
            "dataset_reader.tokenizer": transformer,
            "dataset_reader.token_indexers": {"tokens": transformer},
            "model.text_field_embedder.token_embedders.tokens": embedder,
            "model.seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 16},
            "trainer.num_epochs": 1,
        },
    )
    result = experiments.run(config)
    with pytest.raises(
        ConfigurationError, match="is a T5Stack, which can't be loaded .* T5Model can"
    ):
        export_huggingface(str(result.archive), str(tmp_path / "out"))
    assert not any(tmp_path.iterdir())
