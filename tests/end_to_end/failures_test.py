"""What is wrong is said before anything is lost, and on every rank."""

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.support.command import Run, allennlp
from tests.support.experiment import INCLUDED, deepspeed, load_config

WORKERS = {"distributed": {"cuda_devices": [-1, -1]}}


def train(config: Dict[str, Any], directory: Path) -> Run:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return allennlp(
        "train",
        path,
        "-s",
        directory / "out",
        include_packages=("allennlp_deepspeed", INCLUDED),
        time_limit=60,
    )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("rank", range(2))
def test_a_nan_loss_on_one_rank_ends_the_step_on_every_rank(tmp_path: Path, stage: int, rank: int):
    config = load_config(
        "classifier",
        WORKERS,
        {
            # The second micro-batch of the second group.
            "model.type": "nan_classifier",
            "model.on_rank": rank,
            "model.at_forward": 5,
            "trainer.num_gradient_accumulation_steps": 3,
            "trainer.callbacks": ["report_exception"],
        },
    )
    run = train(deepspeed(config, stage), tmp_path)
    assert run.returncode != 0
    for reporting_rank in range(2):
        report = (tmp_path / "out" / f"exception_{reporting_rank}.json").read_text()
        assert "ValueError('nan loss encountered at step 2 of epoch 0" in report


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {
                "evaluate_on_test": True,
                "test_data_path": "tests/fixtures/data/tagging_validation.tsv",
                **WORKERS,
            },
            'add "type": "deepspeed" at the top level of the config',
        ),
        (
            {"trainer.deepspeed_config": {"zero_optimisation": {"stage": 2}}},
            'did you mean "zero_optimization"?',
        ),
        (
            {"trainer.deepspeed_config": {"gradient_clipping": 2.0}, "trainer.grad_norm": 1.0},
            "grad_norm is 1, but deepspeed_config.gradient_clipping is 2",
        ),
        (
            {"trainer.deepspeed_config": {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}},
            "deepspeed_config.optimizer.params.lr is left open",
        ),
        (
            {
                "trainer.deepspeed_config": {
                    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}
                },
                "trainer.reshard_after_micro_batch": False,
                "distributed": {"cuda_devices": [-1, -1, -1, -1]},
            },
            "reshard_after_micro_batch is false, but deepspeed_config.zero_optimization."
            "zero_hpz_partition_size is 4: remove one of them",
        ),
        (
            {"trainer.deepspeed_confg": "zero_3"},
            'did you mean "deepspeed_config"?',
        ),
        (
            {"trainer.deepspeed_config": {"checkpoint": {"load_universal": True}}},
            "deepspeed_config.checkpoint.load_universal is true",
        ),
        (
            {"trainer.checkpointer": {"type": "default"}},
            "'trainer.checkpointer.type' is 'default'",
        ),
        (
            {"trainer.checkpointer": {"on_corupt": "previous"}},
            'did you mean "on_corrupt"?',
        ),
        (
            {"trainer.checkpointer": {"on_corrupt": "ignore"}},
            "'trainer.checkpointer.on_corrupt' is \"ignore\": must be 'error' or",
        ),
        (
            {"trainer.checkpointer": {"async_save": "yes"}},
            "'trainer.checkpointer.async_save' is \"yes\": must be a valid boolean",
        ),
        (
            {"trainer.checkpointer": {"save_every_num_batches": 0}},
            "'trainer.checkpointer.save_every_num_batches' is 0: must be greater than 0",
        ),
        (
            {
                "distributed": {
                    "cuda_devices": [-1, -1],
                    "ddp_accelerator": {"type": "fairscale_fsdp"},
                }
            },
            'DeepSpeed takes its place: write "deepspeed", or leave it out',
        ),
        (
            {"trainer.deepspeed_config": {"train_batch_size": 8}, **WORKERS},
            "6 instances in a micro-batch x 1 gradient accumulation steps x 2 workers are 12",
        ),
        (
            {"trainer.type": "gradient_descent", "trainer.gradient_synchronization": "step"},
            "'trainer.gradient_synchronization' is given, but the trainer is AllenNLP's own",
        ),
        (
            {
                "trainer.deepspeed_config": "zero_1",
                "trainer.gradient_synchronization": "micro_batch",
            },
            'gradient_synchronization is "micro_batch", but at ZeRO stage 1',
        ),
        (
            {"trainer.gradient_synchronization": "boundary"},
            'must be "auto", "step" (formerly "boundary") or "micro_batch"',
        ),
        ({"trainer.log_every_num_steps": 0}, "'trainer.log_every_num_steps' is 0: write a number"),
        (
            {"trainer.activation_checkpointing": "encoder"},
            "'trainer.activation_checkpointing' is \"encoder\": must be a list",
        ),
        (
            {
                "trainer.deepspeed_config": {
                    "activation_checkpointing": {"partition_activations": 1}
                }
            },
            "activation_checkpointing.partition_activations is 1, but can't work",
        ),
        (
            {"trainer.checkpointer": {"exclude_frozen": True}},
            'did you mean "exclude_frozen_parameters"?',
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_data_is_read(
    tmp_path: Path, overrides: Dict[str, Any], message: str
):
    config = load_config("classifier", {"trainer.type": "deepspeed"}, overrides)
    config["train_data_path"] = str(tmp_path / "does not exist")
    if "optimizer" in config["trainer"].get("deepspeed_config", {}):
        del config["trainer"]["optimizer"]
    run = train(config, tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.output
    assert message in run.output.replace('\\"', '"')


@pytest.mark.parametrize("num_gradient_accumulation_steps", [1, 4])
def test_workers_that_use_different_parameters_are_noticed(
    tmp_path: Path, num_gradient_accumulation_steps: int
):
    # The two embeddings have one size, so that DeepSpeed would sum them up without complaint.
    config = load_config(
        "classifier",
        WORKERS,
        {
            "model": {"type": "either_of_two_embedders", "embedding_dim": 8},
            "trainer.num_gradient_accumulation_steps": num_gradient_accumulation_steps,
        },
    )
    run = train(deepspeed(config, 2), tmp_path)
    assert run.returncode != 0
    assert "the workers used different parameters" in run.output
    assert '"find_unused_parameters": true' in run.output


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {
                "trainer.optimizer": {
                    "type": "multi",
                    "optimizers": {"default": {"type": "sgd", "lr": 0.1}},
                    "parameter_groups": [
                        [["_classification_layer"], {"optimizer_name": "default"}]
                    ],
                }
            },
            "The optimizer 'multi' has optimizers of its own inside",
        ),
        (
            {
                "model.text_field_embedder.token_embedders.tokens.sparse": True,
                "trainer.optimizer": {"type": "sgd", "lr": 0.1},
            },
            'token_embedder_tokens\' has "sparse": true',
        ),
        (
            {
                "trainer.optimizer.parameter_groups": [[["embedder"], {}], [["encoder|layer"], {}]],
                "trainer.learning_rate_scheduler": {
                    "type": "slanted_triangular",
                    "gradual_unfreezing": True,
                },
            },
            "'trainer.learning_rate_scheduler.gradual_unfreezing' is true",
        ),
    ],
)
def test_what_deepspeed_would_get_wrong_is_refused(
    tmp_path: Path, overrides: Dict[str, Any], message: str
):
    run = train(deepspeed(load_config("classifier", overrides), 2), tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.output
    assert message in run.output
