"""The loss of a batch is the mean of those of its parts, weighed by what they are means over."""

from typing import Any, Dict

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import BasicClassifier, Model, SimpleTagger

from allennlp_deepspeed.models.language_modeling import CausalLM
from allennlp_deepspeed.training import loss_terms
from allennlp_deepspeed.training.chunking import (
    indivisible_inputs,
    num_examples,
    slice_rows,
    split_evenly,
)
from tests.support.experiment import load_config
from tests.unit.language_modeling.causal_lm_test import MIXTRAL

NUM_WORDS, NUM_LABELS = 9, 3
LENGTHS = [4, 0, 3, 1, 0, 2, 4]


def model(name: str) -> Model:
    torch.manual_seed(2)
    labels = {"O": 3, "B": 2, "C": 1}
    words = {f"word{i}": 1 for i in range(NUM_WORDS)}
    vocab = Vocabulary({"tokens": words, "labels": labels})
    return Model.from_params(Params(load_config(name)["model"]), vocab=vocab).eval()


def batch(name: str) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, NUM_WORDS, (len(LENGTHS), max(LENGTHS)), generator=generator)
    inputs: Dict[str, Any] = {"metadata": [{"words": []} for _ in LENGTHS]}
    if name == "tagger":
        lengths = torch.tensor(LENGTHS).unsqueeze(1)
        ids = torch.where(torch.arange(max(LENGTHS)) < lengths, ids, 0)
        inputs["tags"] = ids % NUM_LABELS
    else:
        inputs["label"] = ids[:, 0] % NUM_LABELS
        # Which PyTorch leaves out.
        inputs["label"][2] = -100
    return {"tokens": {"tokens": {"tokens": ids}}, **inputs}


@pytest.mark.parametrize(
    "name, changes",
    [("tagger", {}), ("tagger", {"ignore_loss_on_o_tags": True}), ("classifier", {})],
)
def test_parts_make_the_loss_of_the_whole(name: str, changes: Dict[str, Any]) -> None:
    whole = {**batch(name), **changes}
    trained = model(name)
    assert type(trained) in (SimpleTagger, BasicClassifier)
    assert not indivisible_inputs(whole)
    total, num_terms = 0.0, 0
    for start, stop in split_evenly(num_examples(whole), 3):
        part = slice_rows(whole, start, stop)
        count = int(loss_terms.num_loss_terms(trained, part))
        total += count * float(trained(**part)["loss"])
        num_terms += count
    assert num_terms == int(loss_terms.num_loss_terms(trained, whole)) < len(LENGTHS)
    assert total / num_terms == pytest.approx(float(trained(**whole)["loss"]), rel=1e-5)


def test_a_loss_of_routers_has_no_parts() -> None:
    mixture = CausalLM(Vocabulary(), config=MIXTRAL)
    with pytest.raises(ConfigurationError, match="load-balancing loss of experts"):
        loss_terms.check(mixture)
    loss_terms.check(CausalLM(Vocabulary(), config={**MIXTRAL, "output_router_logits": False}))


@pytest.mark.parametrize("num_examples", range(1, 9))
def test_chunks_are_as_equal_as_can_be(num_examples: int) -> None:
    for num_chunks in range(1, num_examples + 1):
        bounds = split_evenly(num_examples, num_chunks)
        sizes = [stop - start for start, stop in bounds]
        assert len(sizes) == num_chunks and sum(sizes) == num_examples
        assert max(sizes) - min(sizes) <= 1
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
