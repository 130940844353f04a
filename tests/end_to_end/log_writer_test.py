"""What AllenNLP's "tensorboard" callback logs of a model that DeepSpeed has sharded."""

from pathlib import Path
from typing import Dict

from tests.end_to_end.parity_test import find_unused_parameters
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    deepspeed,
    load_config,
    refusal,
)
from tests.support.tensorboard import events

LOGGED: Config = {
    "trainer.num_gradient_accumulation_steps": 3,
    "trainer.grad_norm": 0.1,
    "trainer.optimizer.parameter_groups": [[["encoder.*weight"], {"lr": 0.002}]],
    "trainer.no_grad": ["token_embedder", "tag_projection_layer.*bias"],
    "trainer.callbacks": [
        {
            "type": "tensorboard",
            "summary_interval": 2,
            "batch_size_interval": 2,  # not 3: the last has an instance that is never trained on
            "should_log_parameter_statistics": True,
            "should_log_learning_rate": True,
        },
        "record_steps",
    ],
}


def logged(result: Result) -> Dict[str, float]:
    """Every number that has been logged, by its tag and step."""
    return {
        f"{split} {tag} {step}": value
        for split in ("train", "validation")
        for tag, values in events(result.serialization_dir / "log" / split).items()
        for step, value in values
        if "memory" not in tag
    }


def test_tensorboard_logs_what_it_does_with_gradient_descent(experiments: Experiments) -> None:
    config = load_config("tagger", TWO_WORKERS, LOGGED)
    on_deepspeed = deepspeed(config, 3)
    on_deepspeed["trainer"]["log_every_num_steps"] = 1  # not about once a second
    actual = logged(experiments.run(on_deepspeed))
    expected = logged(experiments.run({**config, **find_unused_parameters(config)}))
    of_parameters = ("parameter_mean/", "parameter_std/", "gradient_mean/", "gradient_std/")
    assert_same_metrics(
        actual, {k: v for k, v in expected.items() if not k.split()[1].startswith(of_parameters)}
    )
    tags = {key.split()[1] for key in actual}
    rates = "learning_rate/encoder._module.weight_hh_l0"
    assert {rates, "gradient_norm", "train/batch_size"} < tags


def test_distributions_are_refused(tmp_path: Path) -> None:
    callbacks = [{"type": "tensorboard", "distribution_interval": 7}]
    config = load_config("tagger", ONE_PROCESS, {"trainer.callbacks": callbacks})
    message = refusal(deepspeed(config, 2), tmp_path)
    assert "'distribution_interval' of the callback TensorBoardCallback is 7" in message
