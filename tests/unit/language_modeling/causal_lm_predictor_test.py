"""What is generated, with a model that has learnt texts by heart."""

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Batch, Vocabulary
from allennlp.predictors import Predictor

from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMPredictor, CausalLMReader
from tests.fixtures.tiny_lm import LLAMA, tiny_tokenizer

LEARNT: List[Dict[str, Any]] = [
    {"text": "name1 noun2 rest3 verb4"},
    {"text": "name5 name6 noun6 rest6 verb6 noun7"},
    {
        "messages": [
            {"role": "user", "content": "rest8"},
            {"role": "assistant", "content": "verb8 noun8"},
        ]
    },
    {"text": "verb1 noun1 <user> rest1"},
]


@pytest.fixture(scope="module")
def learnt(session_directory: Path) -> Dict[str, Any]:
    reader = CausalLMReader(tiny_tokenizer(session_directory / "tiny_lm"))
    torch.manual_seed(0)
    model = CausalLM(Vocabulary(), config=dict(LLAMA))
    batch = Batch([reader.text_to_instance(**record) for record in LEARNT])
    batch.index_instances(model.vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        model(**batch.as_tensor_dict())["loss"].backward()
        optimizer.step()
    return {"model": model.eval(), "dataset_reader": reader}


def predictor(learnt: Dict[str, Any], **arguments: Any) -> CausalLMPredictor:
    return CausalLMPredictor(**learnt, **arguments)


def test_it_goes_on_as_it_has_learnt(learnt: Dict[str, Any]) -> None:
    expected = [
        {"response": "noun2 rest3 verb4", "finish_reason": "stop"},
        {"response": "noun6 rest6 verb6 noun7", "finish_reason": "stop"},
        {"response": "verb8 noun8", "finish_reason": "stop"},
    ]
    inputs = [{"prompt": "name1"}, {"text": "name5 name6"}, LEARNT[2]]
    generating = predictor(learnt)
    assert [generating.predict_json(each) for each in inputs] == expected
    # Of prompts of different lengths at once, too.
    assert generating.predict_batch_json(inputs) == expected


def test_it_stops(learnt: Dict[str, Any]) -> None:
    assert predictor(learnt, max_new_tokens=2).predict("name5 name6") == {
        "response": "noun6 rest6",
        "finish_reason": "length",
    }
    inputs = [{"prompt": "name5 name6"}, {"prompt": "name1"}]
    assert predictor(learnt, stop=["xyz", " verb6"]).predict_batch_json(inputs) == [
        {"response": "noun6 rest6", "finish_reason": "stop"},
        {"response": "noun2 rest3 verb4", "finish_reason": "stop"},
    ]


def test_what_is_drawn_depends_on_the_seed_alone(learnt: Dict[str, Any]) -> None:
    def draw(seed: int, **arguments: Any) -> str:
        hot = predictor(learnt, sample=True, temperature=3.0, seed=seed, **arguments)
        return hot.predict("name1")["response"]

    drawn = [draw(seed) for seed in range(4)]
    assert len(set(drawn)) > 1
    torch.rand(3)
    before = torch.get_rng_state()
    assert [draw(seed) for seed in range(4)] == drawn
    assert torch.equal(torch.get_rng_state(), before)
    assert {draw(seed, top_k=1) for seed in range(4)} == {"noun2 rest3 verb4"}
    assert {draw(seed, top_p=1e-6) for seed in range(4)} == {"noun2 rest3 verb4"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_new_tokens": 0}, "'max_new_tokens' of the predictor is 0"),
        ({"temperature": 0.5}, 'write "sample": true'),
        (
            {"stop": ["xyz", "<user> a"]},
            'has "<user> a", which contains the special token "<user>"',
        ),
        ({"sample": True, "temperature": 0.0}, "'temperature' of the predictor is 0.0"),
    ],
)
def test_wrong_keys_are_refused(learnt: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        predictor(learnt, **arguments)


@pytest.mark.parametrize(
    "inputs, message",
    [({"question": "a"}, "Expected .*prompt"), ({"prompt": ""}, "has no token to continue from")],
)
def test_wrong_inputs_are_refused(learnt: Any, inputs: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        predictor(learnt).predict_json(inputs)


def test_an_instance_has_its_loss(learnt: Dict[str, Any]) -> None:
    predicted = Predictor.by_name("causal_lm")(**learnt).predict_instance(
        learnt["dataset_reader"].text_to_instance(**LEARNT[1])
    )
    assert 0 < predicted["loss"] < 0.5
