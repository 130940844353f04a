"""What the environment of 2022 makes, as `former.py` reads it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from evidence.model_library import experiments
from evidence.original.architectures import ARCHITECTURES
from tests.support.command import REPOSITORY

# By its path, since a checkout has a package of tests of the same name.
FORMER = Path(__file__).parent / "former.py"
Config = Dict[str, Any]
Job = Dict[str, Any]

# The fixture in place of the hub's small models, and those that are made: their type and settings.
_SMALL_BERT = "test_fixtures/bert-xsmall-dummy"
_PIECES = {"vocab_size": 250}
_OF_FIXTURES = ("epwalsh/bert-xsmall-dummy", "bert-base-uncased")
_MADE: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "albert-base-v2": ("albert", {**_PIECES, "hidden_size": 768, "max_position_embeddings": 512}),
    "sshleifer/bart-tiny-random": ("bart", {**_PIECES, "max_position_embeddings": 1024}),
    "patrickvonplaten/t5-tiny-random": ("t5", {**_PIECES, "decoder_start_token_id": 0}),
}

# Of a text a line: labels by whether an early word is in it.
_NUM_WORDS = 57


def write_data(path: Path, num_lines: int = 24) -> None:
    """Writes labelled texts of the words that a small transformer has."""
    lines = []
    for i in range(num_lines):
        words = [f"word{(7 * i + 3 * j * j) % _NUM_WORDS}" for j in range(3 + 5 * i % 11)]
        label = "early" if any(int(word[4:]) < 6 for word in words) else "late"
        lines.append(json.dumps({"text": " ".join(words), "label": label}))
    path.write_text("\n".join(lines) + "\n")


def classifier(transformer: Path, data: Path, name: str, load_weights: bool = True) -> Config:
    """A classifier of texts over a transformer, and its training with SGD and no randomness."""
    architecture = ARCHITECTURES[name]
    embedder: Config = {"type": "pretrained_transformer", "model_name": str(transformer)}
    if not load_weights:
        embedder["load_weights"] = False
    if architecture.sub_module is not None:
        embedder["sub_module"] = architecture.sub_module
    indexer = {
        "type": "pretrained_transformer",
        "model_name": str(transformer),
        "namespace": "tags",
        "token_min_padding_length": architecture.num_tokens,
    }
    reader: Config = {
        "type": "text_classification_json",
        "tokenizer": {"type": "pretrained_transformer", "model_name": str(transformer)},
        "token_indexers": {"tokens": indexer},
    }
    if architecture.max_tokens is not None:
        reader["max_sequence_length"] = architecture.max_tokens
    return {
        "dataset_reader": reader,
        "train_data_path": str(data),
        "validation_data_path": str(data),
        "model": {
            "type": "basic_classifier",
            "namespace": "tags",
            "text_field_embedder": {"token_embedders": {"tokens": embedder}},
            "seq2vec_encoder": {"type": "boe", "embedding_dim": 32, "averaged": True},
        },
        "data_loader": {"batch_size": 4, "shuffle": False},
        "trainer": {
            "num_epochs": 2,
            "optimizer": {"type": "sgd", "lr": 0.02},
            "cuda_device": -1,
            "run_confidence_checks": False,
        },
    }


def training_with(key: str, section: Config, data: Path) -> Config:
    """The training of a small classifier with an optimizer or a scheduler, in 24 steps."""
    return {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "train_data_path": str(data),
        "validation_data_path": str(data),
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": {
                "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 8}}
            },
            "seq2vec_encoder": {"type": "boe", "embedding_dim": 8, "averaged": True},
        },
        "data_loader": {"batch_size": 8, "shuffle": False},
        "trainer": {
            "num_epochs": 8,
            "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
            "cuda_device": -1,
            key: section,
        },
    }


def from_archive(config: Config, archive: Path) -> Config:
    """The training that starts from an archive."""
    return {
        **config,
        "model": {"type": "from_archive", "archive_file": str(archive)},
        "vocabulary": {"type": "from_files", "directory": str(archive)},
    }


def of_architecture(name: str, directory: Path, data: Path, load_weights: bool = True) -> List[Job]:
    """The jobs that make a transformer, and those of a training of a classifier over it."""
    architecture = ARCHITECTURES[name]
    transformer = directory / "transformer"
    made = {
        "do": "transformer",
        "directory": str(transformer),
        "model_type": architecture.model_type or name.removesuffix("-encoder"),
        "settings": architecture.settings,
    }
    return [made, *of_training(classifier(transformer, data, name, load_weights), directory)]


def of_training(config: Config, directory: Path) -> List[Job]:
    """
    The jobs that make an archive with random weights, a training from that, and what the model that
    is trained puts out.
    """
    initial, trained = directory / "initial", directory / "trained"
    training = from_archive(config, initial / "model.tar.gz")
    return [
        {"do": "archive", "directory": str(initial), "config": config},
        {"do": "train", "directory": str(trained), "config": training},
        *of_archive(trained / "model.tar.gz", directory),
    ]


def of_archive(
    archive: Path, directory: Path, overrides: Optional[Dict[str, str]] = None
) -> List[Job]:
    """The job that writes what an archive's model puts out."""
    job = {"do": "outputs", "directory": str(directory / "expected"), "overrides": overrides}
    return [{**job, "archive_file": str(archive)}]


def experiment(checkout: Path, name: str, folder: Path) -> Config:
    """An experiment of allennlp-models' fixtures, with SGD and stand-ins for the hub's models."""
    folder.mkdir(parents=True, exist_ok=True)
    config = experiments.with_sgd(experiments.read(checkout / "test_fixtures", name, folder))
    _leave_out_dropout_between_layers(config)
    text = json.dumps(config)
    if "albert-base-v2" in text:
        # As wide as the hub's, it diverges at the rate of the others.
        text = text.replace(f'"lr": {experiments.SGD_RATE}', '"lr": 0.001')
    for model in (*_OF_FIXTURES, *_MADE):
        path = _SMALL_BERT if model in _OF_FIXTURES else str(_stand_in(folder, model))
        text = text.replace(json.dumps(model), json.dumps(path))
    # Several images are processed in the order of a set, which versions of Python don't share.
    loader = '"image_loader": "torch"'
    return json.loads(text.replace(loader, f'{loader}, "image_processing_batch_size": 1'))


def _leave_out_dropout_between_layers(section: Any) -> None:
    """PyTorch draws that of a GRU or LSTM itself, in 2022 otherwise on Intel's processors."""
    if isinstance(section, dict):
        is_recurrent = section.get("type") in ("gru", "lstm", "rnn")
        if is_recurrent and section.get("num_layers", 1) > 1 and "dropout" in section:
            section["dropout"] = 0.0
        section = list(section.values())
    for value in section if isinstance(section, list) else ():
        _leave_out_dropout_between_layers(value)


def of_stand_ins(config: Config, checkout: Path, folder: Path) -> List[Job]:
    """The jobs that make what an experiment has in place of the hub's models."""
    vocabulary = (checkout / _SMALL_BERT / "vocab.txt").read_text()
    made = []
    for model, (model_type, settings) in _MADE.items():
        directory = str(_stand_in(folder, model))
        if json.dumps(directory) in json.dumps(config):
            job = {"do": "transformer", "directory": directory, "model_type": model_type}
            made.append({**job, "settings": settings, "vocabulary": vocabulary})
    return made


def _stand_in(folder: Path, model: str) -> Path:
    return folder / model.replace("/", "+")


def run(
    python: str,
    jobs: Sequence[Job],
    directory: Path,
    packages: Sequence[str] = (),
    checkout: Optional[Path] = None,
) -> None:
    """Has the environment of 2022 do jobs, in the folder of a checkout."""
    path = (directory / "jobs.json").absolute()
    path.write_text(json.dumps({"jobs": list(jobs), "packages": list(packages)}))
    command = [python, "-W", "ignore", str(FORMER), str(path)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    subprocess.run(
        command,
        check=True,
        cwd=checkout or REPOSITORY,
        env={**os.environ, **offline, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
