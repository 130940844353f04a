"""
What all contenders train on: the models, the data, the optimizer and DeepSpeed's configuration.
"""

import json
import random
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import torch
from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models.model import Model

SEED = 13
OPTIMIZER = {"type": "adam", "lr": 1e-4}

_DATA_NAME = "train.txt"
_VOCABULARY_NAME = "vocabulary"
_NUM_DISTINCT_BATCHES = 32  # for each rank; they are repeated as often as needed


class Cell(NamedTuple):
    """What is varied, one row of contenders each."""

    model: str
    stage: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.model}, stage {self.stage}, accumulation {self.accumulation}"


class Task(NamedTuple):
    """
    A model and its data.

    # Parameters

    config : `Dict[str, Any]`
        `"dataset_reader"` and `"model"`, as in a config file.
    batch_size : `int`
        Instances in one micro-batch of one rank.
    num_tokens : `int`
        In an instance, all as many, so that all batches cost the same.
    num_words : `int`
        Words in the vocabulary.
    steps : `int`
        Micro-batches in a timed segment by default, enough for about a second on a CPU's core.
    needs_gpu : `bool`, optional (default = `False`)
        Whether it is too large for a CPU.
    """

    config: Dict[str, Any]
    batch_size: int
    num_tokens: int
    num_words: int
    steps: int
    needs_gpu: bool = False


def _embedder(dimension: int) -> Dict[str, Any]:
    return {"token_embedders": {"tokens": {"type": "embedding", "embedding_dim": dimension}}}


def _transformer(width: int, num_layers: int) -> Dict[str, Any]:
    return {
        "dataset_reader": {"type": "text_classification_json", "tokenizer": "whitespace"},
        "model": {
            "type": "basic_classifier",
            "text_field_embedder": _embedder(width),
            "seq2seq_encoder": {
                "type": "pytorch_transformer",
                "input_dim": width,
                "num_layers": num_layers,
                "feedforward_hidden_dim": 4 * width,
                "num_attention_heads": width // 64,
                "positional_encoding": "sinusoidal",
                # The contenders' random states are not the same, and the losses have to be.
                "dropout_prob": 0.0,
            },
            "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": width},
        },
    }


TASKS = {
    # Launch-bound: what a step costs is the calls, not the arithmetic.
    "tagger": Task(
        {
            "dataset_reader": {"type": "sequence_tagging"},
            "model": {
                "type": "simple_tagger",
                "text_field_embedder": _embedder(64),
                "encoder": {"type": "lstm", "input_size": 64, "hidden_size": 64},
            },
        },
        batch_size=8,
        num_tokens=10,
        num_words=500,
        steps=48,
    ),
    "transformer": Task(
        _transformer(width=256, num_layers=4),
        batch_size=8,
        num_tokens=32,
        num_words=2000,
        steps=8,
    ),
    "transformer-350m": Task(
        _transformer(width=1024, num_layers=24),
        batch_size=8,
        num_tokens=256,
        num_words=50000,
        steps=16,
        needs_gpu=True,
    ),
}


def prepare(model: str, world_size: int, directory: Path) -> None:
    """Writes the data and the vocabulary of a model to `directory`, the same ones every time."""
    task = TASKS[model]
    generator = random.Random(SEED)
    words = [f"word{i}" for i in range(task.num_words)]
    lines = []
    for _ in range(world_size * task.batch_size * _NUM_DISTINCT_BATCHES):
        text = generator.choices(words, k=task.num_tokens)
        labels = [str(sum(map(ord, word)) % 4) for word in text]
        if task.config["dataset_reader"]["type"] == "sequence_tagging":
            lines.append("\t".join(f"{word}###{label}" for word, label in zip(text, labels)))
        else:
            lines.append(json.dumps({"text": " ".join(text), "label": labels[0]}))
    (directory / _DATA_NAME).write_text("\n".join(lines) + "\n")
    vocabulary = Vocabulary(
        {"tokens": {word: 1 for word in words}, "labels": {str(i): 1 for i in range(4)}}
    )
    vocabulary.save_to_files(directory / _VOCABULARY_NAME)


def build_data_loader(model: str, directory: Path, num_batches: int) -> DataLoader:
    """
    This rank's data, in one epoch of `num_batches` micro-batches, so that nothing that belongs to
    the end of an epoch is timed. To be called after the process group is there, since AllenNLP's
    reader takes each rank's share by it.
    """
    task = TASKS[model]
    data_loader = DataLoader.from_params(
        Params({"batch_size": task.batch_size, "batches_per_epoch": num_batches, "quiet": True}),
        reader=DatasetReader.from_params(Params(dict(task.config["dataset_reader"]))),
        data_path=str(directory / _DATA_NAME),
    )
    data_loader.index_with(_vocabulary(directory))
    return data_loader


def build_model(model: str, directory: Path) -> Model:
    """The model, on the CPU, with the same weights every time."""
    prepare_environment(Params({"random_seed": SEED, "numpy_seed": SEED, "pytorch_seed": SEED}))
    return Model.from_params(
        Params(json.loads(json.dumps(TASKS[model].config["model"]))),
        vocab=_vocabulary(directory),
    )


def deepspeed_config(cell: Cell, world_size: int) -> Dict[str, Any]:
    """DeepSpeed's configuration, complete, because Accelerate guesses wrong where it is not."""
    batch_size = TASKS[cell.model].batch_size
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": cell.accumulation,
        "train_batch_size": batch_size * cell.accumulation * world_size,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": cell.stage},
        "zero_allow_untested_optimizer": True,
        # Its own default is to log the throughput every 10 steps.
        "steps_per_print": 2**31,
    }


def named_parameters(model: Model) -> List[List[Any]]:
    """As AllenNLP's optimizers want them."""
    return [[name, p] for name, p in model.named_parameters() if p.requires_grad]


def device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _vocabulary(directory: Path) -> Vocabulary:
    return Vocabulary.from_files(directory / _VOCABULARY_NAME)
