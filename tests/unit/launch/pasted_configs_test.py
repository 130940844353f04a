"""
Configurations as the projects write them that come from Hugging Face's Trainer, Lightning and
DeepSpeed's own examples, pasted into an AllenNLP config: each is accepted, or said what there
is to do, after which it is accepted.
"""

from copy import deepcopy
from typing import Any, Callable, Dict, List, Tuple

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import train_command
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import TWO_WORKERS, load_config

Config = Dict[str, Any]
Expect = Callable[[str], None]


def pasted(config: Config, *changes: Tuple[str, Any]) -> Params:
    """The experiment with `config`, and values at dotted paths. `None` removes."""
    experiment = load_config("classifier", TWO_WORKERS)
    experiment["trainer"].update(type="deepspeed", deepspeed_config=deepcopy(config))
    for path, value in changes:
        if not path.startswith("trainer."):
            path = f"trainer.deepspeed_config.{path}"
        *sections, key = path.split(".")
        section = experiment
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = deepcopy(value)
    return Params(experiment)


AUTO_ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
AUTO_SIZES = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}

CONFIGS: Dict[str, Tuple[Config, List[List[Tuple[str, Any]]]]] = {
    # The configuration, and what one does about each message: keys and values come first, then what
    # both sides set.
    "hugging face, stage 2": (
        {
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            },
            **AUTO_SIZES,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        [[("optimizer", None), ("scheduler.params.warmup_num_steps", 10)]],
    ),
    "axolotl, with compilation": (
        {
            "compile": {"disable": False, "backend": "inductor"},
            "zero_optimization": {
                "stage": 2,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "bf16": {"enabled": True},
            "fp16": {**AUTO_FP16, "auto_cast": False},
            **AUTO_SIZES,
            "wall_clock_breakdown": False,
        },
        [[("compile", None)]],
    ),
    "lightning, with everything said": (
        {
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 3e-5, "freeze_step": 1000}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "last_batch_iteration": -1,
                    "warmup_min_lr": 0,
                    "warmup_max_lr": 3e-5,
                    "warmup_num_steps": 100,
                },
            },
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": True,
                "allgather_bucket_size": 2e8,
                "reduce_bucket_size": 2e8,
            },
        },
        [[("optimizer", None), ("zero_optimization.offload_optimizer", {"device": "none"})]],
    ),
    "deepspeed, an early file": (
        {
            "train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_params": True,
                "overlap_comm": True,
                "stage3_max_live_params": "auto",
            },
            "bfloat16": {"enabled": True},
            "amp": {"enabled": False, "opt_level": "O1"},
        },
        [
            [
                ("zero_optimization.cpu_offload", None),
                ("zero_optimization.offload_optimizer", {"device": "cpu"}),
                ("zero_optimization.cpu_offload_params", None),
                ("zero_optimization.stage3_max_live_params", None),
                ("bfloat16", None),
                ("bf16", {"enabled": True}),
                ("amp", None),
            ],
            [("train_batch_size", 12)],
        ],
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_messages_say_all_that_there_is_to_do(name: str, expect_message: Expect) -> None:
    config, rounds = CONFIGS[name]
    done: List[Tuple[str, Any]] = []
    for changes in rounds:
        with pytest.raises(ConfigurationError) as error:
            train_command.check(pasted(config, *done))
        expect_message(error.value.message)
        done.extend(changes)
    train_command.check(pasted(config, *done))


@pytest.mark.parametrize(
    "key, value",
    [
        ("gradient_clipping", 1.0),
        ("bf16", {"enabled": True}),
        ("offload_optimizer", {}),
        ("distributed", {"cuda_devices": [0, 1]}),
    ],
    ids=str,
)
def test_a_key_in_the_trainer_that_belongs_elsewhere_is_sent_there(
    key: str, value: Any, expect_message: Expect
) -> None:
    with pytest.raises(ConfigurationError) as error:
        train_command.check(pasted({}, (f"trainer.{key}", value)))
    expect_message(error.value.message)
