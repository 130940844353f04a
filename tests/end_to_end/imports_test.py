"""What the real command of a plain training imports."""

import json
from pathlib import Path

import pytest

from tests.support.command import subprocess_allennlp
from tests.support.experiment import Config

# Runs in the one process of the training.
CALLBACK = """
import json, sys
from allennlp.training.callbacks import TrainerCallback

@TrainerCallback.register("list_imports")
class ListImports(TrainerCallback):
    def on_end(self, trainer, metrics=None, epoch=None, is_primary=True, **kwargs):
        with open("imported.json", "w") as file:
            json.dump(list(sys.modules), file)
"""

BAG_OF_WORDS: Config = {
    "dataset_reader": {
        "type": "text_classification_json",
        "token_indexers": {"tokens": {"type": "single_id"}},
        "tokenizer": "whitespace",
    },
    "train_data_path": "texts.jsonl",
    "model": {
        "type": "basic_classifier",
        "text_field_embedder": {
            "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 4}}
        },
        "seq2vec_encoder": {"type": "boe", "embedding_dim": 4},
    },
    "data_loader": {"batch_size": 2},
    "trainer": {
        "type": "deepspeed",
        "num_epochs": 1,
        "cuda_device": -1,
        "callbacks": ["list_imports"],
    },
}

OF_A_PLAIN_TRAINING = {
    *("allennlp_patches", "announcements", "deepspeed_api", "files", "frozen_records", "versions"),
    *("training_traits", "config", "launch", "engine", "training", "checkpoint", "reports"),
    "metrics",
    # Without the parts that they consist of.
    *("commands", "models", "attention", "contrastive", "language_modeling", "lora"),
}

# AllenNLP imports them for single metrics, and transformers for models with adapters.
OF_OTHER_TRAININGS = {"nltk", "peft", "scipy.stats", "sklearn"}


@pytest.mark.timeout(240)
def test_a_bag_of_words_imports_no_optional_part(tmp_path: Path) -> None:
    (tmp_path / "list_imports.py").write_text(CALLBACK)
    texts = [{"text": f"a {word} text", "label": word} for word in ("good", "bad")] * 2
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (tmp_path / "config.json").write_text(json.dumps(BAG_OF_WORDS))
    included = ["--include-package", "allennlp_deepspeed", "--include-package", "list_imports"]
    run = subprocess_allennlp("train", "config.json", "-s", "out", *included, cwd=tmp_path)
    run.check()
    names = json.loads((tmp_path / "imported.json").read_text())
    # Where it is installed, AllenNLP imports it at each command.
    assert "allennlp_models" in names or OF_OTHER_TRAININGS.isdisjoint(names)
    imported = [name.split(".") for name in names if name.startswith("allennlp_deepspeed.")]
    assert {parts[1] for parts in imported} <= OF_A_PLAIN_TRAINING
    found = {".".join(parts[1:3]) for parts in imported if parts[1] in ("models", "commands")}
    assert found == {"models", "commands", "commands.deepspeed"}
