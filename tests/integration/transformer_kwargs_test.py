"""The `transformer_kwargs` of pretrained embedders, wherever the trainer has to do with them."""

from functools import partial
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import pytest
import torch
from allennlp.common import Params, cached_transformers
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules import TokenEmbedder
from transformers import PreTrainedModel

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


@pytest.mark.parametrize("stage, is_adapted", [(0, False), (2, True), (3, False)])
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
