"""The token embedder of type "lora"."""

from functools import partial
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules import TokenEmbedder

from allennlp_deepspeed.models.lora import merge_adapters, remove_adapters
from tests.fixtures.tiny_bert import tiny_bert
from tests.support.experiment import StateDict, assert_same_outputs, assert_same_weights
from tests.support.side_by_side import Side

PLAIN = "pretrained_transformer"
MISMATCHED = "pretrained_transformer_mismatched"


@pytest.fixture(scope="module")
def bert(session_directory: Path) -> str:
    return tiny_bert(session_directory / "tiny_bert")


def lora(bert: str, embedder: str = PLAIN, **settings: Any) -> TokenEmbedder:
    inner = {"type": embedder, "model_name": bert}
    torch.manual_seed(1)
    return TokenEmbedder.from_params(Params({"type": "lora", "embedder": inner, **settings}))


def trained(embedder: TokenEmbedder) -> TokenEmbedder:
    """With adapters that do something: at the beginning they add zero."""
    for parameter in embedder.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return embedder.eval()


class Adapted(Model):
    def __init__(self, bert: str) -> None:
        super().__init__(Vocabulary())
        self.embedder = lora(bert, r=2, target_modules=["query", "intermediate.dense"])
        self.layer = torch.nn.Linear(32, 3)

    def forward(self, ids) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        embedded = self.embedder(ids, torch.ones_like(ids).bool())
        return {"loss": (self.layer(embedded.mean(dim=1)) - 1).pow(2).mean()}


def id_batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"ids": torch.randint(5, 50, (2, 6), generator=generator)} for _ in range(4)]


@pytest.fixture(scope="module")
def reference(bert: str) -> StateDict:
    return Side(lambda: Adapted(bert), id_batches, world_size=2).train()


@pytest.mark.parametrize("stage", range(4))
def test_training_is_that_of_gradient_descent(bert: str, reference: StateDict, stage: int):
    actual = Side(lambda: Adapted(bert), id_batches, stage, world_size=2).train()
    assert_same_weights(actual, reference)
    initial = Adapted(bert).state_dict()
    for name, weight in actual.items():
        is_trained = "lora_" in name or name.startswith("layer.")
        assert weight.equal(initial[name]) != is_trained, name


class HalfPrecisionBase(Model):
    """A base in bf16, frozen or not, and an adapter in fp32, as peft has them."""

    def __init__(self, is_frozen: bool = True, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(Vocabulary())
        self.base = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.base.to(torch.bfloat16).to(dtype).requires_grad_(not is_frozen)
        self.adapter = torch.nn.Linear(8, 8)

    def forward(self, ids) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        inputs = torch.nn.functional.one_hot(ids % 8, 8).float()
        base = self.base(inputs.to(self.base[0].weight.dtype)).float()
        return {"loss": (base + self.adapter(inputs) - 1).pow(2).mean()}


@pytest.mark.parametrize("stage, is_partitioned", [(0, False), (2, False), (3, True)])
def test_a_frozen_base_is_computed_in_its_own_precision(stage: int, is_partitioned: bool):
    expected = Side(HalfPrecisionBase, id_batches, world_size=2).train()
    side = Side(HalfPrecisionBase, id_batches, stage, 2, is_constructed_partitioned=is_partitioned)
    assert_same_weights(side.train(), expected, tolerance=1e-5 if stage < 3 else 1e-3)
    for dtypes in side.on_all_ranks(_dtypes):
        assert dtypes == {n: str(p.dtype) for n, p in HalfPrecisionBase().named_parameters()}


def _dtypes(trainer: Any) -> Dict[str, str]:
    parameters = dict(trainer.model.named_parameters())
    return {name: str(getattr(p, "ds_tensor", p).dtype) for name, p in parameters.items()}


def test_a_base_that_is_trained_is_partitioned_in_the_precision_of_the_engine():
    loaded, in_fp32 = (partial(HalfPrecisionBase, False, t) for t in (torch.bfloat16, torch.float))
    side = Side(loaded, id_batches, 3, 2, is_constructed_partitioned=True)
    assert_same_weights(side.train(), Side(in_fp32, id_batches, world_size=2).train())


@pytest.mark.parametrize("embedder", [PLAIN, MISMATCHED])
def test_only_adapters_are_trainable(bert: str, embedder: str):
    adapted = lora(bert, embedder, r=4, target_modules=["query", "dense"])
    plain = TokenEmbedder.from_params(Params({"type": embedder, "model_name": bert}))
    assert type(adapted) is type(plain)
    trainable = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    assert {4} == {p.shape[0] for name, p in trainable.items() if "lora_A" in name}
    frozen = {
        name.replace(".base_layer", ""): p
        for name, p in adapted.named_parameters()
        if not p.requires_grad
    }
    assert frozen.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(p, frozen[name]) for name, p in plain.named_parameters())


def test_what_is_beside_the_transformer_stays_trainable(bert: str):
    inner = {"type": PLAIN, "model_name": bert, "last_layer_only": False}
    embedder = TokenEmbedder.from_params(Params({"type": "lora", "embedder": inner}))
    assert all(p.requires_grad for p in embedder._scalar_mix.parameters())


def test_modules_of_a_known_kind_of_transformer_need_not_be_named(bert: str):
    names = [name for name, p in lora(bert).named_parameters() if p.requires_grad]
    assert {name.split(".")[-4] for name in names} == {"query", "value"}


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["pooler"]}])
def test_merged_adapters_compute_the_same(bert: str, settings: Dict[str, Any]):
    embedder = trained(lora(bert, target_modules=["query", "dense"], **settings))
    ids = torch.tensor([[2, 7, 8, 3]])
    expected = embedder.transformer_model(ids)
    merge_adapters(embedder)
    plain = TokenEmbedder.from_params(Params({"type": PLAIN, "model_name": bert})).eval()
    plain.load_state_dict(embedder.state_dict())
    actual = plain.transformer_model(ids)
    assert_same_outputs(actual.last_hidden_state, expected.last_hidden_state)
    assert_same_outputs(actual.pooler_output, expected.pooler_output)
    with pytest.raises(ConfigurationError, match="has no adapters"):
        merge_adapters(embedder)


def test_a_config_without_adapters():
    inner = {"type": PLAIN, "model_name": "bert"}
    config = {"model": {"embedders": [{"type": "lora", "embedder": inner, "r": 4}], "dim": 3}}
    assert remove_adapters(config) == {"model": {"embedders": [inner], "dim": 3}}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rank": 4}, "peft refuses .*A token embedder of type 'lora': .*'rank'"),
        ({"r": 0}, "peft refuses .*: .*r.*positive"),
        ({"target_modules": ["keys"]}, "peft refuses .*: Target modules .*keys.* not found"),
        ({"init_lora_weights": "pissa"}, "changes the transformer's weights"),
        ({"inference_mode": True}, "has the key 'inference_mode', which freezes the adapters: r"),
        ({"alora_invocation_tokens": [3]}, "'alora_invocation_tokens', which has an effect in"),
        ({"eva_config": {"rho": 2.0}}, "'eva_config', which is for a value of 'init_lora_weights'"),
    ],
)
def test_wrong_settings_are_refused(bert: str, settings: Dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        lora(bert, **settings)


def test_an_embedder_without_a_transformer_is_refused():
    inner = {"type": "embedding", "num_embeddings": 3, "embedding_dim": 2}
    with pytest.raises(ConfigurationError, match="Embedding, which contains 0 Hugging"):
        TokenEmbedder.from_params(Params({"type": "lora", "embedder": inner}))


def test_adapters_in_adapters_are_refused(bert: str):
    inner = {"type": "lora", "embedder": {"type": PLAIN, "model_name": bert}}
    with pytest.raises(ConfigurationError, match="has adapters already"):
        TokenEmbedder.from_params(Params({"type": "lora", "embedder": inner}))


def test_the_package_that_is_needed_is_named(bert: str, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigurationError, match="pip install --no-deps peft"):
        lora(bert)
