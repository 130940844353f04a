"""
The loss of any causal language model is the one that transformers compute, in less memory, and
packed examples have the losses that they have alone.
"""

import re
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model

from allennlp_deepspeed.models.language_modeling import CausalLM, chunked_cross_entropy
from tests.fixtures.tiny_lm import LLAMA
from tests.support.tensor_memory import TensorMemory

SIZES = {
    key: LLAMA[key]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"model_type": "gpt2", "vocab_size": 57, "n_embd": 16, "n_layer": 2, "n_head": 2}
BERT = {"model_type": "bert", **SIZES, "num_attention_heads": 2}
OPT = {
    "model_type": "opt",
    "vocab_size": 57,
    "hidden_size": 16,
    "word_embed_proj_dim": 8,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
MIXTRAL = {
    "model_type": "mixtral",
    **SIZES,
    **HEADS,
    "num_local_experts": 2,
    "output_router_logits": True,
}
GEMMA2 = {"model_type": "gemma2", **SIZES, **HEADS, "final_logit_softcapping": 0.5}
GEMMA3 = {
    **GEMMA2,
    "model_type": "gemma3_text",
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
EMBEDDED = ["embed_tokens", "q_proj"]
COHERE = {"model_type": "cohere", **SIZES, **HEADS, "logit_scale": 0.3}

MODELS: Dict[str, Dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "capped": GEMMA2,
    "scaled": COHERE,
    "projected": OPT,
    "with_head_of_its_own": {**BERT, "is_decoder": True},
    "mixture": {"model_type": "mixtral", **SIZES, **HEADS, "num_local_experts": 2},
}


def causal_lm(config: Dict[str, Any], **arguments: Any) -> CausalLM:
    torch.manual_seed(5)
    params = Params({"type": "causal_lm", "config": dict(config), **arguments})
    model = Model.from_params(params, vocab=Vocabulary())
    assert isinstance(model, CausalLM)
    for parameter in model.parameters():  # biases begin with zeros, and initial weights are small
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def batch() -> Dict[str, torch.Tensor]:
    input_ids = torch.randint(5, 57, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = input_ids.clone()
    labels[:, 0] = labels[0, 7:] = labels[2, 3:5] = -100
    return {"input_ids": input_ids, "labels": labels}


@pytest.mark.parametrize(
    "name, library", [*((name, True) for name in MODELS), ("llama", False), ("capped", False)]
)
def test_loss_and_gradients_are_those_of_transformers(
    name: str, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:
        # Since PyTorch 2.13.
        monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    model = causal_lm(MODELS[name], loss_chunk_size=4).eval()
    expected = model.transformer(**batch(), use_cache=False)
    expected.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    actual = model(**batch())
    actual["loss"].backward()
    assert actual["loss"].item() == pytest.approx(expected.loss.item(), rel=1e-5)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name in gradients:
            torch.testing.assert_close(
                parameter.grad, gradients[parameter_name], rtol=1e-4, atol=1e-6
            )
    metrics = model.get_metrics(reset=True)
    targets = batch()["labels"][:, 1:]
    correct = (expected.logits[:, :-1].argmax(-1) == targets).sum() / (targets != -100).sum()
    assert metrics["token_accuracy"] == pytest.approx(correct.item())
    assert metrics["perplexity"] == pytest.approx(expected.loss.exp().item(), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_of_routers_is_that_of_transformers(packed: bool) -> None:
    model = causal_lm(MIXTRAL, loss_chunk_size=4)
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, 7:] = 0
    expected = model.transformer(**inputs, use_cache=False)
    assert expected.aux_loss > 0.5
    expected.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    if packed:
        inputs["position_ids"] = torch.arange(11).expand(3, 11)
    actual = model(**inputs)["loss"]
    actual.backward()
    assert actual.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    perplexity = model.get_metrics(reset=True)["perplexity"]
    assert perplexity < expected.loss.exp().item(), "Of tokens alone."


def test_logits_of_a_batch_are_never_in_memory() -> None:
    vocabulary_size, num_positions, chunk_size = 5000, 64, 8
    output_layer = torch.nn.Linear(4, vocabulary_size, bias=False)
    hidden = torch.randn(4, num_positions // 4, 4, requires_grad=True)
    targets = torch.randint(vocabulary_size, hidden.shape[:2])
    with TensorMemory() as memory:
        losses = chunked_cross_entropy.chunked_cross_entropy(
            output_layer, hidden, targets, chunk_size, adjust=None
        )
        losses.total.backward()
    assert hidden.grad is not None and hidden.grad.any()
    # Logits, their gradient and what lies between them, and the weights' gradient twice.
    chunk_bytes = 4 * vocabulary_size * chunk_size
    assert memory.peak < 5 * chunk_bytes < 4 * vocabulary_size * num_positions


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": LLAMA, "lora": {"target_modules": "all-linear"}},
        {"model_name": "name"},
        {"model_name": "name", "lora": {"target_modules": "all-linear"}, "load_weights": False},
    ],
    ids=["random", "trained", "not_loaded"],
)
def test_weights_that_no_name_gives_back_cannot_be_left_out(arguments: Dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="'model.save_adapters_only'"):
        CausalLM(Vocabulary(), save_adapters_only=True, **arguments)


@pytest.mark.parametrize("training", [True, False])
def test_without_anything_to_predict_the_loss_is_zero(training: bool) -> None:
    model = causal_lm(LLAMA).train(training)
    inputs = batch()
    inputs["labels"][:] = -100
    assert model(**inputs)["loss"].item() == 0
    assert model.num_loss_tokens(**inputs) == 0
    assert model.get_metrics() == {}
    with pytest.raises(ConfigurationError, match="No batch had a token with a loss"):
        model.get_metrics(reset=True)
    assert model.get_metrics(reset=True) == {}, "Of no batch."


def test_a_dummy_batch_counts_for_nothing() -> None:
    model = causal_lm(LLAMA).eval()
    model(**batch())
    expected = model.get_metrics()
    assert model(**model.dummy_batch(batch())) == {}
    assert model.get_metrics() == expected


def test_a_first_token_and_padding_are_never_predicted() -> None:
    model = causal_lm(LLAMA).eval()
    inputs = batch()
    assert model.num_loss_tokens(**inputs) == (inputs["labels"][:, 1:] != -100).sum()
    longer = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (0, 3), value=0),
        "labels": torch.nn.functional.pad(inputs["labels"], (0, 3), value=-100),
    }
    longer["labels"][:, 0] = longer["input_ids"][:, 0]
    torch.testing.assert_close(model(**longer), model(**inputs))


@pytest.mark.parametrize("config", [LLAMA, GPT2, GEMMA3], ids=lambda c: c["model_type"])
def test_packed_examples_do_not_see_each_other(config: Dict[str, Any]) -> None:
    model = causal_lm(config, loss_chunk_size=4).eval()
    inputs = batch()
    inputs["labels"][:] = inputs["input_ids"]
    inputs["labels"][:, 0] = -100
    apart = [{key: value[row, None] for key, value in inputs.items()} for row in range(3)]
    total = sum(model(**example)["loss"] * model.num_loss_tokens(**example) for example in apart)
    packed = {key: value.view(1, -1) for key, value in inputs.items()}
    packed["position_ids"] = torch.arange(11).repeat(3)[None]
    loss = model(**packed)["loss"] * model.num_loss_tokens(**packed)
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        OPT,
        {"model_type": "mamba", **SIZES, "state_size": 4},
        # Its masks are made without positions.
        {"model_type": "gpt_oss", **SIZES, **HEADS, "head_dim": 8, "num_experts_per_tok": 1},
        # Beside attention, with a convolution or a linear attention that no flag tells of.
        {"model_type": "lfm2", **SIZES, **HEADS, "layer_types": ["conv", "full_attention"]},
    ],
    ids=lambda c: c["model_type"],
)
def test_models_in_which_packed_examples_see_each_other_are_refused(config: Any) -> None:
    model = causal_lm(config)
    packed = {**batch(), "position_ids": torch.arange(11).expand(3, 11)}
    with pytest.raises(
        ConfigurationError, match='packed examples attend to each other: write "pack"'
    ):
        model(**packed)


def test_packed_batches_of_several_sequences_are_refused_with_flash_attention() -> None:
    model = causal_lm(LLAMA)
    model.transformer.config._attn_implementation_internal = "flash_attention_2"
    packed = {**batch(), "position_ids": torch.arange(11).expand(3, 11)}
    with pytest.raises(ConfigurationError, match="only in batches of one sequence"):
        model(**packed)


def test_models_that_see_what_they_predict_are_refused() -> None:
    model = causal_lm({"model_type": "bert-generation", **SIZES})
    with pytest.raises(ConfigurationError, match="isn't causal"):
        model(**batch())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "Write one of 'model.model_name' .* and 'model.config'"),
        ({"config": {"model_type": "lama"}}, "'lama', .*did you mean \"llama\""),
        ({"config": BERT}, '"is_decoder": true'),
        (
            {"config": {"model_type": "falcon", "head_dim": 8}},
            "'model.config' is .* can't load a causal language model: .*head_dim",
        ),
        ({"config": LLAMA, "loss_chunk_size": 0}, "'model.loss_chunk_size' is 0"),
        ({"config": LLAMA, "transformer_kwargs": {"dtype": "fp8"}}, "'fp8': write \"float32\""),
        ({"config": LLAMA, "lora": {"target_modules": ["lm_head"]}}, "adapts the output layer"),
        (
            {
                "config": {**LLAMA, "tie_word_embeddings": True},
                "lora": {"target_modules": EMBEDDED},
            },
            "adapts 'model.embed_tokens', which shares its weights with 'lm_head.weight'",
        ),
    ],
)
def test_wrong_keys_are_refused(arguments: Dict[str, Any], message: str, tmp_path: Any) -> None:
    params = Params({"type": "causal_lm", **arguments})
    with pytest.raises(ConfigurationError, match=message):
        Model.from_params(params, vocab=Vocabulary(), serialization_dir=str(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_no_weights_may_be_missing(tmp_path: Path, tied: bool) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}

    def load() -> Model:
        torch.save(weights, tmp_path / "best.th")
        params = Params({"model": {"type": "causal_lm", "config": dict(config)}})
        return Model.load(params, str(tmp_path), str(tmp_path / "best.th"))

    Vocabulary().save_to_files(str(tmp_path / "vocabulary"))
    weights = causal_lm(config).state_dict()
    loaded = load().state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    (output_layer,) = (name for name in weights if name.endswith("lm_head.weight"))
    del weights[output_layer]
    with pytest.raises(RuntimeError, match=re.escape(output_layer)):
        load()
