"""
The loss of truncated representations, and its gradients, are those of a plain loop over dimensions.
"""

from typing import Any, Dict, Tuple

import pytest
import torch
from allennlp.common import Params
from allennlp.data import Vocabulary
from allennlp.models import Model

from allennlp_deepspeed.models.contrastive import BiEncoder

DIM = 12
TEMPERATURE = 0.1


def bi_encoder(**keys: Any) -> BiEncoder:
    params = {
        "type": "bi_encoder",
        "text_field_embedder": {
            "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": DIM}}
        },
        "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": DIM, "averaged": True},
        "temperature": TEMPERATURE,
        **keys,
    }
    vocab = Vocabulary({"tokens": {f"word{i}": 1 for i in range(20)}})
    model = Model.from_params(Params(params), vocab=vocab)
    assert isinstance(model, BiEncoder)
    return model


def texts(*shape: int) -> Dict[str, Any]:
    return {"tokens": {"tokens": torch.randint(2, 22, shape)}}


def loss_and_gradient(model: Model, loss: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    (embeddings,) = (p for n, p in model.named_parameters() if n.endswith("weight"))
    return loss, torch.autograd.grad(loss, embeddings)[0]


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_the_weighted_sum_of_all_dimensions(normalize: bool):
    torch.manual_seed(0)
    weights = {4: 0.5, DIM: 1.0, 7: 2.0}
    model = bi_encoder(
        normalize=normalize,
        matryoshka_dims=list(weights),
        matryoshka_weights=list(weights.values()),
    )
    inputs = {"query": texts(6, 3), "document": texts(6, 5), "negatives": texts(6, 2, 4)}
    ids = torch.arange(1, 25)
    outputs = model(
        **inputs, query_id=ids[:6], document_id=ids[:6], negative_ids=ids[6:18].view(6, 2)
    )

    encoded = model.encode(**inputs)
    candidates = torch.cat([encoded["document"], encoded["negatives"].flatten(0, 1)])
    expected = torch.zeros(())
    for dim, weight in weights.items():
        sides = [encoded["query"][:, :dim], candidates[:, :dim]]
        if normalize:
            sides = [side / side.norm(dim=1, keepdim=True) for side in sides]
        similarities = sides[0] @ sides[1].T / TEMPERATURE
        expected = expected + weight * torch.nn.functional.cross_entropy(
            similarities, torch.arange(6)
        )
    for actual, plain in zip(
        loss_and_gradient(model, outputs["loss"]), loss_and_gradient(model, expected)
    ):
        torch.testing.assert_close(actual, plain)


def test_weights_are_1_by_default_and_the_order_is_free():
    torch.manual_seed(0)
    inputs = {"query": texts(6, 3), "document": texts(6, 5)}
    losses = []
    for keys in (
        {"matryoshka_dims": [3, DIM]},
        {"matryoshka_dims": [DIM, 3], "matryoshka_weights": [1, 1]},
    ):
        torch.manual_seed(1)
        losses.append(bi_encoder(**keys)(**inputs)["loss"])
    assert torch.equal(*losses)
