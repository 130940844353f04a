"""What is wrong is said before anything is lost, and on every rank."""

from pathlib import Path
from typing import Any, Dict

import pytest

from tests.support.experiment import TWO_WORKERS, deepspeed, load_config, refusal, train


def test_a_worker_without_any_gradient_is_one_message(tmp_path: Path):
    model = {"model.type": "independent_tagger", "model.rank": 0}
    run = train(deepspeed(load_config("tagger", TWO_WORKERS, model), 3), tmp_path)
    assert run.returncode != 0
    assert "On rank 0 the loss doesn't depend on any trainable parameter" in run.output
    assert "SIGABRT" not in run.output


@pytest.mark.parametrize(
    "model, message, leaf, named",
    [
        (
            "unequal_tagger",
            "The called modules differ between ranks: 'decoder.",
            "Decoder",
            "Decoder",
        ),
        (
            "dropping_tagger",
            "The workers of this node have called the same modules.",
            "Stack",
            "MyEncoder",
        ),
    ],
)
def test_modules_that_are_called_unequally_often_are_named(
    model: str, message: str, leaf: str, named: str, tmp_path: Path
):
    overrides = {"model.type": model, "model.rank": 1}
    config = deepspeed(load_config("tagger", TWO_WORKERS, overrides), 3)
    zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = 0
    run = train(config, tmp_path)
    assert run.returncode != 0
    assert message in run.output
    assert f'"leaf_module": {{"classes": ["{named}"]}}' in run.output
    zero["leaf_module"] = {"classes": [leaf]}
    run = train(config, tmp_path / "again")
    assert run.returncode == 0, run.output[-3000:]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {"trainer.deepspeed_config": {"checkpoint": {"load_universal": True}}},
            "'trainer.deepspeed_config.checkpoint.load_universal' is true",
        ),
        ({"trainer.checkpointer": {"type": "default"}}, "'trainer.checkpointer.type' is 'default'"),
        (
            {"trainer.checkpointer": {"on_corrupt": "ignore"}},
            "'trainer.checkpointer.on_corrupt' is \"ignore\": must be 'error' or",
        ),
        (
            {
                "distributed": {
                    "cuda_devices": [-1, -1],
                    "ddp_accelerator": {"type": "fairscale_fsdp"},
                }
            },
            "the 'deepspeed' trainer replaces it: remove the key",
        ),
        (
            {"trainer.type": "gradient_descent", "trainer.gradient_synchronization": "step"},
            "'trainer.gradient_synchronization' is a key of the 'deepspeed' trainer, but",
        ),
        (
            {"trainer.type": "gradient_descent", "trainer.grad_cache": {"chunk_size": 3}},
            "'trainer.grad_cache' is a key of the 'deepspeed' trainer, but",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_data_is_read(
    tmp_path: Path, overrides: Dict[str, Any], message: str
):
    config = load_config("classifier", {"trainer.type": "deepspeed"}, overrides)
    config["train_data_path"] = str(tmp_path / "does not exist")
    assert message in refusal(config, tmp_path)


def test_sparse_gradients_are_refused(tmp_path: Path):
    sparse = {
        "model.text_field_embedder.token_embedders.tokens.sparse": True,
        "trainer.optimizer": {"type": "sgd", "lr": 0.1},
    }
    message = refusal(deepspeed(load_config("classifier", sparse), 2), tmp_path)
    assert "'model.text_field_embedder.token_embedders.tokens.sparse' is true" in message
