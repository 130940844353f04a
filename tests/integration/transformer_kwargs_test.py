"""The `transformer_kwargs` of pretrained embedders, wherever the trainer has to do with them."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List
from unittest import mock

import pytest
import torch
from allennlp.common import Params, cached_transformers
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules import TokenEmbedder
from transformers import (
    BertTokenizerFast,
    PreTrainedModel,
    T5Config,
    T5Model,
    XLNetConfig,
    XLNetModel,
)

from tests.fixtures.tiny_bert import tiny_bert
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side

# At a larger rate the weights run away.
SGD = partial(torch.optim.SGD, lr=0.01)
PLAIN, MISMATCHED = "pretrained_transformer", "pretrained_transformer_mismatched"


@pytest.fixture(scope="module")
def bert(session_directory: Path) -> str:
    return tiny_bert(session_directory / "tiny_bert")


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Any:
    with mock.patch.dict(cached_transformers._model_cache, clear=True):
        yield


def embedder(name: str, kind: str = PLAIN, **arguments: Any) -> TokenEmbedder:
    return TokenEmbedder.from_params(Params({"type": kind, "model_name": name, **arguments}))


def transformer_of(embedder: torch.nn.Module) -> Any:
    (transformer,) = [m for m in embedder.modules() if isinstance(m, PreTrainedModel)]
    return transformer


def attention(implementation: str) -> Dict[str, Any]:
    return {"transformer_kwargs": {"attn_implementation": implementation}}


@pytest.mark.parametrize("kind", [PLAIN, MISMATCHED])
def test_two_embedders_of_one_model_have_their_own_arguments(bert: str, kind: str) -> None:
    for implementation in ("eager", "sdpa", "eager"):
        found = transformer_of(embedder(bert, kind, **attention(implementation)))
        assert found.config._attn_implementation == implementation
    assert len(cached_transformers._model_cache) == 2


def test_weights_are_loaded_after_an_embedder_without(bert: str) -> None:
    without = transformer_of(embedder(bert, load_weights=False))
    loaded = transformer_of(embedder(bert))
    expected = cached_transformers.AutoModel.from_pretrained(bert)
    assert_same_weights(loaded.state_dict(), expected.state_dict())
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(without.state_dict()[name], loaded.state_dict()[name])


def test_the_cached_one_is_not_what_an_embedder_trains(bert: str) -> None:
    first = embedder(bert, **attention("eager"))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    second = embedder(bert, **attention("eager"))
    assert any(parameter.any() for parameter in second.parameters())


def test_the_revision_reaches_the_hub(bert: str) -> None:
    with mock.patch.object(cached_transformers.AutoModel, "from_pretrained") as from_pretrained:
        cached_transformers.get(bert, make_copy=False, revision="v2")
        cached_transformers.get(bert, make_copy=False, revision="v2")
        cached_transformers.get(bert, make_copy=False, revision="v3")
    assert [call.kwargs["revision"] for call in from_pretrained.call_args_list] == ["v2", "v3"]


class Classifier(Model):
    def __init__(self, embedder: TokenEmbedder) -> None:
        super().__init__(Vocabulary())
        self.embedder = embedder
        self.layer = torch.nn.Linear(embedder.get_output_dim(), 3)

    def forward(self, ids, mask) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.layer(self.embedder(ids, mask).mean(dim=1)) - 1).pow(2).mean()}


def id_batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    masks = [torch.arange(7).expand(2, 7) < torch.tensor([[7], [4 + i]]) for i in range(3)]
    return [
        {"ids": torch.randint(5, 50, (2, 7), generator=generator), "mask": mask} for mask in masks
    ]


def classifier(bert: str, implementation: str, is_adapted: bool = False) -> Classifier:
    """Without dropout, which isn't drawn in the same order by each kind of attention."""
    torch.manual_seed(1)
    settings = {"type": PLAIN, "model_name": bert, **attention(implementation)}
    if is_adapted:
        settings = {"type": "lora", "embedder": settings, "target_modules": ["query", "value"]}
    model = Classifier(TokenEmbedder.from_params(Params(settings)))
    transformer_of(model).pooler.requires_grad_(False)  # is not used
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


@pytest.mark.parametrize("stage, is_adapted", [(2, True), (3, False)])
def test_attention_trains_as_with_gradient_descent(bert: str, stage: int, is_adapted: bool) -> None:
    expected = Side(
        lambda: classifier(bert, "eager", is_adapted), id_batches, world_size=2, optimizer=SGD
    )
    actual = Side(
        lambda: classifier(bert, "sdpa", is_adapted),
        id_batches,
        stage,
        world_size=2,
        optimizer=SGD,
        is_constructed_partitioned=stage == 3,
    )
    assert_same_weights(actual.train(), expected.train())


def test_weights_in_another_precision_than_the_engines_are_refused(bert: str) -> None:
    def half() -> Classifier:
        return classifier(bert, "sdpa").bfloat16()

    def quantized() -> Classifier:
        model = classifier(bert, "sdpa")
        transformer_of(model).is_quantized = True  # as its quantizer does
        return model

    for model, message in (
        (half, "is bf16, but 'trainer.deepspeed_config' sets fp32"),
        (quantized, "'embedder.transformer_model' are quantized"),
    ):
        assert message in Side(model, id_batches, 3).refusal()


class Checkpointed(Classifier):
    """Dropout as it is, which is drawn again in the backward pass."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(1)
        super().__init__(TokenEmbedder.from_params(Params({"type": PLAIN, **settings})))
        transformer_of(self).pooler.requires_grad_(False)  # is not used


def elements_saved_for_backward(embedder: TokenEmbedder, *inputs: torch.Tensor) -> int:
    saved: List[int] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        embedder.train()(*inputs)
    return sum(saved)


IDS, MASK = torch.arange(5, 29).view(2, 12), torch.ones(2, 12, dtype=torch.bool)


@pytest.mark.parametrize("last_layer_only", [True, False])
@pytest.mark.parametrize("kind", [PLAIN, MISMATCHED])
def test_gradient_checkpointing_saves_less_for_backward(
    bert: str, kind: str, last_layer_only: bool
) -> None:
    offsets = torch.stack([torch.arange(12)] * 2, dim=-1).expand(2, 12, 2)
    inputs = (IDS, MASK) if kind == PLAIN else (IDS, MASK, offsets, MASK)

    def saved(**arguments: Any) -> int:
        arguments["last_layer_only"] = last_layer_only
        return elements_saved_for_backward(embedder(bert, kind, **arguments), *inputs)

    unset = saved()
    assert saved(gradient_checkpointing=False) == unset
    assert saved(gradient_checkpointing=True) < unset / 3
    assert saved(transformer_kwargs={"gradient_checkpointing": True}) < unset / 3
    # The copy of a cached transformer has its own setting.
    assert saved() == unset


def test_checkpointing_a_frozen_transformer_leaves_it_without_a_graph(bert: str) -> None:
    frozen = embedder(bert, train_parameters=False, gradient_checkpointing=True).train()
    assert not frozen(IDS, MASK).requires_grad


@pytest.mark.parametrize("stage, world_size", [(None, 1), (2, 2), (3, 2)])
def test_gradient_checkpointing_gives_the_same_weights(
    bert: str, stage: Any, world_size: int
) -> None:
    def side(is_checkpointed: bool, stage: Any) -> Side:
        return Side(
            lambda: Checkpointed(model_name=bert, gradient_checkpointing=is_checkpointed),
            id_batches,
            stage,
            world_size=world_size,
            optimizer=SGD,
            is_constructed_partitioned=stage == 3,
        )

    assert_same_weights(side(True, stage).train(), side(False, None).train())


def test_a_transformer_that_cannot_be_checkpointed_is_refused(
    tmp_path: Path, bert: str, expect_message: Callable[[str], None]
) -> None:
    sizes = {"vocab_size": 60, "d_model": 8, "n_layer": 1, "n_head": 1, "d_inner": 8}
    XLNetModel(XLNetConfig(**sizes)).save_pretrained(tmp_path)
    BertTokenizerFast.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        embedder(str(tmp_path), gradient_checkpointing=True)
    expect_message(str(error.value))


def test_all_layers_of_an_encoder_with_its_own_config(tmp_path: Path, bert: str) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    T5Model(T5Config(vocab_size=60, **sizes)).save_pretrained(tmp_path)
    BertTokenizerFast.from_pretrained(bert).save_pretrained(tmp_path)
    arguments = {"sub_module": "encoder", "last_layer_only": False}
    plain = embedder(str(tmp_path), **arguments).eval()
    assert plain(IDS, MASK).shape == (2, 12, 8)
