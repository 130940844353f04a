"""
Combinations of features, drawn at random from a seed.
"""

import functools
from dataclasses import asdict, dataclass, field
from math import ceil
from random import Random
from typing import Any, Dict, List, Optional

import torch

Config = Dict[str, Any]

SEED = 0
BATCH_SIZE = 4

# What models are made of besides layers that all have.
PARTS = (
    "batch_norm",
    "channels_last",
    "empty",
    "frozen",
    "lstm",
    "max_norm",
    "scalar",
    "tied",
    "transposed",
)

# Large steps, so that a wrong gradient shows. Epsilons are large as well: with small ones, a
# gradient that is nothing but rounding makes a whole step.
OPTIMIZERS: Dict[str, Config] = {
    "sgd": {"type": "sgd", "lr": 0.2},
    "sgd_momentum": {"type": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.05},
    "adam": {"type": "adam", "lr": 0.02, "eps": 1e-3},
    "adamw_groups": {
        "type": "adamw",
        "lr": 0.02,
        "eps": 1e-3,
        "weight_decay": 0.1,
        "parameter_groups": [[["bias$"], {"weight_decay": 0.0, "lr": 0.05}]],
    },
    "adagrad": {"type": "adagrad", "lr": 0.05, "eps": 1e-3},
    "rmsprop": {"type": "rmsprop", "lr": 0.01, "eps": 1e-2},
}

# Which heads a micro-batch uses.
HEADS = {
    "one": "one head, always used",
    "never": "two heads, one of them never used",
    "some_steps": "two heads, one of them unused in every other step",
    "not_last": "two heads, one of them unused in the last micro-batch of each step",
    "in_turn": "three heads, one in each step",
    "by_micro_batch": "two heads, one in each micro-batch",
    "by_worker": "two heads, each used by one of two workers",
}


@dataclass
class Case:
    """One combination of features. The defaults are those that are left out of its description."""

    index: int
    stage: int
    precision: str = "fp32"
    optimizer: str = "sgd"
    workers: int = 1
    accumulation: int = 1
    synchronization: str = "auto"
    clipping: Optional[str] = None
    offload: Optional[str] = None
    heads: str = "one"
    parts: List[str] = field(default_factory=list)
    dropout: float = 0.0
    regularizer: bool = False
    scheduler: Optional[str] = None
    moving_average: bool = False
    activation_checkpointing: bool = False
    contrastive: bool = False
    chunk_size: Optional[int] = None
    uneven: Optional[str] = None
    overlap_comm: Optional[bool] = None
    small_buckets: bool = False
    find_unused_parameters: bool = False
    loss_scale_power: int = 8
    validation: bool = False
    num_batches: int = 5
    num_epochs: int = 2
    interrupted_after: Optional[List[int]] = None
    save_every_num_batches: Optional[int] = None
    entry: str = "from_params"
    stage_after_interruption: Optional[int] = None

    def __str__(self) -> str:
        values = asdict(self)
        defaults = asdict(Case(index=-1, stage=-1))
        return ", ".join(f"{k}={v}" for k, v in values.items() if v != defaults[k])

    @property
    def seed(self) -> int:
        return 1000 + 10 * self.index

    def trainer(self) -> Config:
        """The section `trainer` of a config file."""
        config: Config = {
            "type": "deepspeed",
            "deepspeed_config": self.deepspeed_config(),
            "optimizer": OPTIMIZERS[self.optimizer],
            "num_epochs": self.num_epochs,
            "cuda_device": -1,
            "num_gradient_accumulation_steps": self.accumulation,
            "enable_default_callbacks": False,
            "run_confidence_checks": False,
            "callbacks": [
                {"type": "cross", "seed": self.seed, "interrupted_after": self.interrupted_after}
            ],
        }
        if self.workers > 1 or self.entry == "command":
            del config["cuda_device"]
        if self.synchronization != "auto":
            config["gradient_synchronization"] = self.synchronization
        if self.clipping is not None:
            config.update(CLIPPING[self.clipping])
        if self.scheduler is not None:
            config["learning_rate_scheduler"] = SCHEDULERS[self.scheduler]
        if self.moving_average:
            config["moving_average"] = MOVING_AVERAGE
        if self.activation_checkpointing:
            config["activation_checkpointing"] = ["body.encoder"]
        if self.chunk_size is not None:
            config["grad_cache"] = {"chunk_size": self.chunk_size}
        if self.interrupted_after is None:
            config["checkpointer"] = None
        elif self.save_every_num_batches is not None:
            config["checkpointer"] = {"save_every_num_batches": self.save_every_num_batches}
        return config

    def deepspeed_config(self) -> Config:
        zero: Config = {"stage": self.stage}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        if self.small_buckets:
            zero.update(reduce_bucket_size=40, allgather_bucket_size=40)
            if self.stage == 3:
                zero.update(
                    stage3_prefetch_bucket_size=0,
                    stage3_max_live_parameters=0,
                    stage3_max_reuse_distance=0,
                )
        if self.overlap_comm is not None:
            zero["overlap_comm"] = self.overlap_comm
        if self.offload is not None:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "parameters":
            zero["offload_param"] = {"device": "cpu"}
        config: Config = {"zero_optimization": zero}
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        elif self.precision == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": self.loss_scale_power}
        elif self.precision == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        if self.precision in ("bf16", "fp16") and "batch_norm" in self.parts:
            # PyTorch has no batch normalization with weights in half precision and fp32 buffers,
            # which DeepSpeed leaves as they are.
            config["data_types"] = {"buffer_dtype": self.precision}
        return config

    def model(self) -> Config:
        """The section `model` of a config file."""
        config: Config = {
            "type": "cross_contrastive" if self.contrastive else "cross",
            "seed": self.seed,
            "parts": self.parts,
            "dropout": self.dropout,
        }
        if not self.contrastive:
            config["num_heads"] = self.num_heads
        if self.regularizer:
            config["regularizer"] = {"regexes": [["weight", {"type": "l2", "alpha": 0.01}]]}
        return config

    @property
    def num_heads(self) -> int:
        return {"one": 1, "in_turn": 3}.get(self.heads, 2)

    def num_batches_of(self, rank: int) -> int:
        """Micro-batches in an epoch."""
        return self.num_batches - (self.uneven == f"fewer_{rank}")

    @property
    def num_steps(self) -> int:
        """Optimizer steps in an epoch."""
        return ceil(min(map(self.num_batches_of, range(self.workers))) / self.accumulation)

    def heads_of(self, rank: int, batch: int) -> List[int]:
        """Which heads the micro-batch of that number in the epoch uses, as 0 and 1."""
        step = batch // self.accumulation
        is_last = (batch + 1) % self.accumulation == 0
        return {
            "one": [1],
            "never": [1, 0],
            "some_steps": [1, step % 2],
            "not_last": [1, int(not is_last)],
            "in_turn": [int(step % 3 == head) for head in range(3)],
            "by_micro_batch": [int(batch % 2 == head) for head in range(2)],
            "by_worker": [int(rank == head) for head in range(2)],
        }[self.heads]


CLIPPING: Dict[str, Config] = {
    "norm": {"grad_norm": 0.3},
    "value": {"grad_clipping": 0.05},
    "both": {"grad_norm": 0.5, "grad_clipping": 0.05},
    "reported": {"grad_norm": True},
}
SCHEDULERS: Dict[str, Config] = {
    "slanted_triangular": {"type": "slanted_triangular", "cut_frac": 0.3, "ratio": 4},
    "linear_with_warmup": {"type": "linear_with_warmup", "warmup_steps": 2},
}
MOVING_AVERAGE: Config = {"type": "exponential", "decay": 0.8}


def chosen() -> List[Case]:
    """What the first draws leave out of what docs/exactness.md says. Numbered from 1000 on."""
    two: Config = {"workers": 2}
    everything: Config = {
        "optimizer": "adamw_groups",
        "accumulation": 2,
        "clipping": "both",
        "dropout": 0.3,
        "regularizer": True,
        "scheduler": "linear_with_warmup",
        "moving_average": True,
        "activation_checkpointing": True,
        "uneven": "fewer_0",
        "validation": True,
        **two,
    }
    in_some_micro_batches: Config = {
        "heads": "not_last",
        "accumulation": 3,
        "synchronization": "micro_batch",
        "clipping": "norm",
        **two,
    }
    layouts = ["channels_last", "scalar", "transposed"]
    cached_in_fp16: Config = {
        "precision": "fp16",
        "loss_scale_power": 12,
        "contrastive": True,
        "parts": ["scalar"],
    }
    by_worker: Config = {"heads": "by_worker", "find_unused_parameters": True, **two}
    stages_and_settings: List[Any] = [
        *(
            (stage, {"contrastive": True, "chunk_size": 2, "parts": ["batch_norm"]})
            for stage in range(4)
        ),
        *((stage, {"parts": ["max_norm", "tied"], **two}) for stage in range(4)),
        *((stage, {"optimizer": "adam", "heads": "in_turn", **two}) for stage in range(4)),
        *((stage, {"heads": "by_worker", **two}) for stage in (0, 1)),
        *((stage, {"synchronization": "micro_batch", "accumulation": 2}) for stage in (0, 1)),
        (0, {"offload": "optimizer"}),
        (1, {"offload": "optimizer", "optimizer": "adam", "heads": "in_turn", **two}),
        (0, {"parts": ["lstm"], **two}),
        (1, everything),
        (2, everything),
        (1, {"optimizer": "rmsprop", "parts": [*layouts, "empty"], **two}),
        (1, {"optimizer": "adagrad", "contrastive": True, "chunk_size": 2, **two}),
        *(
            (stage, {"offload": "optimizer", "optimizer": "adam", "heads": "in_turn", **two})
            for stage in (2, 3)
        ),
        *((stage, {"offload": "optimizer", **in_some_micro_batches}) for stage in (2, 3)),
        *(
            (stage, {"optimizer": "rmsprop", "parts": [*layouts, *empty], **two})
            for stage, empty in ((0, ["empty"]), (2, ["empty"]), (3, []))
        ),
        *(
            (stage, {**in_some_micro_batches, "synchronization": mode, "overlap_comm": True})
            for stage, mode in ((2, "step"), (2, "micro_batch"), (3, "step"))
        ),
        (0, everything),
        (3, everything),
        (3, {"precision": "bf16", "entry": "command", **two}),
        *((stage, {"precision": "fp16", "clipping": "norm", **two}) for stage in range(4)),
        *(
            (stage, {**cached_in_fp16, "chunk_size": size})
            for stage, size in ((0, 3), (2, 4), (3, 1))
        ),
        *(
            (2, {**by_worker, "accumulation": 3, "synchronization": mode})
            for mode in ("step", "micro_batch")
        ),
        (3, by_worker),
        *(
            (stage, {"precision": precision, "optimizer": "adagrad"})
            for stage, precision in ((0, "bf16"), (1, "fp16"), (2, "bf16"), (3, "fp16"))
        ),
    ]
    return [
        Case(1000 + i, stage, **settings) for i, (stage, settings) in enumerate(stages_and_settings)
    ]


def case_of(index: int, seed: int = SEED) -> Case:
    """The one of that number, which is drawn, or chosen from 1000 on."""
    return chosen()[index - 1000] if index >= 1000 else draw(index, seed)


@functools.cache
def _has_lstm_under_autocast() -> bool:
    """Returns whether PyTorch has it on this processor. In bf16 oneDNN's needs AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(2, 2)(torch.ones(1, 1, 2))
    except RuntimeError:
        return False
    return True


def draw(index: int, seed: int = SEED) -> Case:
    """The case of that number, the same each time."""
    random = Random(f"{seed}: {index}")

    def sometimes(probability: float, *values: Any, otherwise: Any = None) -> Any:
        return random.choice(values) if random.random() < probability else otherwise

    stage = index % 4  # as often as one another
    case = Case(
        index,
        stage,
        precision=random.choice(["fp32", "fp32", "fp32", "bf16", "fp16", "autocast"]),
        optimizer=random.choice(["sgd", "sgd", "sgd_momentum", *OPTIMIZERS]),
        workers=random.choice([1, 2, 2]),
        accumulation=random.choice([1, 2, 3]),
        synchronization=sometimes(0.5, "step", "micro_batch", "step", otherwise="auto"),
        clipping=sometimes(0.5, *CLIPPING),
        offload=sometimes(0.3, "optimizer", "optimizer", "parameters"),
        heads=sometimes(0.5, *list(HEADS)[1:], otherwise="one"),
        parts=sorted(random.sample(PARTS, random.choice([0, 1, 1, 2, 2, 3]))),
        dropout=sometimes(0.3, 0.3, otherwise=0.0),
        regularizer=sometimes(0.1, True, otherwise=False),
        scheduler=sometimes(0.3, *SCHEDULERS),
        moving_average=sometimes(0.2, True, otherwise=False),
        activation_checkpointing=sometimes(0.2, True, otherwise=False),
        contrastive=sometimes(0.2, True, otherwise=False),
        chunk_size=sometimes(0.8, 1, 2, 3),
        uneven=sometimes(0.4, "fewer_0", "fewer_1", "smaller"),
        overlap_comm=sometimes(0.4, True, False),
        small_buckets=sometimes(0.4, True, otherwise=False),
        find_unused_parameters=sometimes(0.15, True, otherwise=False),
        loss_scale_power=random.choice([4, 8, 12]),
        validation=sometimes(0.3, True, otherwise=False),
        num_batches=random.choice([4, 5, 6, 7]),
        interrupted_after=sometimes(0.25, [0, 2], [1, 1], [1, 2]),
        save_every_num_batches=sometimes(0.6, 1, 2),
        entry=sometimes(0.05, "command", otherwise="from_params"),
    )
    case = _made_possible(case, is_contradictory=random.random() < 0.1)
    if case.interrupted_after is not None and _is_the_same_at_every_stage(case):
        others = [other for other in range(4) if other != stage]
        case.stage_after_interruption = sometimes(0.7, *others)
    return case


def _is_the_same_at_every_stage(case: Case) -> bool:
    """Whether other stages train the same, and refuse nothing of it."""
    is_plain = case.precision == "fp32" and case.offload is None and case.heads == "one"
    is_everywhere = {"empty", "max_norm"}.isdisjoint(case.parts)
    is_within = case.synchronization != "micro_batch" and not case.find_unused_parameters
    is_within = is_within and case.entry == "from_params"
    return is_plain and is_everywhere and is_within


def _made_possible(case: Case, is_contradictory: bool) -> Case:
    """Takes away what has no meaning in its combination with the rest."""
    if case.contrastive:
        case.heads = "one"
        case.parts = [part for part in case.parts if part != "tied"]
        if case.uneven in ("fewer_0", "fewer_1"):
            case.uneven = "smaller"
    else:
        case.chunk_size = None
    if case.workers == 1:
        case.uneven = None
        if case.heads == "by_worker":
            case.heads = "by_micro_batch"
        case.find_unused_parameters = False
    if case.heads == "by_worker":
        case.find_unused_parameters = True
    if case.heads == "not_last" and case.accumulation == 1:
        case.accumulation = 2
    if "batch_norm" in case.parts and case.uneven == "smaller":
        case.uneven = None  # the norm of two examples is a step
    if case.precision == "bf16":
        # The norm of few examples makes too much of what bf16 rounds.
        case.parts = [part for part in case.parts if part != "batch_norm"]
    if case.precision == "autocast" and not _has_lstm_under_autocast():
        case.parts = [part for part in case.parts if part != "lstm"]
    # What is refused anyway is left in some cases.
    if not is_contradictory:
        if case.stage < 2 and case.synchronization == "micro_batch":
            case.synchronization = "step"
        if case.stage == 0:
            case.offload = None
        elif case.stage < 3 and case.offload == "parameters":
            case.offload = "optimizer"
        if case.stage == 3:
            case.find_unused_parameters = False
            if case.heads == "by_worker":
                case.heads = "by_micro_batch"
        if case.chunk_size is not None:
            case.parts = [part for part in case.parts if part != "batch_norm"]
        if case.stage == 3:
            case.parts = [part for part in case.parts if part != "empty"]
        if case.optimizer == "adagrad" and case.precision in ("bf16", "fp16"):
            case.optimizer = "adam"
        if case.stage > 0 or case.precision in ("bf16", "fp16"):
            case.parts = [part for part in case.parts if part != "max_norm"]
    if case.precision != "fp16":
        case.loss_scale_power = Case.loss_scale_power
    if case.interrupted_after is not None:
        epoch, step = case.interrupted_after
        case.interrupted_after = [epoch, min(step, case.num_steps)]
    else:
        case.save_every_num_batches = None
    return case
