"""What is said of a DeepSpeed configuration that can't be used: see `tests/support/messages.py`."""

import json
from typing import Any, Callable, Dict

import pytest

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import (
    CHECKPOINTER_KEYS,
    INHERITED_TRAINER_KEYS,
    TRAINER_KEYS,
)
from allennlp_deepspeed.config.key_validation import FORMER_KEYS, check_names, check_values
from tests.unit.config.config_test import ADAMW, STAGE_0, WITHOUT_BF16, refusal

Expect = Callable[[str], None]


WRONG = [
    "zero2",
    "fsdp",
    {"optimiser": {}},
    {"xyzzy": 1},
    {"stage": 2},
    {"zero_optimization": {"stge": 2}},
    {"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}},
    {"aio": {"thread_count": 1}},
    {"checkpoint": {"writer": {"typ": "FAST"}}},
    {"optimizer": {"type": "AdamW", "parms": {}}},
    {"elasticity": {"enabled": True}},
    {"amp": {"enabled": True}},
    {"sparse_attention": {}},
    {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    True,
    ["zero_2"],
    {"zero_optimization": {"stage": 7}},
    {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
    {"bf16": True},
    {"optimizer": "Adam"},
    {"fp16": {"loss_scale": True}},
    {"fp16": {"min_loss_scale": 0.1}},
    {"train_batch_size": 0},
    {"gradient_clipping": -1},
    {"train_batch_size": True},
    {"torch_autocast": {"dtype": "fp32"}},
    {"communication_data_type": "int8"},
    {"checkpoint": {"tag_validation": "no"}},
    {"optimizer": {"params": {"lr": 1}}},
    {"optimizer": {"type": "AdmW"}},
    {"scheduler": {"type": "ReduceLROnPlateau"}},
    {"scheduler": {"type": "OneCycle"}},
    {"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
    {"zero_optimization": {"leaf_module": 3}},
    {"flops_profiler": {"enabled": True}},
    {"timers": {"throughput": {"synchronized": False}}},
    {"gradient_allreduce_op": "sum"},
    {
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
    {"pipeline": {"stages": "auto"}},
    {"tensor_parallel": {"autotp_size": 2}},
    {"sequence_parallel_size": 2},
    {"expert_parallel": {"enabled": True}},
    {"hybrid_engine": {"enabled": True}},
    {"autotuning": {"enabled": True}},
    {"data_efficiency": {"enabled": True}},
    {"activation_checkpointing": {"partition_activations": True}},
    {"zero_optimization": {"round_robin_gradients": True}},
    {"zero_optimization": {"elastic_checkpoint": True}},
    {"dataloader_drop_last": True},
    {"managed_gradient_accumulation": True},
    {"compile": {"deepcompile": True}},
    {"prescale_gradients": True},
    {"seq_parallel_communication_data_type": "fp32"},
    {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}},
    {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
    {"zero_optimization": {"zero_quantized_weights": True}},
    {"zero_optimization": {"legacy_stage1": True}},
    {"zero_optimization": {"load_from_fp32_weights": False}},
    # What pasted files still have
    {"bfloat16": {"enabled": True}},
    {"amp": {"enabled": False}},
    {"zero_optimization": {"cpu_offload": True}},
    {"optimizer": {"type": "OneBitAdam"}},
    {"num_epochs": 3},
    {"zero_optimization.stage": 2},
    {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
    {"gradient_clipping": "1.0", "zero_optimization": {"stage": "3"}},
    # Several at once
    {"zero_optimization": {"stge": 1, "offload_optimzer": {}}, "fp61": {}},
    {
        "zero_optimization": {
            "stge": 3,
            "round_robin_gradients": True,
            "reduce_bucket_size": "many",
            "offload_optimizer": {"device": "gpu"},
        },
        "optimizer": {"type": "AdmW", "params": {"lr": "auto", "max_grad_norm": 2}},
        "scheduler": {"params": {"steps": 1}},
    },
]


@pytest.mark.parametrize("config", WRONG, ids=json.dumps)
def test_a_wrong_key_or_value(config: Any, expect_message: Expect) -> None:
    message = refusal(config)
    assert "pydantic" not in message and "Input should" not in message
    expect_message(message)


GLOBAL_BATCH = {"num_gradient_accumulation_steps": "auto", "global_batch_size": 16, "world_size": 2}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
AUTOCAST_TO_FP16 = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
LEAVES = {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["BertLayer"]}}}

FOUR_WORKERS = {"world_size": 4, "serialization_dir": "out"}

CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}

# Both sides of a config file that don't go together.
CONTRADICTORY = [
    ({"gradient_accumulation_steps": 4}, {"num_gradient_accumulation_steps": 2}),
    ({"train_micro_batch_size_per_gpu": 16}, {"micro_batch_size": 8}),
    (
        {"train_batch_size": 100},
        {"micro_batch_size": 8, "num_gradient_accumulation_steps": 2, "world_size": 2},
    ),
    ({}, {**GLOBAL_BATCH, "global_batch_size": None}),
    ({}, {**GLOBAL_BATCH, "num_gradient_accumulation_steps": 4}),
    ({}, {**GLOBAL_BATCH, "num_gradient_accumulation_steps": None}),
    ({}, {**GLOBAL_BATCH, "world_size": 3}),
    ({}, {**GLOBAL_BATCH, "micro_batch_size": 16}),
    ({}, {**GLOBAL_BATCH, "sequence_parallel_size": 2}),
    ({"gradient_accumulation_steps": 2}, {**GLOBAL_BATCH}),
    ({"train_micro_batch_size_per_gpu": 8}, {**GLOBAL_BATCH}),
    ({"train_batch_size": 8}, {**GLOBAL_BATCH}),
    ({"gradient_clipping": 1.0}, {"grad_norm": 2.0}),
    ({"gradient_clipping": 1.0}, {"grad_norm": True}),
    ({"gradient_clipping": 2.0}, {"grad_norm": False}),
    ({"zero_optimization": {"compute_grad_norm": False}}, {"grad_norm": 1.0}),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}),
    ({"bf16": {"enabled": True}}, {"use_amp": False}),
    ({name: {"enabled": False} for name in ("bf16", "fp16", "torch_autocast")}, {"use_amp": True}),
    ({"bf16": {"enabled": True}}, WITHOUT_BF16),
    ({"type": "zero_2", "fp16": {"enabled": False}}, {"use_amp": True, **WITHOUT_BF16}),
    ({"zero_optimization": {"stage": 1}, **AUTOCAST_TO_FP16}, {}),
    ({**STAGE_0, "bf16": {"enabled": True}}, {"optimizer": "multi"}),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, {"grad_scaling": False}),
    ({**STAGE_0, **AUTOCAST_TO_FP16}, {"grad_scaling": False}),
    ({**STAGE_0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {}),
    ({"data_types": {"param_dtype": "bf16"}}, {}),
    ({"data_types": {"param_dtype": "fp16"}, "bf16": {"enabled": True}}, {}),
    (ADAMW, {"optimizer": "huggingface_adamw"}),
    ({"scheduler": {"type": "WarmupLR"}}, {"learning_rate_scheduler": "slanted_triangular"}),
    ({**ADAMW, "scheduler": {"type": "StepLR", "params": {"step_size": 1}}}, {}),
    ({"scheduler": {"type": "WarmupCosineLR"}}, {}),
    *(
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": value}}}, {})
        for value in ("0.01", {"value": 0.01})
    ),
    ({"scheduler": {"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": "true"}}}, {}),
    *(
        ({"optimizer": {"type": "Adam", "params": {"lr": lr, "betas": betas}}}, {})
        for lr, betas in (([1], 3), ("0.1", [0.9]), (None, ["0.9", "x"]), ({"value": 1}, "auto"))
    ),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, {}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}, {}),
    ({**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": "auto"}}}, {}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": "auto"}}}, {}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "adam_w_mod": "auto"}}}, {}),
    ({"type": "zero_2", "zero_optimization": {"offload_optimizer": {"device": "auto"}}}, {}),
    ({"tensorboard": {"enabled": "auto"}}, {}),
    ("zero_3_nvme", {}),
    ("zero_3_nvme", {"serialization_dir": "run", "moving_average": {"type": "exponential"}}),
    ({"type": "zero_3_offload", "zero_optimization": {"stage": 2}}, {}),
    ({"zero_optimization": {"stage": 0, **OFFLOAD}}, {}),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, {"world_size": 4}),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, {"world_size": 8}),
    ({"type": "zero_3_nvme", "zero_optimization": {"zero_hpz_partition_size": 2}}, FOUR_WORKERS),
    *(
        ({"zero_optimization": zero}, {"reshard_after_micro_batch": False, **FOUR_WORKERS})
        for zero in (
            {"stage": 2},
            {"stage": 3, "zero_hpz_partition_size": 2},
            {"stage": 3, "offload_param": {"device": "nvme"}},
        )
    ),
    ({"zero_optimization": {"stage": 1}}, {"gradient_synchronization": "micro_batch"}),
    (None, {"sequence_parallel_size": 2, "world_size": 3}),
    ("zero_3", {"torch_compile": True}),
    (LEAVES, {"torch_compile": {"mode": "reduce-overhead"}}),
    (None, {"torch_compile": True, "sequence_parallel_size": 2, "world_size": 2}),
    (None, {"torch_compile": True, "sequence_tiling": {"modules": ["mlp$"], "num_tiles": 2}}),
    # Several at once
    (
        {
            "gradient_accumulation_steps": 4,
            "train_batch_size": 7,
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
            **ADAMW,
        },
        {"num_gradient_accumulation_steps": 2, "optimizer": "adam"},
    ),
]


@pytest.mark.parametrize("config, settings", CONTRADICTORY, ids=json.dumps)
def test_a_contradiction(config: Any, settings: Dict[str, Any], expect_message: Expect) -> None:
    expect_message(refusal(config, **settings))


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "comet"])
def test_a_monitor_without_its_package(
    package: str, expect_message: Expect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expect_message(refusal({package: {"enabled": True}}))


# Keys of the trainer's and the checkpointer's, which `declared_keys` declares.
VALUES = [
    *({"num_gradient_accumulation_steps": steps} for steps in (0, False, "2")),
    {"global_batch_size": 0},
    *({"grad_norm": norm} for norm in (-1, "1.0", [1.0])),
    *({"grad_cache": settings} for settings in (3, {}, {"chunk_size": 0, "trim": True})),
    *({"grad_cache": {"chunk_size": size}} for size in ("most", {"document": -1, "query": 4})),
    {"grad_cache": {"document": 4, "query": 8}},
    {"grad_cache": {"chunk_size": 4, "trim_padding": False, "negatives": "local"}},
    *({"torch_compile": value} for value in ("inductor", {"modus": "default"}, {"dynamic": "yes"})),
    {"torch_compile": {"recompile_limit": 0, "mode": "fast"}},
    {"sequence_tiling": {"modules": "mlp", "num_tile": 2}},
    {"activation_checkpointing": ["("]},
    *({"gradient_synchronization": value} for value in ("boundary", "often", 0.5, ["embedder"])),
    *({"reshard_after_micro_batch": value} for value in (1, None, "node")),
    {"resume": "always"},
    {"use_amp": 1, "grad_scaling": None},
    *({"num_epochs": number} for number in (0, "five", 2.5, None)),
    *({"patience": number} for number in (0, -2, 7.5)),
    *({"validation_metric": name} for name in ("accuracy", 3, ["+accuracy", "loss"], [])),
    *({"no_grad": value} for value in ("embedder", ["a("])),
    {"callbacks": {"type": "tensorboard"}},
]


@pytest.mark.parametrize("values", VALUES, ids=json.dumps)
def test_a_value_of_the_trainer(values: Dict[str, Any], expect_message: Expect) -> None:
    errors = ConfigErrors()
    check_values("trainer", {**TRAINER_KEYS, **INHERITED_TRAINER_KEYS}, values, errors)
    expect_message("\n".join(errors.lines))


@pytest.mark.parametrize("path", FORMER_KEYS)
def test_a_former_key(path: str, expect_message: Expect) -> None:
    section, _, name = path.rpartition(".")
    errors = ConfigErrors()
    check_names(section, [], {name: 1}, errors)
    expect_message("\n".join(errors.lines))


def test_a_key_of_the_checkpointer(expect_message: Expect) -> None:
    errors = ConfigErrors()
    values = {"async_saves": True, "async_save": 1, "keep_most_recent_by_count": -1}
    check_names("trainer.checkpointer", list(CHECKPOINTER_KEYS), values, errors)
    check_values("trainer.checkpointer", CHECKPOINTER_KEYS, values, errors)
    expect_message("\n".join(errors.lines))
