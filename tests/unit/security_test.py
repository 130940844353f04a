"""What SECURITY.md says of files that come from strangers."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model, load_archive
from allennlp.models.archival import archive_model

from allennlp_deepspeed.report_page.run import Run
from allennlp_deepspeed.reports.metrics_file import FILE_NAME
from tests.fixtures.malicious import Malicious

CONFIG = {
    "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
    "model": {
        "type": "basic_classifier",
        "num_labels": 2,
        "text_field_embedder": {
            "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 2}}
        },
        "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 2},
    },
}


def archive(directory: Path, weights: Any) -> Path:
    """Of a model with these weights."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    Vocabulary().save_to_files(str(directory / "vocabulary"))
    torch.save(weights, directory / "best.th")
    archive_model(directory)
    return directory / "model.tar.gz"


def test_loading_the_weights_of_an_archive_runs_no_code(tmp_path: Path) -> None:
    model = Model.from_params(Params(copy.deepcopy(CONFIG["model"])), vocab=Vocabulary())
    weights = model.state_dict()
    assert load_archive(archive(tmp_path, weights)).model.state_dict().keys() == weights.keys()
    path = archive(tmp_path, {**weights, "_metadata": Malicious(tmp_path / "evidence")})
    with pytest.raises(pickle.UnpicklingError):
        load_archive(path)
    assert not (tmp_path / "evidence").exists()


def test_a_report_takes_nothing_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    step = {"kind": "step", "time": 1.0, "step": 1, "epoch": 0}
    (tmp_path / FILE_NAME).write_text(json.dumps(step) + "\n")
    (tmp_path / "config.json").write_text('{"model": {"type": std.extVar("HF_TOKEN")}}')
    with pytest.raises(ConfigurationError, match="config.json is not valid JSON"):
        Run(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert Run(str(tmp_path)).config == CONFIG
