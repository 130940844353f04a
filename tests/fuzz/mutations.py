"""
Changes of a config as people make them by mistake.
"""

import random
from copy import deepcopy
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

Config = Dict[str, Any]
_Keys = Tuple[Any, ...]


class Mutation(NamedTuple):
    """
    # Parameters

    kind : `str`
        One of `KINDS`.
    what : `str`
        In words, with the keys.
    config : `Dict[str, Any]`
        As it is then.
    """

    kind: str
    what: str
    config: Config


def mutate(config: Config, seed: int) -> Mutation:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        It is not changed.
    seed : `int`, required.
        The same makes the same of the same config.
    """
    generator = random.Random(seed)
    kind = generator.choice(list(KINDS))
    config = deepcopy(config)
    what = KINDS[kind](config, generator)
    return Mutation(kind, what, config)


def _drop(config: Config, generator: random.Random) -> str:
    keys = _any_key(config, generator)
    del _section(config, keys)[keys[-1]]
    return f"{_dotted(keys)} dropped"


def _rename(config: Config, generator: random.Random) -> str:
    keys = _any_key(config, generator)
    section = _section(config, keys)
    name = _misspelt(keys[-1], generator)
    section[name] = section.pop(keys[-1])
    return f"{_dotted(keys)} renamed to {name!r}"


def _misspelt(name: str, generator: random.Random) -> str:
    i = generator.randrange(max(1, len(name) - 1))
    return generator.choice(
        [
            name[:i] + name[i + 1 :] or "x",
            name[:i] + name[i : i + 1] + name[i:],
            name[:i] + name[i + 1 : i + 2] + name[i : i + 1] + name[i + 2 :] + "_",
            name.upper(),
            name.replace("_", "-") + ("s" if "_" not in name else ""),
        ]
    )


def _retype(config: Config, generator: random.Random) -> str:
    keys = _any_key(config, generator)
    section = _section(config, keys)
    value = section[keys[-1]]
    others: List[Any] = [None, "text", str(value), [value], {"value": value}, True, 3, 0.5, [], {}]
    section[keys[-1]] = generator.choice([each for each in others if each != value])
    return f"{_dotted(keys)} is {section[keys[-1]]!r}"


def _out_of_range(config: Config, generator: random.Random) -> str:
    numbers = [keys for keys, value in _leaves(config) if _is_number(value)]
    keys = generator.choice(numbers)
    section = _section(config, keys)
    section[keys[-1]] = generator.choice([-1, 0, -0.5, 1.5, 2**70, 1e30, -(10**9)])
    return f"{_dotted(keys)} is {section[keys[-1]]!r}"


def _misname(config: Config, generator: random.Random) -> str:
    """Of what a string names: a class, a file, a choice."""
    strings = [keys for keys, value in _leaves(config) if isinstance(value, str)]
    keys = generator.choice(strings)
    section = _section(config, keys)
    section[keys[-1]] = generator.choice(
        [_misspelt(section[keys[-1]], generator), "", "none", "allennlp.nothing.Here"]
    )
    return f"{_dotted(keys)} is {section[keys[-1]]!r}"


def _nest(config: Config, generator: random.Random) -> str:
    keys = _any_key(config, generator)
    value = _section(config, keys).pop(keys[-1])
    sections = [keys_ for keys_, value_ in _sections(config)]
    where = generator.choice(sections)
    section = config
    for key in where:
        section = section[key]
    section[keys[-1]] = value
    return f"{_dotted(keys)} moved into {_dotted(where) or 'the top level'}"


def _dot(config: Config, generator: random.Random) -> str:
    keys = generator.choice([keys for keys in _keys(config) if len(keys) > 1])
    value = _section(config, keys).pop(keys[-1])
    _section(config, keys[:-1])[f"{keys[-2]}.{keys[-1]}"] = value
    return f"{_dotted(keys)} written as one key"


def _contradict(config: Config, generator: random.Random) -> str:
    path, value = generator.choice(_CONTRADICTIONS)
    section: Any = config
    *sections, key = path.split(".")
    for name in sections:
        if not isinstance(section.get(name), dict):
            section[name] = {} if name not in section else {"type": section[name]}
        section = section[name]
    section[key] = deepcopy(value)
    return f"{path} is {value!r}"


_DS = "trainer.deepspeed_config"

_CONTRADICTIONS: List[Tuple[str, Any]] = [
    (f"{_DS}.gradient_accumulation_steps", 3),
    (f"{_DS}.train_micro_batch_size_per_gpu", 5),
    (f"{_DS}.train_batch_size", 7),
    (f"{_DS}.gradient_clipping", 0.1),
    (f"{_DS}.fp16", {"enabled": True}),
    (f"{_DS}.bf16", {"enabled": True}),
    (f"{_DS}.bf16.enabled", "true"),
    (f"{_DS}.torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
    (f"{_DS}.optimizer", {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}),
    (f"{_DS}.optimizer", {"type": "OneBitAdam", "params": {"lr": "auto"}}),
    (f"{_DS}.optimizer", {"type": "Lamb", "params": {"lr": -1}}),
    (f"{_DS}.optimizer", {"type": "AdamW", "params": {"lr": 0.1, "betas": 0.9}}),
    (f"{_DS}.scheduler", {"type": "StepLR"}),
    (f"{_DS}.scheduler", {"type": "CosineAnnealingLR", "params": {"T_max": "10"}}),
    (f"{_DS}.scheduler", {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}),
    (f"{_DS}.zero_optimization.stage", 0),
    (f"{_DS}.zero_optimization.stage", 1),
    (f"{_DS}.zero_optimization.stage", 3),
    (f"{_DS}.zero_optimization.offload_param", {"device": "cpu"}),
    (f"{_DS}.zero_optimization.offload_optimizer", {"device": "cpu"}),
    (f"{_DS}.zero_optimization.offload_optimizer", {"device": "cpu", "ratio": 0.3}),
    (f"{_DS}.zero_optimization.zero_hpz_partition_size", 2),
    (f"{_DS}.zero_optimization.leaf_module", {"names": ["here"]}),
    (f"{_DS}.zero_optimization.cpu_offload", True),
    (f"{_DS}.activation_checkpointing", {"partition_activations": True}),
    (f"{_DS}.amp", {"enabled": True}),
    (f"{_DS}.elasticity", {"enabled": False}),
    (f"{_DS}.sparse_attention", {"mode": "fixed"}),
    (f"{_DS}.data_types", {"grad_accum_dtype": "bf16"}),
    (f"{_DS}.tensorboard", {"enabled": True}),
    (f"{_DS}.wandb", {"enabled": True}),
    (f"{_DS}.communication_data_type", "fp16"),
    (f"{_DS}.num_epochs", 3),
    ("trainer.use_amp", True),
    ("trainer.grad_norm", True),
    ("trainer.grad_norm", -1.0),
    ("trainer.grad_clipping", 0),
    ("trainer.gradient_synchronization", "micro_batch"),
    ("trainer.grad_cache", {"chunk_size": 2}),
    ("trainer.reshard_after_micro_batch", False),
    ("trainer.sequence_parallel_size", 2),
    ("trainer.sequence_tiling", {"modules": ["("], "num_tiles": 2}),
    ("trainer.activation_checkpointing", ["nothing"]),
    ("trainer.torch_compile", {"mode": "fast"}),
    ("trainer.cuda_device", 0),
    ("trainer.cuda_device", "cpu"),
    ("trainer.no_grad", ["["]),
    ("trainer.no_grad", [".*"]),
    ("trainer.patience", 0),
    ("trainer.validation_metric", "accuracy"),
    ("trainer.validation_metric", "+nothing"),
    ("trainer.optimizer", {"type": "adam", "lr": -1}),
    ("trainer.optimizer", {"type": "adam", "betas": [2, 0.9]}),
    ("trainer.optimizer", {"type": "sgd", "lr": 0.1, "nesterov": True}),
    ("trainer.optimizer", {"type": "huggingface_adafactor", "lr": 0.1}),
    ("trainer.optimizer", {"type": "fused_adam"}),
    ("trainer.optimizer", {"type": "onebit_adam"}),
    ("trainer.learning_rate_scheduler", {"type": "step", "step_size": 0}),
    ("trainer.learning_rate_scheduler", {"type": "linear_with_warmup"}),
    ("trainer.learning_rate_scheduler", {"type": "slanted_triangular", "cut_frac": 2}),
    ("trainer.learning_rate_scheduler", {"type": "slanted_triangular", "gradual_unfreezing": True}),
    ("trainer.learning_rate_scheduler", {"type": "reduce_on_plateau", "mode": "up"}),
    ("trainer.learning_rate_scheduler", {"type": "cosine", "t_initial": -1}),
    ("trainer.momentum_scheduler", {"type": "inverted_triangular", "cool_down": 1, "warm_up": 1}),
    ("trainer.moving_average", {"type": "exponential", "decay": 2}),
    ("trainer.checkpointer", {"type": "default"}),
    ("trainer.checkpointer", {"keep_most_recent_by_count": 0, "save_every_num_batches": 0}),
    ("trainer.callbacks", ["tensorboard"]),
    ("trainer.callbacks", ["wandb"]),
    ("trainer.callbacks", [{"type": "should_validate_callback", "validation_interval": 0}]),
    ("distributed.cuda_devices", [0, 1]),
    ("distributed.cuda_devices", [-1]),
    ("distributed.cuda_devices", [-1, 0]),
    ("distributed.num_nodes", 2),
    ("distributed.num_nodes", 0),
    ("distributed.timeout", "never"),
    ("distributed.primary_port", 10**6),
    ("distributed.ddp_accelerator", {"type": "fairscale_fsdp"}),
    ("distributed.ddp_accelerator", {"type": "torch", "find_unused_parameters": "yes"}),
    ("evaluate_on_test", True),
    ("data_loader", {"batch_size": 0}),
    ("data_loader", {"batch_size": 4, "batches_per_epoch": 0}),
    ("data_loader", {"batch_size": 4, "drop_last": True, "batch_sampler": {"type": "bucket"}}),
    ("data_loader", {"batch_sampler": {"type": "bucket", "batch_size": -3}}),
    ("data_loader", {"batch_size": 4, "num_workers": -1}),
    ("data_loader", {"batch_size": 4, "max_instances_in_memory": 2}),
    ("vocabulary", {"type": "from_files", "directory": "nowhere"}),
    ("vocabulary", {"max_vocab_size": -1}),
    ("vocabulary", {"min_count": 3}),
    ("datasets_for_vocab_creation", ["training"]),
    ("type", "deepspeed"),
    ("random_seed", 0.5),
    ("pytorch_seed", 2**70),
    ("include_in_archive", "notes.txt"),
]

KINDS: Dict[str, Callable[[Config, random.Random], str]] = {
    "dropped": _drop,
    "renamed": _rename,
    "retyped": _retype,
    "out of range": _out_of_range,
    "misnamed": _misname,
    "wrongly nested": _nest,
    "written as one key": _dot,
    "contradictory": _contradict,
}


def _any_key(config: Config, generator: random.Random) -> _Keys:
    """Of each section as often as of another, for most keys are in few of them."""
    sections = [(keys, value) for keys, value in _sections(config) if value]
    keys, section = generator.choice(sections)
    return (*keys, generator.choice(sorted(section)))


def _sections(value: Any, keys: _Keys = ()) -> List[Tuple[_Keys, Config]]:
    found = [(keys, value)]
    for key, inner in value.items():
        if isinstance(inner, dict):
            found.extend(_sections(inner, (*keys, key)))
    return found


def _keys(config: Config) -> List[_Keys]:
    return [(*keys, key) for keys, section in _sections(config) for key in section]


def _leaves(config: Config) -> List[Tuple[_Keys, Any]]:
    return [
        ((*keys, key), value)
        for keys, section in _sections(config)
        for key, value in section.items()
        if not isinstance(value, dict)
    ]


def _section(config: Config, keys: _Keys) -> Any:
    section: Any = config
    for key in keys[:-1]:
        section = section[key]
    return section


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dotted(keys: _Keys) -> str:
    return ".".join(map(str, keys))
