"""
Trainings by the `allennlp` command, on CPU workers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Tuple

from evidence import REPOSITORY


def transformer(width: int, num_layers: int, **encoder: Any) -> Dict[str, Any]:
    """
    `"dataset_reader"` and `"model"` of a config, for a transformer that classifies texts.

    # Parameters

    width : `int`
        Of a token's representation, a multiple of 64.
    num_layers : `int`
    encoder : `Any`
        Further settings of the encoder.
    """
    embedding = {"type": "embedding", "embedding_dim": width}
    return {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {"token_embedders": {"tokens": embedding}},
            "seq2seq_encoder": {
                "type": "pytorch_transformer",
                "input_dim": width,
                "num_layers": num_layers,
                "feedforward_hidden_dim": 4 * width,
                "num_attention_heads": width // 64,
                **encoder,
            },
            "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": width},
        },
    }


def config(
    directory: Path,
    texts: Iterable[Tuple[str, str]],
    batch_size: int,
    num_workers: int,
    trainer: Dict[str, Any],
    **others: Any,
) -> Dict[str, Any]:
    """
    A config file's content, for one epoch with Adam.

    # Parameters

    directory : `Path`
        Where the data are written.
    texts : `Iterable[Tuple[str, str]]`
        Each with its label.
    batch_size : `int`
        Of a micro-batch of a worker.
    num_workers : `int`
    trainer : `Dict[str, Any]`
        Further settings of the trainer.
    others : `Any`
        Further sections, such as the `transformer`.
    """
    data = directory / "data.jsonl"
    lines = [json.dumps({"text": text, "label": label}) for text, label in texts]
    data.write_text("\n".join(lines))
    trainer = {"optimizer": {"type": "adam", "lr": 1e-5}, "num_epochs": 1, **trainer}
    if num_workers > 1:
        others["distributed"] = {"cuda_devices": [-1] * num_workers}
    else:
        trainer["cuda_device"] = -1
    return {
        **others,
        "train_data_path": str(data),
        "data_loader": {"batch_size": batch_size},
        "trainer": trainer,
    }


def train(config: Dict[str, Any], directory: Path, *arguments: str, **environment: str) -> None:
    """Writes `{directory}.json` and trains in `directory`. The rest is as `allennlp` takes it."""
    path = directory.with_name(f"{directory.name}.json")
    path.write_text(json.dumps(config))
    allennlp("train", path, "-s", directory, *arguments, **environment)


def allennlp(*arguments: Any, **environment: str) -> None:
    """Runs the command, which knows this package as a plugin. Ends this process if it fails."""
    process = subprocess.run(
        ["allennlp", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        sys.exit(process.stdout[-6000:])
