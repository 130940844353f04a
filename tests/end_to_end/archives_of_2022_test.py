"""
What AllenNLP 2.10.1 has written in an environment of 2022, with PyTorch 1.12 and transformers 4.20,
is used today. `evidence.original.fixtures` has made it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models import load_archive
from allennlp.modules.transformer import T5
from allennlp.nn import Initializer
from allennlp.predictors import Predictor
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    FSMTConfig,
    MarianConfig,
    MPNetConfig,
    PegasusConfig,
    RoFormerConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    YosoConfig,
)

from evidence.original.fixtures import ARCHIVES, DATA, DIRECTORY, INTERRUPTED
from tests.support.command import REPOSITORY, allennlp
from tests.support.experiment import PACKAGES, deepspeed, write_config

TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives have paths in it."""
    monkeypatch.chdir(REPOSITORY)


def expected(name: str) -> Dict[str, Any]:
    return json.loads((DIRECTORY / name / "outputs.json").read_text())


def archive_of(name: str) -> str:
    return str(DIRECTORY / name / "model.tar.gz")


def texts() -> List[Dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def assert_same(outputs: List[Dict[str, Any]], name: str) -> None:
    for output, former in zip(outputs, expected(name)["predictions"], strict=True):
        assert list(output["logits"]) == pytest.approx(former["logits"], abs=TOLERANCE)


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_predicts_the_same(name: str) -> None:
    predictor = Predictor.from_path(archive_of(name))
    inputs = [{"sentence": each["text"]} for each in texts()[:4]]
    assert_same([predictor.predict_json(each) for each in inputs], name)


def test_the_commands_read_an_archive_without_an_included_package(tmp_path: Path) -> None:
    """It is enough that this package is installed. Another folder has no file with plugins."""
    shutil.copytree(DIRECTORY, tmp_path / DIRECTORY)
    metrics = tmp_path / "metrics.json"
    command = ["evaluate", archive_of("roberta"), str(DATA), "--output-file", str(metrics)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    program = [sys.executable, "-m", "allennlp"]
    subprocess.run([*program, *command], check=True, cwd=tmp_path, env=environment)
    former = expected("roberta")["metrics"]
    assert json.loads(metrics.read_text()) == pytest.approx(former, abs=TOLERANCE)


def test_an_unexpected_key_is_still_an_error(tmp_path: Path) -> None:
    """Also one of a former name, where no class of transformers has owned it."""
    shutil.unpack_archive(archive_of("gpt2"), tmp_path)
    path = tmp_path / "weights.th"
    weights = torch.load(path)
    for key in ("_feedforward.bias", "_text_field_embedder.position_ids"):
        torch.save({**weights, key: torch.ones(1)}, path)
        with pytest.raises(RuntimeError, match=key):
            load_archive(tmp_path)


def test_a_buffer_of_another_shape_is_still_an_error(tmp_path: Path) -> None:
    shutil.unpack_archive(archive_of("roberta"), tmp_path)
    path = tmp_path / "weights.th"
    weights = torch.load(path)
    (key,) = [key for key in weights if key.endswith("position_ids")]
    torch.save({**weights, key: weights[key][:, :7]}, path)
    with pytest.raises(RuntimeError, match=key):
        load_archive(tmp_path)


def test_an_initializer_reads_an_archive() -> None:
    trained = load_archive(archive_of("gpt2")).model
    new = load_archive(archive_of("gpt2")).model
    for parameter in new.parameters():
        torch.nn.init.zeros_(parameter)
    pretrained = Params({"type": "pretrained", "weights_file_path": archive_of("gpt2")})
    initializer = Initializer.from_params(pretrained)
    for name, parameter in new.named_parameters():
        initializer(parameter, parameter_name=name)
    assert_close(new, trained.state_dict())


def assert_close(model: torch.nn.Module, weights: Dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], atol=TOLERANCE, rtol=0)


# resumption


def resume(directory: Path, config: Dict[str, Any], **kwargs: Any) -> Any:
    out = directory / "out"
    shutil.copytree(INTERRUPTED, out)
    path = write_config(config, directory)
    return allennlp("train", path, "-s", out, "--recover", *PACKAGES, **kwargs)


def test_an_interrupted_training_continues(tmp_path: Path) -> None:
    """With Adam, whose state goes by position, and a model whose parameters had another order."""
    config = Params.from_file(INTERRUPTED / "config.json").as_dict(quiet=True)
    resume(tmp_path, config).check()
    final = torch.load(tmp_path / "out" / "model_state_e3_b0.th")
    weights = torch.load(INTERRUPTED / "expected.th")
    model = load_archive(archive_of("roberta")).model
    model.load_state_dict(final)
    assert_close(model, weights)


def test_the_message_of_the_deepspeed_trainer_has_what_works(tmp_path: Path) -> None:
    """Its command makes an archive, and its keys start from that."""
    config = Params.from_file(INTERRUPTED / "config.json").as_dict(quiet=True)
    config["trainer"].pop("checkpointer")
    run = resume(tmp_path, deepspeed(config, 2))
    assert run.returncode != 0
    words = " ".join(run.output.split())
    assert "model_state_e2_b0.th" in words and "training_state" not in words
    code = words.split('python -c "')[1].split('"')[0]
    subprocess.run([sys.executable, "-c", code], check=True)
    archive = tmp_path / "out" / "model_state_e2_b0.tar.gz"
    assert f'"archive_file": "{archive}"' in words
    model = load_archive(archive).model
    assert_close(model, torch.load(INTERRUPTED / "model_state_e2_b0.th"))


# settings that transformers overrides


TINY = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20}
FIXED_POSITIONS = [
    PegasusConfig(**TINY, encoder_attention_heads=2, decoder_attention_heads=2),
    MarianConfig(**TINY, encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0),
    FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=20,
        tgt_vocab_size=20,
        **{**TINY, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    ),
    RoFormerConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    DistilBertConfig(
        vocab_size=20, dim=16, n_layers=1, n_heads=2, hidden_dim=16, sinusoidal_pos_embds=True
    ),
]


@pytest.mark.parametrize("config", FIXED_POSITIONS, ids=lambda config: config.model_type)
def test_fixed_positions_are_not_trained(config: Any, tmp_path: Path) -> None:
    made = AutoModel.from_config(config)
    made.save_pretrained(tmp_path)
    for model in (made, AutoModel.from_pretrained(tmp_path)):
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        assert frozen and all("position" in name for name in frozen)
    assert any(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_of_t5_are_tied_as_its_config_says(is_tied: bool, tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = {"tie_word_embeddings": is_tied, "decoder_start_token_id": 0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    model = T5.from_pretrained_module(str(tmp_path), load_weights=False)
    assert (model.lm_head.weight is model.token_embeddings.weight) == is_tied


SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config, key",
    [
        (BertConfig(**SMALL, position_embedding_type="relative_key"), "position_embedding_type"),
        (MPNetConfig(**SMALL, is_decoder=True), "is_decoder"),
    ],
    ids=["relative positions", "decoder"],
)
def test_a_setting_that_transformers_ignores_is_refused(config: Any, key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        AutoModel.from_config(config)


def test_padding_that_transformers_does_not_mask_is_refused(tmp_path: Path) -> None:
    """Alone, where it would change what the model puts out."""
    AutoModel.from_config(YosoConfig(**SMALL)).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path).eval()
    ids, mask = torch.tensor([[2, 5, 3, 1]]), torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(ConfigurationError, match="batch_size"):
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(ConfigurationError, match="batch_size"):
        model(ids, mask)
    outputs = [model(ids, each).last_hidden_state for each in (None, torch.ones_like(mask))]
    torch.testing.assert_close(*outputs, atol=0, rtol=0)


def test_different_weights_are_not_loaded_into_one() -> None:
    """As of T5 v1.1, which transformers 4 didn't tie."""
    config = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    assert model.lm_head.weight is model.shared.weight
    state = {**model.state_dict(), "lm_head.weight": torch.full((20, 16), 2.0)}
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name])


def test_modules_that_transformers_has_renamed_are_loaded() -> None:
    """Into the model itself, and as a part of another."""
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    model = ViTModel(config)
    state = model.state_dict()
    former = {
        "layers.": "encoder.layer.",
        ".attention.q_proj": ".attention.attention.query",
        ".attention.k_proj": ".attention.attention.key",
        ".attention.v_proj": ".attention.attention.value",
        ".attention.o_proj": ".attention.output.dense",
        ".mlp.fc1": ".intermediate.dense",
        ".mlp.fc2": ".output.dense",
    }

    def former_name(name: str) -> str:
        for today, then in former.items():
            name = name.replace(today, then)
        return f"part.{name}"

    other = torch.nn.ModuleDict({"part": ViTModel(config)})
    other.load_state_dict({former_name(name): value for name, value in state.items()})
    assert_close(other["part"], state)
