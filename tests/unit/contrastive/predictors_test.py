"""
What the predictors make of texts and files, with a model whose representations can be worked out.
"""

import json
from typing import Any, Dict, List

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import TextFieldTensors, Vocabulary
from allennlp.data.tokenizers import WhitespaceTokenizer
from allennlp.models import Model
from allennlp.nn.util import get_token_ids_from_text_field_tensors
from allennlp.predictors import Predictor

from allennlp_deepspeed.models.contrastive import TextEmbedderPredictor, TextPairsReader

WORDS = ["apple", "pear", "plum"]


class WordCounts(Model):
    """A query's representation is how often it has each of the words; a document's, twice that."""

    def __init__(self) -> None:
        super().__init__(Vocabulary({"tokens": dict.fromkeys(WORDS, 1)}))
        self.word_ids = [self.vocab.get_token_index(word) for word in WORDS]
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.batch_sizes: List[Dict[str, int]] = []

    def forward(
        self,
        query: TextFieldTensors = None,
        document: TextFieldTensors = None,
        query_id: torch.Tensor = None,
        document_id: torch.Tensor = None,
    ) -> Dict[str, torch.Tensor]:
        assert not self.training
        outputs = {}
        if query is not None:
            outputs["query"] = self.counts(query)
        if document is not None:
            outputs["document"] = self.counts(document) * self.scale
        self.batch_sizes.append({name: len(output) for name, output in outputs.items()})
        return outputs

    def counts(self, texts: TextFieldTensors) -> torch.Tensor:
        tokens = get_token_ids_from_text_field_tensors(texts)
        return torch.stack([(tokens == i).sum(1) for i in self.word_ids], dim=1).float()


def embedder(**arguments: Any) -> TextEmbedderPredictor:
    predictor = construct("text_embedder", **arguments)
    assert isinstance(predictor, TextEmbedderPredictor)
    return predictor


def construct(name: str, prompts: Dict[str, str] = None, **arguments: Any) -> Predictor:
    # As the command does it.
    reader = TextPairsReader(tokenizer=WhitespaceTokenizer(), num_negatives=2, prompts=prompts)
    return Predictor.by_name(name)(WordCounts(), reader, **arguments)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "side, inputs, embedding",
    [
        ("query", {"text": "pear plum pear"}, [0, 2, 1]),
        ("document", {"text": "pear plum pear"}, [0, 4, 2]),
        ("query", {"query": "apple"}, [1, 0, 0]),
        ("document", {"query": "apple"}, [1, 0, 0]),
        ("query", {"document": "apple"}, [2, 0, 0]),
        ("query", {"query": "apple", "document": "plum"}, [1, 0, 0]),
        ("document", {"query": "apple", "document": "plum"}, [0, 0, 2]),
    ],
)
def test_a_text_is_embedded_on_its_side(side: str, inputs: Dict[str, str], embedding: List[float]):
    output = embedder(side=side).predict_json(inputs)
    assert output["embedding"] == embedding
    assert output["text"] in inputs.values()
    json.dumps(output)


def test_a_text_is_embedded_with_the_prompt_of_its_side():
    predictor = embedder(prompts={"query": "apple ", "document": "plum plum "})
    inputs = [{"text": "pear"}, {"document": "pear"}]
    outputs = predictor.predict_batch_json(inputs)
    assert [output["embedding"] for output in outputs] == [[1, 1, 0], [0, 2, 4]]
    assert [output["text"] for output in outputs] == ["pear", "pear"]


@pytest.mark.parametrize("inputs", [{}, {"text": 3}, {"query": ""}, {"document": None}])
def test_an_input_without_a_text_is_refused(inputs: Dict[str, Any]):
    with pytest.raises(ConfigurationError, match='pass an object such as {".*": "some text"}'):
        embedder().predict_json(inputs)


def test_another_side_is_refused():
    with pytest.raises(ConfigurationError, match="'side' of the predictor is 'passage'"):
        embedder(side="passage")
