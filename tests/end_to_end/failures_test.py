"""What is wrong is said before anything is lost, and on every rank."""

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.command import Run, allennlp
from tests.experiment import INCLUDED, deepspeed, load_config

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
            {"evaluate_on_test": True, **WORKERS},
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
            {"trainer.deepspeed_config": {"train_batch_size": 8}, **WORKERS},
            "6 instances in a micro-batch x 1 gradient accumulation steps x 2 workers are 12",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_data_is_read(
    tmp_path: Path, overrides: Dict[str, Any], message: str
):
    config = load_config("classifier", {"trainer.type": "deepspeed"}, overrides)
    config["train_data_path"] = str(tmp_path / "does not exist")
    run = train(config, tmp_path)
    assert run.returncode != 0
    assert "ConfigurationError" in run.output
    assert message in run.output.replace('\\"', '"')


def test_workers_that_use_different_parameters_are_noticed(tmp_path: Path):
    # The two embeddings have one size, so that DeepSpeed would sum them up without complaint.
    config = load_config(
        "classifier", WORKERS, {"model": {"type": "either_of_two_embedders", "embedding_dim": 8}}
    )
    run = train(deepspeed(config, 2), tmp_path)
    assert run.returncode != 0
    assert "the workers used different parameters" in run.output
    assert '"find_unused_parameters": true' in run.output


def test_a_checkpointer_of_another_kind_is_refused(tmp_path: Path):
    config = load_config("classifier", {"trainer.checkpointer": {"type": "default"}})
    run = train(deepspeed(config, 2), tmp_path)
    assert run.returncode != 0
    assert "trainer.checkpointer" in run.output
    assert "deepspeed" in run.output
