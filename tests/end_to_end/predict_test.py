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


@pytest.fixture
def trained(experiments: Experiments) -> Result:
    # Which the predictor has to add as well, or it finds others.
    prompts = {"query": "verb1 verb2 ", "document": "noun2 "}
    return experiments.run(load_config("bi_encoder", {"dataset_reader.prompts": prompts}))


def predict(result: Result, directory: Path, inputs: List[Any], *arguments: Any) -> List[Any]:
    input_file, output_file = directory / "inputs.jsonl", directory / "outputs.jsonl"
    input_file.write_text("".join(json.dumps(each) + "\n" for each in inputs))
    arguments = ("--output-file", output_file, "--batch-size", 2, "--silent", *arguments)
    allennlp("predict", result.archive, input_file, *arguments).check()
    return [json.loads(line) for line in output_file.read_text().splitlines()]


def embed(result: Result, directory: Path, texts: List[str], side: str) -> torch.Tensor:
    inputs = [{"text": text} for text in texts]
    # It is the model's default predictor.
    outputs = predict(result, directory, inputs, "--predictor-args", json.dumps({"side": side}))
    assert [output["text"] for output in outputs] == texts
    return torch.tensor([output["embedding"] for output in outputs])


def pairs() -> List[Dict[str, Any]]:
    return [json.loads(line) for line in PAIRS.read_text().splitlines()]


def test_embeddings_find_what_validation_has_measured(trained: Result, tmp_path: Path):
    relevant: Dict[str, set] = {}
    for pair in pairs():
        relevant.setdefault(pair["query"], set()).add(pair["document"])
    documents = list(dict.fromkeys(pair["document"] for pair in pairs()))
    of_documents = embed(trained, tmp_path, documents, "document")
    scores = embed(trained, tmp_path, list(relevant), "query") @ of_documents.T
    recalls = [
        len(expected & {documents[i] for i in best}) / len(expected)
        for expected, best in zip(relevant.values(), scores.topk(5).indices.tolist())
    ]
    # The archive has the weights of the best epoch.
    measured = trained.final_metrics()["best_validation_recall@5"]
    assert measured == pytest.approx(sum(recalls) / len(recalls))
    assert 0 < measured < 1
