"""
With a `global_batch_size` micro-batches are as large as fit, and a training gives the weights of
`gradient_descent` in one process with that batch size.
"""

import re
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from tests.end_to_end import resize_test
from tests.end_to_end.causal_lm_test import PACKED
from tests.end_to_end.checkpoint_test import assert_ends_alike, recover
from tests.end_to_end.gradient_synchronization_test import traffic
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.language_model import (
    assert_loss_is_of_all_tokens,
    assert_readings_are_of_all_tokens,
    language_model,
    token_metrics,
)

# Of 85 instances the last step has 5: one worker 3, the other 2.
GLOBAL_BATCH_SIZE = 16
SGD = {"trainer.optimizer": {"type": "sgd", "lr": 0.5}, "trainer.grad_norm": 0.5}
IN_ORDER = {"data_loader": {"shuffle": False}}
# An LSTM takes more for one sentence than for eight.
FEEDFORWARD: Config = {
    "model.encoder": {
        "type": "feedforward",
        "feedforward": {"input_dim": 12, "num_layers": 1, "hidden_dims": 10, "activations": "tanh"},
    }
}
VALIDATION = {"validation_data_loader": {"batch_size": 6}}


def auto(config: Config, stage: int, free: Optional[int] = None) -> Config:
    """With `free` bytes of memory on one of two workers."""
    config = deepspeed(config, stage)
    config["trainer"].update(
        num_gradient_accumulation_steps="auto", global_batch_size=GLOBAL_BATCH_SIZE
    )
    if free is not None:
        callback = {"type": "little_memory_on_rank_1", "num_bytes": free}
        config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], callback]
    return config


def found(result: Result) -> str:
    """What the console is told, once."""
    log = (result.serialization_dir / "out_worker0.log").read_text()
    (text,) = re.findall(r"Micro-batch (.*) = global batch 16,", log)
    return text


@pytest.mark.parametrize(
    "model, stage, free, accumulation", [("tagger", 3, 40_000, 2), ("classifier", 1, 100, 8)]
)
def test_allennlps_models_train_as_with_one_batch(
    experiments: Experiments, model: str, stage: int, free: Any, accumulation: int
) -> None:
    encoder = FEEDFORWARD if model == "tagger" and free else {}
    config = load_config(model, TWO_WORKERS, SGD, IN_ORDER, VALIDATION, encoder)
    config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], "count_communication"]
    one_batch = {"data_loader": {"shuffle": False, "batch_size": GLOBAL_BATCH_SIZE}}
    plain = load_config(model, ONE_PROCESS, SGD, one_batch, VALIDATION, encoder)
    result, expected = experiments.run(auto(config, stage, free)), experiments.run(plain)
    assert f"accumulation {accumulation} × workers 2" in found(result)
    assert_same_weights(result.weights(), expected.weights())
    assert_readings_are_of_all_tokens(result)
    assert_same_metrics(losses(result), losses(expected))
    # DeepSpeed broadcasts when it finds another order of modules than it has recorded, as one that
    # only goes forward would be.
    assert "broadcast" not in traffic(result)[0]


def losses(result: Result) -> Dict[str, float]:
    """Also of each epoch."""
    metrics = result.metrics_of_epochs()
    return {key: value for key, value in metrics.items() if "training_loss" in key}


def test_packed_sequences_of_a_language_model(experiments: Experiments, tokenizer: str) -> None:
    one_batch = {"data_loader.batch_size": GLOBAL_BATCH_SIZE}
    expected = experiments.run(language_model(tokenizer, ONE_PROCESS, PACKED, one_batch))
    share = {"data_loader": {}, "validation_data_loader": {"batch_size": 4}}
    config = auto(language_model(tokenizer, TWO_WORKERS, PACKED, share), 2, 100)
    result = experiments.run(config)
    assert found(result) == "1 × accumulation 8 × workers 2"
    assert_same_weights(result.weights(), expected.weights())
    assert token_metrics(result) == pytest.approx(token_metrics(expected), rel=1e-5)
    assert_loss_is_of_all_tokens(result, "validation")
    assert_readings_are_of_all_tokens(result)


CHECKPOINTS = {
    **TWO_WORKERS,
    **VALIDATION,
    "data_loader": {"shuffle": True},
    "model.encoder": {
        **FEEDFORWARD["model.encoder"],
        "feedforward": {**FEEDFORWARD["model.encoder"]["feedforward"], "dropout": 0.2},
    },
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": None},
}


def test_what_was_found_is_taken_over_by_a_recovered_run(
    experiments: Experiments, tmp_path: Path
) -> None:
    config = auto(load_config("tagger", CHECKPOINTS), 2, 40_000)
    uninterrupted = experiments.run(config)
    assert "accumulation 2" in found(uninterrupted)
    # Now there is memory.
    config["trainer"]["callbacks"] = config["trainer"]["callbacks"][:1]
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e0_b4")
    assert_ends_alike(recovered, uninterrupted)
    size = r"The micro-batch size is (\d+)"
    first, then = (
        (result.serialization_dir / "out_worker0.log").read_text()
        for result in (uninterrupted, recovered)
    )
    assert re.findall("Resumed: the micro-batch size is (\\d+)", then) == re.findall(
        f"{size} from now on", first
    )
    # AllenNLP appends to the file.
    assert then.count("Micro-batch ") == 1


def test_another_number_of_workers_finds_it_anew(experiments: Experiments, tmp_path: Path) -> None:
    keys = {"num_gradient_accumulation_steps": "auto", "global_batch_size": 12}
    config = resize_test.resizable(2, SGD, {f"trainer.{key}": keys[key] for key in keys})
    config["data_loader"] = {}
    config = deepspeed(config, 1)
    alone = {**config, "trainer": {**config["trainer"], "cuda_device": -1}}
    del alone["distributed"]
    uninterrupted = experiments.run(config)
    recovered = resize_test.recover(uninterrupted, tmp_path, alone)
    assert_same_weights(recovered.weights(), uninterrupted.weights())
    log = (recovered.serialization_dir / "out.log").read_text()
    assert "Micro-batch 12 × accumulation 1 × workers 1 = global batch 12" in log
