"""What is said of a whole config before anything is read or started."""

from typing import Any, Dict, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import preflight
from tests.support.experiment import TWO_WORKERS, load_config


def experiment(**trainer: Any) -> Dict[str, Any]:
    config = load_config("classifier", TWO_WORKERS)
    return {**config, "trainer": {**config["trainer"], "type": "deepspeed", **trainer}}


def findings(config: Dict[str, Any]) -> List[str]:
    with pytest.raises(ConfigurationError) as error:
        preflight.check(Params(config))
    return str(error.value).splitlines()


def test_everything_that_is_wrong_is_said_at_once() -> None:
    config = experiment(
        num_epoch=2,
        log_every_num_steps=0,
        num_gradient_accumulation_steps=2,
        checkpointer={"keep_most_recent_by_count": -1, "save_every": 10},
        deepspeed_config={
            "zero_optimization": {
                "stage": 2,
                "stge": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "disk"},
            },
            "gradient_accumulation_steps": 4,
            "train_batch_size": 7,
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "tensor_parallel": {"autotp_size": 2},
        },
    )
    expected = [
        "'trainer.num_epoch' is no key",
        "'trainer.log_every_num_steps' is 0",
        "'trainer.checkpointer.keep_most_recent_by_count' is -1",
        "'trainer.checkpointer.save_every' is no key",
        "deepspeed_config.tensor_parallel.autotp_size is 2",
        'deepspeed_config.zero_optimization.offload_optimizer.device is "disk"',
        "deepspeed_config.zero_optimization.stge is unknown",
        "num_gradient_accumulation_steps is 2, but deepspeed_config.gradient_accumulation_steps",
        "deepspeed_config.train_batch_size is 7",
        "deepspeed_config.bf16.enabled and deepspeed_config.fp16.enabled are true",
        'optimizer is "adam", but deepspeed_config.optimizer is "AdamW"',
        "deepspeed_config.scheduler.params.warmup_num_steps is left open",
        'deepspeed_config.zero_optimization.offload_param.device is "cpu"',
    ]
    lines = findings(config)
    assert len(lines) == len(expected), "\n".join(lines)
    for line, start in zip(lines, expected):
        assert line.startswith(start)
