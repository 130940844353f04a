"""
Configurations as the projects write them that come from Hugging Face's Trainer, Lightning and
DeepSpeed's own examples, pasted into an AllenNLP config: each is accepted, or says in one message
all that there is to do, after which it is accepted.
"""

from copy import deepcopy
from typing import Any, Dict, List, Tuple

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import preflight
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import TWO_WORKERS, load_config

Config = Dict[str, Any]


# Of the AllenNLP config: two workers, batches of 6, "adam" in 'trainer.optimizer'.
NO_OPTIMIZER = ("trainer.optimizer", None)


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

CONFIGS: Dict[str, Tuple[Config, Dict[str, List[Tuple[str, Any]]]]] = {
    # The configuration, and by the start of each line of the message what one does about it.
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
        {
            'optimizer is "adam", but deepspeed_config.optimizer is "AdamW"': [("optimizer", None)],
            "deepspeed_config.scheduler.params.warmup_num_steps is left open": [
                ("scheduler.params.warmup_num_steps", 10)
            ],
        },
    ),
    "hugging face, stage 3 without optimizer": (
        {
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            **AUTO_SIZES,
        },
        {},
    ),
    "hugging face, the optimizer of the file": (
        {
            "bf16": {"enabled": True},
            "optimizer": AUTO_ADAMW,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {**AUTO_WARMUP["params"], "total_num_steps": "auto"},
            },
            "zero_optimization": {"stage": 1},
            **AUTO_SIZES,
            "train_batch_size": 64,
        },
        {
            'optimizer is "adam", but deepspeed_config.optimizer is "AdamW"': [
                NO_OPTIMIZER,
                ("optimizer.params.lr", 3e-5),
            ],
            "deepspeed_config.scheduler.params.warmup_num_steps is left open": [
                ("scheduler.params.warmup_num_steps", 10)
            ],
            "deepspeed_config.train_batch_size is 64": [("train_batch_size", None)],
        },
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
        {"deepspeed_config.compile is ": [("compile", None)]},
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
        {
            'deepspeed_config.optimizer.type is "OneBitAdam"': [("optimizer", None)],
            'optimizer is "adam", but deepspeed_config.optimizer is "OneBitAdam"': [],
            "deepspeed_config.zero_optimization.offload_optimizer is true": [
                ("zero_optimization.offload_optimizer", {"device": "none"})
            ],
        },
    ),
    "deepspeed, BingBertSquad": (
        {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 3,
            "steps_per_print": 10,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": True,
            "sparse_attention": {"mode": "fixed"},
            "fp16": {"enabled": False},
        },
        {
            "deepspeed_config.prescale_gradients is true": [("prescale_gradients", None)],
            "deepspeed_config.sparse_attention": [("sparse_attention", None)],
            "data_loader.batch_size is 6": [("train_micro_batch_size_per_gpu", 6)],
            "deepspeed_config.train_batch_size is 24": [("train_batch_size", None)],
            'optimizer is "adam", but deepspeed_config.optimizer is "Adam"': [NO_OPTIMIZER],
        },
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
        {
            "deepspeed_config.zero_optimization.cpu_offload_params is unknown": [
                ("zero_optimization.cpu_offload_params", None)
            ],
            "deepspeed_config.zero_optimization.stage3_max_live_params is unknown": [
                ("zero_optimization.stage3_max_live_params", None)
            ],
            "deepspeed_config.train_batch_size is 16": [("train_batch_size", 12)],
        },
    ),
    "deepspeed, offload with a threshold": (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_param": {"device": "cpu", "pin_memory": True},
                "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 1.0},
                "round_robin_gradients": True,
                "zenflow": {"topk_ratio": 0.05, "select_strategy": "auto"},
            },
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
        },
        {
            "deepspeed_config.zero_optimization.round_robin_gradients is true": [
                ("zero_optimization.round_robin_gradients", None)
            ],
            "deepspeed_config.zero_optimization.zenflow is ": [("zero_optimization.zenflow", None)],
            'deepspeed_config.zero_optimization.offload_param.device is "cpu"': [
                ("zero_optimization.offload_param", None)
            ],
        },
    ),
    "a file for tensor parallelism": (
        {
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 1, "gather_16bit_weights_on_model_save": True},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        },
        {"deepspeed_config.tensor_parallel.autotp_size is 2": [("tensor_parallel", None)]},
    ),
    "precision and monitors only": (
        {
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "run"},
            "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
            "comms_logger": {"enabled": False, "verbose": False},
        },
        {},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_one_message_says_all_that_there_is_to_do(name: str) -> None:
    config, advice = CONFIGS[name]
    if advice:
        with pytest.raises(ConfigurationError) as error:
            preflight.check(pasted(config))
        lines = str(error.value).splitlines()
        for start in advice:
            assert any(line.startswith(start) for line in lines), f"{start}\n{error.value}"
        assert len(lines) == len(advice), str(error.value)
    preflight.check(pasted(config, *(change for changes in advice.values() for change in changes)))


# What is refused, by itself and beside all others: changes of a config that is accepted, the start
# of the line about them, and what the line says to do.
Changes = List[Tuple[str, Any]]
CONFLICTS: List[Tuple[Changes, str, Changes]] = [
    (
        [("trainer.num_gradient_accumulation_steps", 2), ("gradient_accumulation_steps", 4)],
        "num_gradient_accumulation_steps is 2, but",
        [("gradient_accumulation_steps", 2)],
    ),
    (
        [("train_batch_size", 1000)],
        "deepspeed_config.train_batch_size is 1000, but",
        [("train_batch_size", None)],
    ),
    (
        [("train_micro_batch_size_per_gpu", 5)],
        "data_loader.batch_size is 6, but",
        [("train_micro_batch_size_per_gpu", None)],
    ),
    (
        [("trainer.grad_norm", False), ("gradient_clipping", 2.0)],
        "grad_norm is false, but deepspeed_config.gradient_clipping is 2",
        [("trainer.grad_norm", None)],
    ),
    (
        [("trainer.use_amp", False), ("bf16", {"enabled": True})],
        "use_amp is false, but deepspeed_config.bf16.enabled is true",
        [("trainer.use_amp", None)],
    ),
    (
        [("optimizer", {"type": "AdamW", "params": {"lr": "auto"}})],
        'optimizer is "adam", but deepspeed_config.optimizer is "AdamW"',
        [NO_OPTIMIZER, ("optimizer.params.lr", 0.1)],
    ),
    (
        [("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}})],
        "deepspeed_config.scheduler.params.warmup_num_steps is left open",
        [("scheduler.params.warmup_num_steps", 5)],
    ),
    (
        [("zero_optimization.offload_param", {"device": "cpu"})],
        'deepspeed_config.zero_optimization.offload_param.device is "cpu", but',
        [("zero_optimization.offload_param", None)],
    ),
    (
        [("zero_optimization.zero_hpz_partition_size", 2)],
        "deepspeed_config.zero_optimization.zero_hpz_partition_size is 2, but",
        [("zero_optimization.zero_hpz_partition_size", None)],
    ),
    (
        [("zero_optimization.compute_grad_norm", False), ("trainer.grad_norm", True)],
        "deepspeed_config.zero_optimization.compute_grad_norm is false, but",
        [("zero_optimization.compute_grad_norm", None)],
    ),
    (
        [("data_types", {"param_dtype": "fp16"})],
        'deepspeed_config.data_types.param_dtype is "fp16", but',
        [("data_types", None)],
    ),
    (
        [("zero_optimization.stge", 3)],
        "deepspeed_config.zero_optimization.stge is unknown",
        [("zero_optimization.stge", None)],
    ),
    (
        [("steps_per_print", "often")],
        'deepspeed_config.steps_per_print is "often"',
        [("steps_per_print", 10)],
    ),
    (
        [("zero_optimization.offload_optimizer", {"device": "cpu", "ratio": 0.5})],
        "deepspeed_config.zero_optimization: Partial offloading only supported for ZeRO Stage 3.",
        [("zero_optimization.offload_optimizer.ratio", None)],
    ),
    (
        [("scheduler", {"type": "LRRangeTest", "params": {"lr_range": 1}})],
        'deepspeed_config.scheduler: "params.lr_range" is no parameter of LRRangeTest',
        [("scheduler", None)],
    ),
    (
        [("prescale_gradients", True)],
        "deepspeed_config.prescale_gradients is true",
        [("prescale_gradients", None)],
    ),
    (
        [("trainer.gradient_synchronisation", "boundary")],
        "'trainer.gradient_synchronisation' is no key",
        [("trainer.gradient_synchronisation", None)],
    ),
    (
        [("trainer.reduce_within", "node")],
        "'trainer.reduce_within' is no longer a key: DeepSpeed's own collectives reduce gradients",
        [("trainer.reduce_within", None)],
    ),
    (
        [("trainer.shard_within", 2)],
        "shard_within is 2, but parameters are sharded only at ZeRO stage 3",
        [("trainer.shard_within", None)],
    ),
    (
        [("trainer.checkpointer", {"keep": 2})],
        "'trainer.checkpointer.keep' is no key",
        [("trainer.checkpointer", None)],
    ),
]


@pytest.mark.parametrize("first", CONFLICTS, ids=lambda conflict: conflict[0][0][0])
def test_any_two_conflicts_are_said_together(first: Tuple[Changes, str, Changes]) -> None:
    stage_2 = {"zero_optimization": {"stage": 2}}
    paths = {path for path, _ in first[0]}
    for second in CONFLICTS:
        if second is not first and any(path in paths for path, _ in second[0]):
            continue
        changes = [*first[0], *second[0]]
        with pytest.raises(ConfigurationError) as error:
            preflight.check(pasted(stage_2, *changes))
        for _, start, _ in (first, second):
            assert any(line.startswith(start) for line in str(error.value).splitlines()), (
                start,
                str(error.value),
            )
        preflight.check(pasted(stage_2, *changes, *first[2], *second[2]))


@pytest.mark.parametrize(
    "config, starts",
    [
        (
            {
                "zero_optimisation": {
                    "stge": 3,
                    "round_robin_gradients": True,
                    "reduce_bucket_size": "many",
                    "offload_optimizer": {"device": "gpu"},
                }
            },
            [
                'deepspeed_config.zero_optimisation is unknown: did you mean "zero_optimization"?',
                "deepspeed_config.zero_optimization.round_robin_gradients is true",
                'deepspeed_config.zero_optimization.reduce_bucket_size is "many"',
                'deepspeed_config.zero_optimization.offload_optimizer.device is "gpu"',
                'deepspeed_config.zero_optimization.stge is unknown: did you mean "stage"?',
            ],
        ),
        (
            {
                "optimizer": {"type": "AdmW", "params": {"lr": "auto", "max_grad_norm": 2}},
                "scheduler": {
                    "type": "WarmpLR",
                    "params": {"warmup_num_steps": "auto", "steps": 1, "epochs": 2},
                },
            },
            [
                'deepspeed_config.optimizer.type is "AdmW"',
                'deepspeed_config.scheduler.type is "WarmpLR"',
                'deepspeed_config.optimizer: "params.max_grad_norm" is refused',
                'deepspeed_config.scheduler: "params.steps" is no parameter of WarmupLR',
                'deepspeed_config.scheduler: "params.epochs" is no parameter of WarmupLR',
                'optimizer is "adam", but deepspeed_config.optimizer is "AdmW"',
                "deepspeed_config.scheduler.params.warmup_num_steps is left open",
            ],
        ),
        (
            {
                "optimizer": {"params": {"lr": 1}},
                "scheduler": {"type": "mine", "params": {"half_life": 3}},
            },
            [
                "deepspeed_config.optimizer.type is missing",
                'deepspeed_config.scheduler.type is "mine"',
                'optimizer is "adam", but deepspeed_config.optimizer is ""',
            ],
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "compute_grad_norm": False,
                    "cpu_offload": True,
                    "offload_optimizer": {},
                    "zero_hpz_partition_size": 5,
                },
                "fp16": {"enabled": True, "loss_scale_window": 0},
                "bf16": {"enabled": True},
            },
            [
                "deepspeed_config.zero_optimization.cpu_offload is true, DeepSpeed's former key",
                "deepspeed_config.zero_optimization: compute_grad_norm=false is supported only",
                "deepspeed_config.fp16: fp16.loss_scale_window must be > 0",
                "deepspeed_config.bf16.enabled and deepspeed_config.fp16.enabled are true",
                "deepspeed_config.zero_optimization.zero_hpz_partition_size is 5, but",
            ],
        ),
        (
            {
                "zero_optimization.offload_optimizer": {"device": "cpu"},
                "zero_optimization": {"offload_param.device": "cpu", "stage": 9},
            },
            [
                "deepspeed_config.zero_optimization.offload_optimizer is one key: write "
                '"zero_optimization": {"offload_optimizer": ...}',
                "deepspeed_config.zero_optimization.stage is 9",
                "deepspeed_config.zero_optimization.offload_param.device is one key: write",
            ],
        ),
        (
            {"offload_optimizer": {"device": "cpu"}, "stage": 0, "aio": {"thread_count": "two"}},
            [
                "deepspeed_config.offload_optimizer is unknown here: it belongs to",
                "deepspeed_config.stage is unknown here: it belongs to",
                'deepspeed_config.aio.thread_count is unknown: it is "intra_op_parallelism" today',
                'deepspeed_config.aio.intra_op_parallelism is "two"',
                'deepspeed_config.zero_optimization.offload_optimizer.device is "cpu", but',
            ],
        ),
    ],
)
def test_a_name_or_a_section_that_is_refused_hides_nothing(
    config: Config, starts: List[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        preflight.check(pasted(config))
    lines = str(error.value).splitlines()
    assert len(lines) == len(starts), str(error.value)
    for line, start in zip(lines, starts):
        assert line.startswith(start), (start, line)


@pytest.mark.parametrize(
    "key, value, place",
    [
        ("gradient_clipping", 1.0, "write 'grad_norm'"),
        ("batch_size", 8, "it belongs to 'data_loader'"),
        ("bf16", {"enabled": True}, "write 'deepspeed_config.bf16'"),
        ("stage", 3, "write 'deepspeed_config.zero_optimization.stage'"),
        ("offload_optimizer", {}, "write 'deepspeed_config.zero_optimization.offload_optimizer'"),
        ("distributed", True, "at the top level of the config"),
        ("distributed", {"cuda_devices": [0, 1]}, "at the top level of the config"),
    ],
    ids=str,
)
def test_a_key_in_the_trainer_that_belongs_elsewhere_is_sent_there(
    key: str, value: Any, place: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        preflight.check(pasted({}, (f"trainer.{key}", value)))
    assert f"'trainer.{key}' is " in error.value.message and place in error.value.message
