"""What is said of a config file that AllenNLP can't construct a training from."""

from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp.common import Params

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.signatures import config_file
from allennlp_deepspeed.signatures.paths import missing_files
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.command import REPOSITORY
from tests.support.experiment import TWO_WORKERS, load_config

Config = Dict[str, Any]


NO_VALIDATION = {"validation_data_path": None, "validation_data_loader": {"type": "not there"}}
URLS = {"train_data_path": "https://example.org/x.jsonl", "test_data_path": "s3://b/*.jsonl"}


def lines(config: Config) -> List[str]:
    findings = Findings()
    config_file.check(config, findings)
    return findings.lines


def changed(**overrides: Any) -> Config:
    config = load_config("classifier", TWO_WORKERS)
    for path, value in overrides.items():
        *sections, key = path.split("__")
        section = config
        for name in sections:
            section = section[name]
        section[key] = value
    return config


ENCODER = "model__seq2vec_encoder__"


@pytest.mark.parametrize(
    "overrides, line",
    [
        (
            {ENCODER + "num_filters": "eight"},
            "'model.seq2vec_encoder.num_filters' is \"eight\": must be an integer",
        ),
        (
            {ENCODER + "num_filters": "8"},
            "'model.seq2vec_encoder.num_filters' is \"8\": must be an integer, write 8 without "
            "quotes",
        ),
        (
            {ENCODER + "num_filtres": 8},
            "'model.seq2vec_encoder.num_filtres' is no key of CnnEncoder: did you mean "
            '"num_filters"?',
        ),
        (
            {ENCODER + "type": "cn"},
            "'model.seq2vec_encoder.type' is \"cn\", which is no registered Seq2VecEncoder: did "
            'you mean "cnn"? (One of your own needs its --include-package.)',
        ),
        (
            {ENCODER + "type": "allennlp.nothing.Here"},
            "'model.seq2vec_encoder.type' is \"allennlp.nothing.Here\", which can't be imported: "
            "ModuleNotFoundError: No module named 'allennlp.nothing'",
        ),
        (
            {"model__seq2vec_encoder": {"type": "cnn", "num_filters": 8}},
            "'model.seq2vec_encoder.embedding_dim' is missing: CnnEncoder needs it, an integer",
        ),
        (
            {"model__text_field_embedder__token_embedders__tokens": 3},
            "'model.text_field_embedder.token_embedders.tokens' is 3: must be an object of type "
            "TokenEmbedder",
        ),
        ({"model__seq2seq": "lstm"}, "'model.seq2seq' is no key of BasicClassifier: did you mean"),
        ({"dataset_reader__max_instance": 3}, "'dataset_reader.max_instance' is no key of Text"),
        ({"data_loader__batch_size": 1.5}, "'data_loader.batch_size' is 1.5: must be an integer"),
        ({"num_epochs": 3}, "'num_epochs' is no key of the top level: it belongs to 'trainer'"),
        ({"batch_size": 3}, "'batch_size' is no key of the top level: it belongs to 'data_loader'"),
        ({"modle": {}}, "'modle' is no key of TrainModel: did you mean \"model\"?"),
        ({"trainer__optimizer__lr": "0.1"}, "'trainer.optimizer.lr' is \"0.1\": must be a number"),
        (
            {"trainer__callbacks": ["record_step"]},
            "'trainer.callbacks.0.type' is \"record_step\", which is no registered TrainerCallback",
        ),
        (
            {"trainer__learning_rate_scheduler": {"type": "step"}},
            "'trainer.learning_rate_scheduler.step_size' is missing",
        ),
        ({"train_data_path": "gone.jsonl"}, "'train_data_path' is \"gone.jsonl\", but there is no"),
        ({"numpy_seed": -1}, "'numpy_seed' is -1: must be from 0 to 4294967295"),
        ({"random_seed": "x"}, "'random_seed' is \"x\": must be an integer"),
        ({"include_in_archive": ["vocabulary"]}, "'include_in_archive': config.json, weights.th"),
        ({"distributed": [0, 1]}, "'distributed' is [0, 1]: must be an object"),
        ({"distributed__cuda_devices": 2}, "'distributed.cuda_devices' is 2: must be a list of"),
        ({"distributed__cuda_devices": [-1]}, "'distributed.cuda_devices' is [-1], which is one"),
        ({"distributed__num_nodes": "2"}, "'distributed.num_nodes' is \"2\": must be an integer"),
        (
            {"distributed__ddp_accelerator": {"type": "torch", "find_unused": True}},
            "'distributed.ddp_accelerator.find_unused' is no key of TorchDdpAccelerator",
        ),
    ],
    ids=str,
)
def test_a_key_of_which_nothing_can_be_constructed_is_named(overrides: Config, line: str) -> None:
    (said,) = lines(changed(**overrides))
    assert said.startswith(line)


def test_all_is_said_at_once() -> None:
    config = changed(**{ENCODER + "num_filters": "8"}, train_data_path="gone", epochs=3)
    del config["dataset_reader"]
    assert [line.split("'")[1] for line in lines(config)] == [
        "epochs",
        "dataset_reader",
        "model.seq2vec_encoder.num_filters",
    ]


# Those that need data or weights that `make demo` brings are given what they name.
MODELS = {"MODEL": "model", "MINILM": "model"}
FILES = sorted(REPOSITORY.glob("training_configs/*.jsonnet")) + sorted(
    REPOSITORY.glob("tests/fixtures/*.jsonnet")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_wrong_with_the_configs_of_this_repository(path: Path) -> None:
    config = Params.from_file(path, ext_vars=MODELS).as_dict(quiet=True)
    here = {key: None for key in config if key.endswith("_data_path")}
    assert lines({**config, **here}) == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"trainer": {"type": "deepspeed"}},
        {"dataset_reader": "text_classification_json"},
        {"vocabulary": {"type": "empty"}},
        {"dataset_reader__max_instances": 0, "include_in_archive": "notes.txt"},
        {"evaluate_on_test": True},
        {"evaluation": {"whatever": 1}},
        {"random_seed": "12", "numpy_seed": None},
        {"model__seq2vec_encoder__type": "allennlp.modules.seq2vec_encoders.CnnEncoder"},
        {"model__regularizer": {"regexes": [[".*", "l2"], ["bias", {"type": "l1", "alpha": 1}]]}},
        {"model__initializer": {"regexes": [["bias", "zero"]]}},
        {"model__feedforward": {"_pretrained": {"archive_file": "x.tar.gz#", "module_path": "y"}}},
        {"trainer__callbacks": ["tensorboard", {"type": "wandb", "project": "p"}]},
        {"trainer__optimizer": {"type": "sgd", "lr": 1, "parameter_groups": [[["a"], {"lr": 2}]]}},
        {"trainer__learning_rate_scheduler": {"type": "slanted_triangular", "num_epochs": 2}},
        {"trainer__learning_rate_scheduler": "constant", "trainer__momentum_scheduler": None},
        {"trainer__cuda_device": -1, "trainer__validation_metric": ["+accuracy", "-loss"]},
        {"data_loader": {"batch_sampler": {"type": "bucket", "batch_size": 4}}},
        NO_VALIDATION,
        URLS,
    ],
    ids=str,
)
def test_what_allennlp_takes_is_taken(overrides: Config) -> None:
    assert lines(changed(**overrides)) == []


def test_files_of_users_classes_are_left_to_them() -> None:
    theirs = {"type": "of_a_user", "pretrained_file": "glove.6B"}
    vocabulary = {"type": "of_a_user", "directory": "named"}
    assert list(missing_files({"model": theirs, "vocabulary": vocabulary})) == []
    of_allennlp = {"embedder": {"type": "embedding", "pretrained_file": "glove.6B"}}
    (problem,) = missing_files({"model": of_allennlp})
    assert problem.path == "model.embedder.pretrained_file"
