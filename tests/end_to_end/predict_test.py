"""
The predictors of a trained bi-encoder, through the `allennlp predict` command.
"""

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from tests.support.command import allennlp
from tests.support.experiment import FIXTURES, Experiments, Result, load_config

PAIRS = FIXTURES / "data" / "pairs_validation.jsonl"
QUERIES = [{"query": "name3 verb8"}, {"query": "noun1"}, {"query": "rest11 rest4 noun5 name9"}]


@pytest.fixture
def trained(experiments: Experiments) -> Result:
    return experiments.run(load_config("bi_encoder"))


def predict(result: Result, directory: Path, inputs: List[Any], *arguments: Any) -> List[Any]:
    input_file, output_file = directory / "inputs.jsonl", directory / "outputs.jsonl"
    input_file.write_text("".join(json.dumps(each) + "\n" for each in inputs))
    arguments = ("--output-file", output_file, "--batch-size", 2, "--silent", *arguments)
    allennlp("predict", result.archive, input_file, *arguments).check()
    return [json.loads(line) for line in output_file.read_text().splitlines()]


def search(result: Result, directory: Path, inputs: List[Any], **arguments: Any) -> List[Any]:
    options = ("--predictor", "text_search", "--predictor-args", json.dumps(arguments))
    return predict(result, directory, inputs, *options)


def embed(result: Result, directory: Path, texts: List[str], side: str) -> torch.Tensor:
    inputs = [{"text": text} for text in texts]
    # It is the model's default predictor.
    outputs = predict(result, directory, inputs, "--predictor-args", json.dumps({"side": side}))
    assert [output["text"] for output in outputs] == texts
    return torch.tensor([output["embedding"] for output in outputs])


def pairs() -> List[Dict[str, Any]]:
    return [json.loads(line) for line in PAIRS.read_text().splitlines()]


def test_documents_are_found_by_the_embeddings_of_their_texts(trained: Result, tmp_path: Path):
    outputs = search(trained, tmp_path, QUERIES, documents=str(PAIRS), k=7, batch_size=4)
    lines = {}
    for number, pair in enumerate(pairs(), start=1):
        lines.setdefault(pair["document"], number)
    documents = embed(trained, tmp_path, list(lines), "document")
    queries = embed(trained, tmp_path, [each["query"] for each in QUERIES], "query")
    for output, inputs, scores in zip(outputs, QUERIES, queries @ documents.T, strict=True):
        assert output["query"] == inputs["query"]
        found = {each["document"]: each["score"] for each in output["documents"]}
        expected = dict(zip(lines, scores.tolist()))
        assert list(found) == sorted(expected, key=expected.__getitem__, reverse=True)[:7]
        assert found == pytest.approx({text: expected[text] for text in found}, abs=1e-5)
        assert all(each["line"] == lines[each["document"]] for each in output["documents"])


def test_what_is_found_is_what_validation_has_measured(trained: Result, tmp_path: Path):
    relevant: Dict[str, set] = {}
    for pair in pairs():
        relevant.setdefault(pair["query"], set()).add(pair["document"])
    inputs = [{"query": query} for query in relevant]
    outputs = search(trained, tmp_path, inputs, documents=str(PAIRS), k=5)
    recalls = [
        len(relevant[output["query"]] & {each["document"] for each in output["documents"]})
        / len(relevant[output["query"]])
        for output in outputs
    ]
    # The archive has the weights of the best epoch.
    measured = trained.final_metrics()["best_validation_recall@5"]
    assert measured == pytest.approx(sum(recalls) / len(recalls))
    assert 0 < measured < 1
