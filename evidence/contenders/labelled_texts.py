import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, NamedTuple

from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models.model import Model
from typing_extensions import override

from evidence.harness.process_tree import Worker
from evidence.harness.training import transformer
from evidence.harness.workload import SEED, Workload

_DATA_NAME = "train.txt"
_VOCABULARY_NAME = "vocabulary"
_NUM_DISTINCT_BATCHES = 32  # for each rank; they are repeated as often as needed
# The contenders' random states are not the same, and the losses have to be.
_ENCODER = {"positional_encoding": "sinusoidal", "dropout_prob": 0.0}


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
    """

    config: Dict[str, Any]
    batch_size: int
    num_tokens: int
    num_words: int
    steps: int


TASKS = {
    # Launch-bound: what a step costs is the calls, not the arithmetic.
    "tagger": Task(
        {
            "dataset_reader": {"type": "sequence_tagging"},
            "model": {
                "type": "simple_tagger",
                "text_field_embedder": {
                    "token_embedders": {"tokens": {"type": "embedding", "embedding_dim": 64}}
                },
                "encoder": {"type": "lstm", "input_size": 64, "hidden_size": 64},
            },
        },
        batch_size=8,
        num_tokens=10,
        num_words=500,
        steps=48,
    ),
    "transformer": Task(
        transformer(width=256, num_layers=4, **_ENCODER),
        batch_size=8,
        num_tokens=32,
        num_words=2000,
        steps=8,
    ),
}


@dataclass(frozen=True)
class LabelledTexts(Workload):
    """One of `TASKS`, with random texts."""

    model: str
    directory: Path
    stage: int
    accumulation: int

    optimizer = {"type": "adam", "lr": 1e-4}

    def __str__(self) -> str:
        return f"{self.model}, stage {self.stage}, accumulation {self.accumulation}"

    @property
    def task(self) -> Task:
        return TASKS[self.model]

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.task.batch_size

    @override
    def prepare(self, world_size: int) -> None:
        task = self.task
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
        (self.directory / _DATA_NAME).write_text("\n".join(lines) + "\n")
        vocabulary = Vocabulary(
            {"tokens": dict.fromkeys(words, 1), "labels": {str(i): 1 for i in range(4)}}
        )
        vocabulary.save_to_files(self.directory / _VOCABULARY_NAME)

    @override
    def build_data_loader(self, worker: Worker) -> DataLoader:
        data_loader = DataLoader.from_params(
            Params(
                {
                    "batch_size": self.batch_size,
                    "batches_per_epoch": worker.plan.total * self.accumulation,
                    "quiet": True,
                }
            ),
            reader=DatasetReader.from_params(self._params("dataset_reader")),
            data_path=str(self.directory / _DATA_NAME),
        )
        data_loader.index_with(self._vocabulary())
        data_loader.set_target_device(worker.device)
        return data_loader

    @override
    def build_model(self) -> Model:
        prepare_environment(Params({"random_seed": SEED, "numpy_seed": SEED, "pytorch_seed": SEED}))
        return Model.from_params(self._params("model"), vocab=self._vocabulary())

    def _params(self, section: str) -> Params:
        return Params(copy.deepcopy(self.task.config[section]))

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.from_files(self.directory / _VOCABULARY_NAME)
