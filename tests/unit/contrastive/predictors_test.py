"""
What the predictors make of texts and files, with a model whose representations can be worked out.
"""

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import TextFieldTensors, Vocabulary
from allennlp.data.tokenizers import WhitespaceTokenizer
from allennlp.models import Model
from allennlp.nn.util import get_token_ids_from_text_field_tensors
from allennlp.predictors import Predictor

from allennlp_deepspeed.contrastive import (
    TextEmbedderPredictor,
    TextPairsReader,
    TextSearchPredictor,
)

WORDS = ["apple", "pear", "plum"]
DOCUMENTS = ["plum", "apple apple", "pear apple", "apple pear", "cherry"]


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


def search(documents: Any, **arguments: Any) -> TextSearchPredictor:
    predictor = construct("text_search", documents=str(documents), **arguments)
    assert isinstance(predictor, TextSearchPredictor)
    return predictor


def construct(name: str, **arguments: Any) -> Predictor:
    # As the command does it.
    reader = TextPairsReader(tokenizer=WhitespaceTokenizer(), num_negatives=2)
    return Predictor.by_name(name)(WordCounts(), reader, **arguments)  # type: ignore[call-arg]


def write(directory: Path, name: str, lines: List[str]) -> Path:
    path = directory / name
    path.write_text("".join(line + "\n" for line in lines))
    return path


def found(predictor: Predictor, query: str) -> List[Any]:
    """The line, the score and the text of each document that is found."""
    output = predictor.predict_json({"query": query})
    assert output["query"] == query
    return [(d["line"], d["score"], d["document"]) for d in output["documents"]]


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


def test_a_batch_of_queries_and_documents_keeps_its_order():
    inputs = [{"text": "apple"}, {"document": "pear"}, {"document": "plum"}, {"query": "plum plum"}]
    assert embedder().predict_batch_json(inputs) == [
        {"embedding": [1, 0, 0], "text": "apple"},
        {"embedding": [0, 2, 0], "text": "pear"},
        {"embedding": [0, 0, 2], "text": "plum"},
        {"embedding": [0, 0, 2], "text": "plum plum"},
    ]


FILES = {
    "passages.txt": DOCUMENTS,
    "passages.jsonl": [json.dumps({"document": d, "text": "plum"}) for d in DOCUMENTS],
    "passages.json": [json.dumps({"text": document}) for document in DOCUMENTS],
    "passages.tsv": [f"{i}\t{document}\tplum" for i, document in enumerate(DOCUMENTS)],
    "texts.tsv": DOCUMENTS,
}


@pytest.mark.parametrize("name", FILES)
def test_the_best_documents_are_found_first(name: str, tmp_path: Path):
    predictor = search(write(tmp_path, name, FILES[name]), k=4)
    # Equal scores are in the file's order.
    assert found(predictor, "apple plum") == [
        (2, 4.0, "apple apple"),
        (1, 2.0, "plum"),
        (3, 2.0, "pear apple"),
        (4, 2.0, "apple pear"),
    ]


def test_a_document_that_comes_again_is_found_once(tmp_path: Path):
    path = write(tmp_path, "passages.txt", ["", "plum", "apple", "plum", "  ", "pear"])
    assert found(search(path), "plum") == [(2, 2.0, "plum"), (3, 0.0, "apple"), (6, 0.0, "pear")]


@pytest.mark.parametrize("inputs", [{}, {"text": 3}, {"query": ""}, {"document": None}])
def test_an_input_without_a_text_is_refused(inputs: Dict[str, Any], tmp_path: Path):
    for predictor in (embedder(), search(write(tmp_path, "passages.txt", DOCUMENTS))):
        with pytest.raises(ConfigurationError, match='Give an object such as {".*": "some text"}'):
            predictor.predict_json(inputs)


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("text_embedder", {"side": "passage"}, "'side' of the predictor is 'passage'"),
        (
            "text_search",
            {},
            "'documents' of .* is None. Give a file .* --predictor-args",
        ),
        ("text_search", {"documents": "a.csv"}, "'a.csv'. Give a file that ends in .jsonl, .json"),
        ("text_search", {"documents": "a.txt", "k": 0}, "'k' of the predictor is 0. Give"),
        ("text_search", {"documents": "a.txt", "batch_size": "2"}, "'batch_size' of .* is '2'"),
    ],
)
def test_other_arguments_are_refused(name: str, arguments: Dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        construct(name, **arguments)


@pytest.mark.parametrize(
    "name, lines, message",
    [
        ("passages.jsonl", ['{"text": "a"}', "{}"], "line 2: Expected the key 'document' or"),
        ("passages.jsonl", ['{"text": 5}'], "line 1: Expected the document to be a string"),
        ("passages.tsv", ["1\tplum", "2\t"], "line 2: Expected the document to be a string"),
        ("passages.txt", ["", " "], "passages.txt', which is 'documents' of .*, is empty"),
    ],
)
def test_a_file_with_something_else_is_refused(
    name: str, lines: List[str], message: str, tmp_path: Path
):
    predictor = search(write(tmp_path, name, lines))
    with pytest.raises(ConfigurationError, match=message):
        predictor.predict_json({"query": "plum"})
