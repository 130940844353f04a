"""What constructors say of a config before data are read."""

from typing import Any, Dict, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import preflight
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import TWO_WORKERS, load_config

Config = Dict[str, Any]


def lines(changes: Config, name: str = "classifier") -> List[str]:
    config = load_config(name, TWO_WORKERS, {"trainer.type": "deepspeed"})
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = config
        for part in sections:
            section = section[part]
        if value is None:
            section.pop(key)
        else:
            section[key] = value
    try:
        preflight.check(Params(config))
    except ConfigurationError as error:
        return error.message.splitlines()
    return []


def of_deepspeed(**sections: Any) -> Config:
    return {"trainer.optimizer": None, "trainer.deepspeed_config": sections}


ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"trainer.optimizer.lr": -1}, "'trainer.optimizer.lr' is -1: Invalid learning rate: -1"),
        (
            {"trainer.optimizer": {"type": "adam", "betas": [2, 0.9]}},
            "'trainer.optimizer.betas' is [2, 0.9]: Invalid beta parameter at index 0: 2",
        ),
        (
            {"trainer.optimizer.parameter_groups": [[["["], {"lr": 1}]]},
            '\'trainer.optimizer.parameter_groups\' is [[["["], {"lr": 1}]]: ',
        ),
        (
            {"trainer.learning_rate_scheduler": {"type": "step", "step_size": 0}},
            "'trainer.learning_rate_scheduler.step_size' is 0: ZeroDivisionError",
        ),
        (
            {"trainer.learning_rate_scheduler": {"type": "reduce_on_plateau", "mode": "up"}},
            "'trainer.learning_rate_scheduler.mode' is \"up\": mode up is unknown!",
        ),
        ({"trainer.num_epochs": 0}, "'trainer.num_epochs' is 0: must be at least 1"),
        ({"trainer.patience": 0}, "'trainer.patience' is 0: must be at least 1, or null"),
        (
            {"dataset_reader.max_instances": 0},
            "'dataset_reader.max_instances' is 0: must be at least 1, or null",
        ),
        ({"trainer.validation_metric": "accuracy"}, "'trainer.validation_metric' is \"accuracy\""),
        (
            {"trainer.validation_metric": "+acuracy"},
            "'trainer.validation_metric' is \"+acuracy\", but the model has no metric 'acuracy': "
            "it has accuracy, batch_loss, ",
        ),
        ({"trainer.no_grad": ["["]}, "'trainer.no_grad' has \"[\", which is no regular expression"),
        ({"trainer.no_grad": [".*"]}, "'trainer.no_grad' is [\".*\"], which every parameter of"),
        (
            {"trainer.activation_checkpointing": ["nothing"]},
            "'trainer.activation_checkpointing' has \"nothing\", but the name of no module",
        ),
        ({"trainer.grad_cache": {"chunk_size": 2}}, "'trainer.grad_cache' is for contrastive"),
        ({"data_loader.batch_size": 0}, "'data_loader.batch_size' is 0: batch_size must be at le"),
        ({"data_loader.batches_per_epoch": 0}, "'data_loader.batches_per_epoch' is 0: batches_per"),
        # Once, though nothing can be constructed without it.
        (
            {"model.seq2vec_encoder.type": {"value": "cnn"}},
            '\'model.seq2vec_encoder.type\' is {"value": "cnn"}: must be a string',
        ),
        ({"data_loader.batch_size": "8"}, "'data_loader.batch_size' is \"8\": must be an integer"),
        (
            {"data_loader": {"batch_sampler": {"type": "bucket", "batch_size": "8"}}},
            "'data_loader.batch_sampler.batch_size' is \"8\": must be an integer",
        ),
        ({"trainer.cuda_device": [-1]}, "'trainer.cuda_device' is [-1]: must be the number of a "),
        (
            {"trainer.cuda_device": [0, 1]},
            "'trainer.cuda_device' is [0, 1]: must be the number of a GPU, or -1 for the CPU; for "
            'several workers write "distributed": {"cuda_devices": [0, 1]} at the top level',
        ),
        (
            {"data_loader": {"batch_sampler": {"type": "bucket", "batch_size": -3}}},
            "'data_loader.batch_sampler.batch_size' is -3: must be at least 1",
        ),
        (
            {"model.seq2vec_encoder.num_filters": -1},
            "'model.seq2vec_encoder': RuntimeError: Trying to create tensor with negative",
        ),
        (
            {"model.seq2vec_encoder.embedding_dim": 13},
            "'model.seq2vec_encoder' takes vectors of 13 dimensions, but "
            "'model.text_field_embedder' gives them 12: write the same for both",
        ),
        ({"model.dropout": 2}, "'model': ValueError: dropout probability has to be between 0 and"),
        (
            {"dataset_reader.token_indexers": {"words": "single_id"}},
            "'model.text_field_embedder.token_embedders' has \"tokens\", but "
            "'dataset_reader.token_indexers' has \"words\": give both the same",
        ),
        (
            {"vocabulary": {"min_count": {"tokeens": 2}}},
            "'vocabulary.min_count.tokeens' is for words of a namespace that no token indexer has: "
            'did you mean "tokens"?',
        ),
        ({"vocabulary": {"max_vocab_size": -1}}, "'vocabulary.max_vocab_size' is -1: must be"),
        (
            of_deepspeed(optimizer={"type": "AdamW", "params": {"lr": "0.1"}}),
            "deepspeed_config.optimizer.params.lr is '0.1': must be a number, 0.1 without quotes",
        ),
        (
            of_deepspeed(optimizer={"type": "AdamW", "params": {"lr": 0.1, "wd": 1}}),
            "deepspeed_config.optimizer.params.wd is no parameter of AdamW",
        ),
        (
            of_deepspeed(optimizer=ADAMW, scheduler={"type": "StepLR", "params": {"step_size": 1}}),
            'deepspeed_config.scheduler.type is "StepLR", which is PyTorch\'s',
        ),
        (
            of_deepspeed(
                optimizer=ADAMW,
                scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "nine"}},
            ),
            'deepspeed_config.scheduler "WarmupCosineLR" can\'t be constructed: TypeError',
        ),
    ],
    ids=str,
)
def test_what_a_constructor_refuses_is_said_with_its_key(changes: Config, line: str) -> None:
    (said,) = lines(changes)
    assert said.startswith(line)


@pytest.mark.parametrize("decay", [0.0, 1])
@pytest.mark.parametrize("name", ["classifier", "tagger", "transformer", "bi_encoder"])
def test_what_trains_is_taken(name: str, decay: float) -> None:
    changes = {
        "trainer.moving_average": {"type": "exponential", "decay": decay},
        "trainer.learning_rate_scheduler": {"type": "slanted_triangular"},
        "trainer.no_grad": ["embedder"],
        "trainer.patience": 1,
        "trainer.optimizer": {
            "type": "adamw",
            "parameter_groups": [[["a"], {"lr": 1}], [["z"], {}]],
        },
        "data_loader": {"batch_size": 2, "num_workers": 1},
    }
    assert lines(changes, name) == []


@pytest.mark.parametrize(
    "metric, said",
    [
        ("+recall@5", []),
        ("-loss", []),
        (
            "+recall@7",
            ["but the model has no metric 'recall@7': it has batch_loss, batch_reg_loss, "],
        ),
    ],
)
@pytest.mark.parametrize("is_pretrained", [False, True])
def test_the_metrics_of_a_bi_encoder_are_known(
    metric: str, said: List[str], is_pretrained: bool
) -> None:
    changes: Config = {"trainer.validation_metric": metric}
    if is_pretrained:
        embedder = {"type": "pretrained_transformer", "model_name": "not-looked-for"}
        changes["model.text_field_embedder"] = {"token_embedders": {"tokens": embedder}}
    found = [line for line in lines(changes, "bi_encoder") if "validation_metric" in line]
    assert len(found) == len(said) and all(text in line for text, line in zip(said, found))


def test_a_package_may_come_from_a_callback_of_the_users() -> None:
    (said,) = lines({"trainer.callbacks": ["wandb"]})
    assert said.startswith("'trainer.callbacks' has \"wandb\", but the package")
    assert lines({"trainer.callbacks": ["record_steps", "wandb"]}) == []


def test_models_of_which_nothing_is_known_are_not_tried() -> None:
    changes = {"model": {"type": "either_of_two_embedders", "embedding_dim": 8}}
    assert lines({**changes, "trainer.validation_metric": "+whatever"}) == []
