"""
What is changed, shared, frozen, replaced or read outside the optimizer: one table of changes, with
the ZeRO stages and numbers of workers. Each is kept, as with `gradient_descent`, or is refused.
"""

import copy
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from allennlp.common import Lazy, Params
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules import Embedding
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.moving_average import ExponentialMovingAverage
from torch import nn
from torch.nn.utils import parametrizations

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.engine.process.process_environment import process_environment
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import CPU, Batches, Side, state_arrays
from tests.support.workers import run_workers

# An odd number of elements, so that shards are padded.
DIM, NUM_TOKENS = 5, 17

SHARDED = "1-1 1-2 2-1 3-1 3-2"  # ZeRO stages, each with a number of workers

BF16 = {"deepspeed_config": {"bf16": {"enabled": True}}}
AUTOCAST = {"deepspeed_config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}
# What stage 3 has released can't be changed in the first place.
PERSISTENT = {"zero": {"stage3_param_persistence_threshold": 100}}
PARTITIONED = {"is_constructed_partitioned": True}


class Expected(NamedTuple):
    """
    # Parameters

    how : `str`
        `"kept"`, `"refused"` when the trainer is constructed, or `"ended"` while it trains.
    names : `Tuple[str, ...]`
        What the message quotes.
    """

    how: str
    names: Tuple[str, ...] = ()


KEPT = Expected("kept")


def refused(*names: str) -> Expected:
    return Expected("refused", names)


def ended(*names: str) -> Expected:
    return Expected("ended", names)


class Layers(Model):
    """A regression with a frozen teacher. The changes add to it, and give it a penalty."""

    def __init__(self, *changes: Callable[["Layers"], None]) -> None:
        super().__init__(Vocabulary())
        self.encoder, self.decoder = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.teacher = nn.Linear(DIM, DIM).requires_grad_(False)
        self.penalty: Callable[[Layers, torch.Tensor], Any] = lambda model, x: None
        for change in changes:
            change(self)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        output = self.decoder(self.encoder(x).tanh())
        loss = (output - self.teacher(x) - 1).pow(2).mean()
        penalty = self.penalty(self, x)
        return {"loss": loss + penalty if isinstance(penalty, torch.Tensor) else loss}


def of(*changes: Callable[[Any], None]) -> Callable[[], Model]:
    return lambda: Layers(*changes)


def in_forward(function: Callable[[Any, torch.Tensor], Any]) -> Callable[[Layers], None]:
    return lambda model: setattr(model, "penalty", function)


def vectors(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(3, DIM, generator=generator)} for _ in range(4)]


def same_vectors(rank: int) -> List[Dict[str, Any]]:
    """Two workers with them train as one process does."""
    return vectors(0)


VALIDATION = {"validation_data_loader": Batches(vectors(7))}


class Call(TrainerCallback):
    """
    Changes something of the trainer.

    # Parameters

    when : `str`
        `"start"`, `"batch"` or `"epoch"`.
    change : `Callable[[Any], Any]`
    steps : `Iterable[int]`, optional (default = all)
        Counted from 1.
    on_rank : `int`, optional (default = all)
    """

    def __init__(
        self,
        when: str,
        change: Callable[[Any], Any],
        steps: Optional[Iterable[int]] = None,
        on_rank: Optional[int] = None,
    ) -> None:
        super().__init__("")
        self._when, self._change, self._steps, self._on_rank = when, change, steps, on_rank
        self._num_steps = 0

    def call(self, trainer: Any, when: str) -> None:
        is_step = when in ("batch", "backward")
        self._num_steps += is_step
        is_due = when == self._when and (
            not is_step or self._steps is None or self._num_steps in self._steps
        )
        if is_due and self._on_rank in (None, dist.get_rank() if dist.is_initialized() else 0):
            with torch.no_grad():
                self._change(trainer)

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.call(trainer, "start")

    def on_batch(self, trainer: Any, *args: Any, is_training: bool, **kwargs: Any) -> None:
        if is_training:
            self.call(trainer, "batch")

    def on_epoch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.call(trainer, "epoch")


class InBackward(Call):
    """Between the passes of a step, where callbacks may run backward themselves."""

    def on_backward(self, trainer: Any, *args: Any, **kwargs: Any) -> bool:
        self.call(trainer, "backward")
        return False

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        pass


def calls(*arguments: Any, kind: Any = Call, **more: Any) -> Dict[str, Any]:
    return {"callbacks": lambda: [kind(*arguments, **more)]}


def model(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda trainer: change(trainer.model)


def on_batch(change: Callable[[Any], Any], step: int, on_rank: Any = None) -> Dict[str, Any]:
    return calls("batch", model(change), {step}, on_rank)


def in_backward(change: Callable[[Any], Any], step: int) -> Dict[str, Any]:
    return calls("backward", model(change), {step}, kind=InBackward)


def modified(change: Callable[[Any], Any], which: Any = None) -> Callable[[Any], Any]:
    def act(trainer: Any) -> None:
        is_ours = isinstance(trainer, DeepSpeedTrainer)
        with trainer.modified_weights(which) if is_ours else nullcontext():
            change(trainer.model)

    return act


# Weights


def follow(model: Any) -> None:
    """Clamps and scales some weights, and moves the frozen ones."""
    model.encoder.weight.clamp_(-0.2, 0.2)
    model.decoder.bias.data.mul_(0.9)
    for target, online in zip(model.teacher.parameters(), model.decoder.parameters()):
        target.mul_(0.7).add_(online, alpha=0.3)


def clamp(model: Any) -> None:
    model.encoder.weight.clamp_(-0.1, 0.1)


def clamp_data(model: Any) -> None:
    """PyTorch doesn't count it."""
    model.encoder.weight.data.clamp_(-0.1, 0.1)


def zero_teacher(model: Any) -> None:
    model.teacher.weight.zero_()


def clamp_gathered(model: Any) -> None:
    weight = model.encoder.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.clamp_(-0.1, 0.1)


def of_groups(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def act(trainer: Any) -> None:
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                change(parameter)

    return act


def halve(parameter: torch.Tensor) -> None:
    parameter.mul_(0.5)


def halve_data(parameter: Any) -> None:
    parameter.data *= 0.5


class ChangingTrainer(DeepSpeedTrainer):
    """Changes weights before one step."""

    def batch_outputs(self, batch: Any, for_training: bool) -> Any:
        if self.steps_completed == 2:
            clamp_data(self.model)
        return super().batch_outputs(batch, for_training)


def scaled(clamp: Callable[[Any], torch.Tensor]) -> Callable[[], Model]:
    """Clamps its scale in each forward pass, as CLIP does."""

    def add(model: Any) -> None:
        model.scale = nn.Parameter(torch.tensor(2.0))
        model.penalty = lambda model, x: (model.encoder(x) * clamp(model.scale)).square().mean()

    return of(add)


def clamp_scale(scale: Any) -> torch.Tensor:
    scale.data.clamp_(max=1.0)
    return scale


def average(model: Model) -> ExponentialMovingAverage:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ExponentialMovingAverage(trained, 0.6)


def average_of(which: slice) -> Callable[[Model], ExponentialMovingAverage]:
    return lambda model: ExponentialMovingAverage(list(model.named_parameters())[which], 0.6)


class HugeWeights(Layers):
    """Has finite weights with a 2-norm that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Parameter(torch.full((DIM,), 1e38))
        self.penalty = lambda model, x: (model.huge * 0).sum()


class OneWeight(Model):
    """Has a single parameter, of which ZeRO's flat buffer is a view."""

    def __init__(self, clamps_in_validation: bool = False) -> None:
        super().__init__(Vocabulary())
        self.weight = nn.Parameter(torch.ones(8, DIM))
        self._clamps = clamps_in_validation

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if self._clamps and not self.training:
            with torch.no_grad():
                clamp_weight(self)
        return {"loss": (x @ self.weight.t() - 1).square().mean()}


def clamp_weight(model: Any) -> None:
    model.weight.clamp_(-0.1, 0.1)


AVERAGED = {"moving_average": average, **VALIDATION}

# Embeddings with `max_norm`


class Tokens(Model):
    """Embeddings whose rows are to be short: one trained, one frozen, one with another norm."""

    def __init__(self, has_max_norm: bool = True) -> None:
        super().__init__(Vocabulary())
        lengths = [0.8, 0.7, 0.9] if has_max_norm else [None, None, None]
        self.embedding = Embedding(3, num_embeddings=NUM_TOKENS, max_norm=lengths[0])
        self.frozen = nn.Embedding(NUM_TOKENS, 3, max_norm=lengths[1])
        self.frozen.weight.requires_grad_(False)
        self.bag = nn.EmbeddingBag(NUM_TOKENS, 5, max_norm=lengths[2], norm_type=1.0)
        self.layer = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        embedded = (self.embedding(tokens) + self.frozen(tokens)).mean(dim=1)
        scores = self.layer(torch.cat([embedded, self.bag(tokens)], dim=1))
        return {"loss": (scores - 3).pow(2).mean()}


class ScaledInForward(Model):
    """Looks rows up as an embedding with `max_norm` does, without one."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.rows, self.layer = nn.Parameter(torch.ones(NUM_TOKENS, 3)), nn.Linear(3, 1)

    def forward(self, tokens: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        rows = nn.functional.embedding(tokens, self.rows, max_norm=0.5)
        return {"loss": (self.layer(rows) - 3).pow(2).mean()}


def token_batches(rank: int, seed: int = 0) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [{"tokens": torch.randint(0, NUM_TOKENS, (2, 3), generator=generator)} for _ in range(4)]


TOKENS: Dict[str, Any] = {
    "batches": token_batches,
    "validation_data_loader": Batches(token_batches(0, seed=1)),
}
ACCUMULATED = {**TOKENS, "num_gradient_accumulation_steps": 2}


# Frozen and unfrozen


def switch(trainable: Dict[int, bool], groups: bool = False) -> Dict[str, Any]:
    """Freezes and unfreezes the encoder's weight, or all, at the start, or after so many steps."""

    class Switch(TrainerCallback):
        num_steps = 0

        def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self.num_steps in trainable:
                change = lambda p: p.requires_grad_(trainable[self.num_steps])  # noqa: E731
                of_groups(change)(trainer) if groups else change(trainer.model.encoder.weight)

        def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.num_steps += 1
            self.on_start(trainer)

    return {"callbacks": lambda: [Switch("")]}


OFF, OFF_AND_ON, TWICE_OFF = {2: False}, {0: False, 3: True}, {1: False, 2: True, 5: False}
ON = {2: True}
SWITCHES = [("off", OFF), ("off and on", OFF_AND_ON), ("twice off", TWICE_OFF)]


def freeze(model: Any) -> None:
    model.encoder.weight.requires_grad_(False)


def sgd_of_trainable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.3)


def unfreezing(**schedule: Any) -> Dict[str, Any]:
    triangular = {"type": "slanted_triangular", "gradual_unfreezing": True, **schedule}
    if schedule.get("type") == "combined":
        triangular = {**schedule, "schedulers": [[1, {**triangular, "type": "slanted_triangular"}]]}
    return {"learning_rate_scheduler": Lazy(LearningRateScheduler, Params(triangular))}


# Other parameters than the engine has


def tie(trainer: Any) -> None:
    trainer.model.decoder.weight = trainer.model.encoder.weight


def replace(trainer: Any) -> None:
    trainer.model.decoder = nn.Linear(DIM, DIM)


def add_group(trainer: Any) -> None:
    trainer.model.third = nn.Linear(DIM, DIM)
    trainer.optimizer.add_param_group({"params": list(trainer.model.third.parameters())})


def construct_late(model: Any, x: torch.Tensor) -> Any:
    if not hasattr(model, "late"):
        model.late = nn.Linear(DIM, DIM)
    return model.late(x).pow(2).mean()


def replace_frozen(model: Any) -> None:
    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        mean = model.prototype.detach() * 0.9 + x.mean(dim=0) * 0.1
        model.prototype = nn.Parameter(mean, requires_grad=False)
        return (model.encoder(x) - model.prototype).square().mean()

    model.prototype = nn.Parameter(torch.ones(DIM), requires_grad=False)
    model.penalty = penalty


# Shared memory


def share_data(model: Any) -> None:
    model.decoder.weight.data = model.encoder.weight.data


def wrap_again(model: Any) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight)


def share_rows(model: Any) -> None:
    model.rows = nn.Parameter(model.encoder.weight[1:])
    model.penalty = lambda model, x: model.rows.sum()


def frozen_alias(model: Any) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight.data, requires_grad=False)


def buffer(model: Any) -> None:
    model.register_buffer("copied", model.encoder.weight.data.t())
    model.penalty = lambda model, x: (x @ model.copied).mean()


def one_parameter(model: Any) -> None:
    model.decoder.weight = model.encoder.weight


def split_columns(model: Any) -> None:
    left, right = torch.randn(DIM, 2 * DIM).chunk(2, dim=1)
    model.left, model.right = nn.Parameter(left), nn.Parameter(right)
    model.penalty = lambda model, x: (model.left - model.right).pow(2).sum()


def look_up(find: Callable[[Any], torch.Tensor]) -> Callable[[Any, torch.Tensor], Any]:
    """A penalty on what the model computes with an attribute."""
    return lambda model, x: (model.encoder(x) * find(model).float().sum()).sin().mean()


def as_data(model: Any) -> None:
    model.table = model.encoder.weight.data
    model.penalty = look_up(lambda model: model.table)


def in_a_child(model: Any) -> None:
    model.decoder.transposed = model.encoder.weight.t()[1:]
    model.penalty = look_up(lambda model: model.decoder.transposed)


def in_objects(model: Any) -> None:
    model.parts = SimpleNamespace(rows=[{"last": model.encoder.weight.detach()[-1]}])
    model.hidden = [nn.Linear(DIM, DIM)]
    model.hidden[0].weight.data = model.decoder.weight.data
    model.penalty = look_up(lambda model: model.parts.rows[0]["last"] + model.hidden[0].weight[0])


def as_array(model: Any) -> None:
    model.table = model.encoder.weight.detach().numpy()
    model.penalty = look_up(lambda model: torch.from_numpy(model.table))


def of_another_type(model: Any) -> None:
    model.table = model.encoder.weight.data.view(torch.int32)
    model.penalty = look_up(lambda model: model.table.view(torch.float32))


def in_the_first_pass(model: Any) -> None:
    def find(model: Any) -> torch.Tensor:
        if not hasattr(model, "table"):
            model.table = model.encoder.weight.data
        return model.table

    model.penalty = look_up(find)


def in_each_pass(model: Any) -> None:
    def find(model: Any) -> torch.Tensor:
        model.tables = [model.encoder.weight.t()]
        return model.tables[0]

    model.penalty = look_up(find)


def old_spectral_norm(model: Any) -> None:
    nn.utils.spectral_norm(model.decoder)


def spectral_norm(model: Any) -> None:
    parametrizations.spectral_norm(model.encoder)
    # From here each evaluation of the weight changes it. PyTorch begins where none does any more.
    nn.init.constant_(model.encoder.parametrizations.weight[0]._v, DIM**-0.5)


# Types of parameters


def doubles(model: Any) -> None:
    model.double()


def one_double(model: Any) -> None:
    model.double_scale = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    model.penalty = lambda model, x: (x.double() * model.double_scale).pow(2).mean().float()


def complex_phases(model: Any) -> None:
    model.phases = nn.Parameter(torch.ones(DIM, dtype=torch.complex64))
    model.penalty = lambda model, x: (x * model.phases).abs().mean()


FROZEN = {
    "float64": torch.linspace(0, 1, DIM, dtype=torch.float64),
    "complex64": torch.linspace(0, 1, DIM) * 1j,
    "int64": torch.arange(DIM) + 2**40,
    "uint8": torch.arange(DIM, dtype=torch.uint8),
    "bool": torch.arange(DIM) > 1,
}


def frozen_of_types(model: Any) -> None:
    model.frozen = nn.ParameterDict(
        {name: nn.Parameter(value.clone(), requires_grad=False) for name, value in FROZEN.items()}
    )
    model.precise = nn.Linear(DIM, DIM).double().requires_grad_(False)

    def penalty(model: Any, x: torch.Tensor) -> Any:
        scaled = [(x * value).abs().sum().float() for value in model.frozen.values()]
        scaled.append(model.precise(x.double()).abs().sum().float())
        return torch.stack(scaled).clamp(max=2).mean() * model.encoder.bias.sum().pow(2)

    model.penalty = penalty


def frozen_first(model: Any) -> None:
    model.indices = nn.Parameter(torch.arange(DIM), requires_grad=False)


def frozen_short(model: Any) -> None:
    model.decoder.indices = nn.Parameter(torch.arange(DIM, dtype=torch.int16), requires_grad=False)


def lazy_layer(model: Any) -> None:
    model.decoder = nn.LazyLinear(DIM)


def lazy_buffers(model: Any) -> None:
    model.normalization = nn.LazyBatchNorm1d(affine=False)


# Losses and gradients


def root_at_0(model: Any, x: torch.Tensor) -> Any:
    """Its value is 0, and its gradient 0 times infinity."""
    return (model.encoder.bias * 0).sqrt().sum() if x.sum() == 0 else None


def zeros_in_step_3(rank: int) -> List[Dict[str, Any]]:
    batches = vectors(rank)
    batches[2]["x"] *= rank
    return batches


def not_a_number(rank: int) -> List[Dict[str, Any]]:
    batches = vectors(rank)
    batches[2]["x"] *= float("nan") if rank == 0 else 1
    return batches


class Independent(Layers):
    """Has a loss without any parameter, or one that can't be gone backward from."""

    def __init__(self, has_graph: bool) -> None:
        super().__init__()
        self._has_graph = has_graph

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x)["loss"].detach().requires_grad_(self._has_graph)}


def inference(model: Any, x: torch.Tensor) -> Any:
    """Computes with its frozen layer in inference mode."""
    with torch.inference_mode():
        states = model.teacher(x)
    return (model.encoder(x) - states.clone()).square().mean()


class Mistaken(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + self.weight.sum() + inputs.new_ones(DIM + 1)


def mistaken(model: Any) -> None:
    model.encoder = Mistaken(DIM, DIM)


# Buffers


class KeepsAverages(Layers):
    """Reassigns a buffer in each forward pass, and makes another in one, on all ranks or on one."""

    mean: torch.Tensor

    def __init__(self, has_mean: bool = True, in_pass: int = 1, on_rank: int = -1) -> None:
        super().__init__()
        if has_mean:
            self.register_buffer("mean", torch.zeros(DIM))
            self.register_buffer("absent", None)
        self._num_passes, self._in_pass, self._on_rank = 0, in_pass, on_rank

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        has_mean = hasattr(self, "mean")
        loss = super().forward(x - self.mean if has_mean else x)["loss"]
        loss = loss * getattr(self, "scale", 1)
        if has_mean:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        self._num_passes += 1
        if self._num_passes == self._in_pass and self._on_rank in (-1, dist.get_rank()):
            self.register_buffer("scale", x.detach().abs().mean())
        return {"loss": loss}


def of_a_view(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Model]:
    """Its buffer is a part of a tensor, as after `resize_token_embeddings`, or repeats one."""

    def penalty(model: Any, x: torch.Tensor) -> Any:
        loss = (model.encoder(x) - model.part.mean()).pow(2).mean()
        model.part = view(x.detach() + 0)
        return loss

    def add(model: Any) -> None:
        model.register_buffer("part", view(torch.zeros(3, DIM)))
        model.penalty = penalty

    return of(add)


VIEWS: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column": lambda rows: rows[:, 1],
    "slice": lambda rows: rows[0, :3],
    "repeated": lambda rows: rows[0].expand(3, DIM),
    "repeated column": lambda rows: rows.T[:, :1].expand(DIM, DIM),
}


def repeated_on_rank_0(rows: torch.Tensor) -> torch.Tensor:
    repeated = rows[0].expand(3, DIM)
    return repeated if dist.get_rank() == 0 else repeated.clone().contiguous()


# Read where stage 3 has released it


def norm(model: Any, *_: Any) -> torch.Tensor:
    return sum(parameter.norm() for parameter in model.parameters())  # type: ignore[return-value]


def flatten(model: Any, *_: Any) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def copy_layer(model: Any, *_: Any) -> None:
    copy.deepcopy(model.encoder)


def follow_data(model: Any) -> None:
    model.teacher.weight.data.lerp_(model.decoder.weight.data, 0.5)


def follow_by_list(model: Any, *_: Any) -> None:
    for teacher, student in zip(model.teacher.parameters(), model.decoder.parameters()):
        teacher.data = teacher.data * 0.5 + student.data * 0.5


def load_state(model: Any) -> None:
    model.teacher.load_state_dict(model.decoder.state_dict())


class ReadInMetrics(Layers):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"read": float(self._read(self))}


class Penalized(Layers):
    """Has a penalty of its own, on the distance to what isn't trained."""

    def get_regularization_penalty(self) -> torch.Tensor:
        return 0.1 * (self.decoder.weight - self.teacher.weight).square().sum()


def gathered(module: nn.Module) -> Any:
    """A context manager in which parameters are gathered, if they are sharded."""
    parameters = list(module.parameters())
    return deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id"))


# Teachers that the state dict leaves out, because they are in a list


def taught(model: Any) -> None:
    model.teachers = []
    model.penalty = lambda model, x: sum(
        (model.encoder(x) - teacher(x).detach()).square().mean() for teacher in model.teachers
    )


def copy_itself(model: Any) -> None:
    model.teachers = [copy.deepcopy(model.decoder)]


def construct_another(model: Any) -> None:
    model.teachers = [nn.Linear(DIM, DIM)]


def copy_gathered(model: Any) -> None:
    with gathered(model.decoder):
        copy_itself(model)


def copy_in_the_first_pass(model: Any) -> None:
    taught_penalty = model.penalty

    def penalty(model: Any, x: torch.Tensor) -> Any:
        if not model.teachers:
            copy_gathered(model)
        return taught_penalty(model, x)

    model.penalty = penalty


def move_teacher(model: Any) -> None:
    (teacher,) = model.teachers
    with gathered(model.decoder):
        for averaged, parameter in zip(teacher.parameters(), model.decoder.parameters()):
            averaged.lerp_(parameter, 0.5)


class Follow(Call):
    """Copies the network before training. Then the copy follows it by a moving average."""

    def __init__(self) -> None:
        super().__init__("batch", model(move_teacher))

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        copy_gathered(trainer.model)


# States of the optimizer


def clear(trainer: Any) -> None:
    trainer.optimizer.state.clear()


def replace_states(trainer: Any) -> None:
    trainer.optimizer.state = defaultdict(dict)


def zero_all(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        for value in state.values():
            value.zero_()


def reload(trainer: Any) -> None:
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


def zero_moments_of_one(trainer: Any) -> None:
    weight = trainer.model.encoder.weight
    is_sharded = isinstance(trainer, DeepSpeedTrainer) and trainer.engine.zero_optimization_stage()
    state = trainer.optimizer_state(weight) if is_sharded else trainer.optimizer.state[weight]
    for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
        state[name].zero_()


def look_up_state(change: Callable[[Any], Any]) -> Dict[str, Any]:
    return {**calls("batch", change, {3}), "optimizer": partial(torch.optim.Adam, lr=0.05)}


class Opaque(nn.Module):
    def get_extra_state(self) -> Any:
        return Vocabulary()


class Case(NamedTuple):
    """
    # Parameters

    change : `str`
    where : `str`
        ZeRO stages, each with a number of workers.
    expected : `Expected`
    construct : `Callable[[], Model]`, optional (default = `Layers`)
    arguments : `Dict[str, Any]`, optional (default = `{}`)
        Of `Side`, with its `batches`. With "plain" workers and a "plain_model" the training is that
        it is compared with, up to a `tolerance`.
    """

    change: str
    where: str
    expected: Expected
    construct: Callable[[], Model]
    arguments: Dict[str, Any]


def case(
    change: str,
    where: str,
    expected: Expected,
    construct: Callable[[], Model] = Layers,
    **arguments: Any,
) -> Case:
    return Case(change, where, expected, construct, arguments)


WEIGHT = "encoder.weight"
IN_WEIGHTS = ended(WEIGHT, "modified_weights")
RELEASED = ended("GatheredParameters")

WEIGHTS = [
    case(
        "within modified_weights",
        "0-2 1-2 2-2 3-2",
        KEPT,
        **calls("batch", modified(follow, ["encoder", "decoder", "^teacher"])),
    ),
    case("clamped", "0-1", KEPT, **on_batch(clamp, 2)),
    case("clamped", "2-1 3-1", IN_WEIGHTS, **on_batch(clamp, 2)),
    case("clamped in bf16", "0-1 1-1 2-1 3-1", IN_WEIGHTS, **BF16, **on_batch(clamp, 2)),
    case(
        "frozen ones",
        "3-1",
        ended("teacher.weight", "modified_weights"),
        **on_batch(zero_teacher, 2),
    ),
    # PyTorch doesn't count these.
    case(
        "data once",
        "1-1 2-2 3-2",
        IN_WEIGHTS,
        **PERSISTENT,
        log_every_num_steps=100,
        **on_batch(clamp_data, 3),
    ),
    case("data in backward", "2-1 3-1", IN_WEIGHTS, **PERSISTENT, **in_backward(clamp_data, 3)),
    case("data by a trainer", "2-1", IN_WEIGHTS, trainer_class=ChangingTrainer),
    case(
        "data before a moving average",
        "2-1",
        IN_WEIGHTS,
        **AVERAGED,
        **calls("epoch", model(clamp_data)),
    ),
    case(
        "data before modified_weights",
        "2-1",
        IN_WEIGHTS,
        callbacks=lambda: [
            Call("batch", model(clamp_data), {3}),
            Call("batch", modified(lambda model: None, "decoder")),
        ],
    ),
    case("on one rank", "2-2 3-2", IN_WEIGHTS, **PERSISTENT, **on_batch(clamp, 2, on_rank=1)),
    case(
        "on one rank after the last step",
        "2-2",
        IN_WEIGHTS,
        num_epochs=1,
        **on_batch(clamp_data, 4, on_rank=0),  # which updates it
    ),
    case("gathered in backward", "3-1 3-2", ended(WEIGHT), **in_backward(clamp_gathered, 1)),
    *(
        case(f"{change.__name__} groups", where, expected, **calls("batch", act))
        for change, sharded in ((halve, "1-2 3-1"), (halve_data, "2-1 3-2"))
        for act in [of_groups(change)]
        for where, expected in (("0-1", KEPT), (sharded, ended("modified_weights")))
    ),
    case("clamped in forward", "2-2 3-1 3-2", ended("'scale'", "torch.clamp"), scaled(clamp_scale)),
    case("clamp in forward", "2-2 3-1", KEPT, scaled(lambda s: torch.clamp(s, max=1.0))),
    case("max_norm", "0-1 0-2", KEPT, Tokens, **ACCUMULATED),
    case("max_norm", "1-1 2-1 3-1", refused("embedding", "max_norm"), Tokens, **TOKENS),
    case("max_norm in bf16", "0-1", refused("max_norm"), Tokens, **TOKENS, **BF16),
    case("rows scaled", "2-1 3-2", ended("'rows'"), ScaledInForward, **TOKENS),
    case(
        "frozen ones, with averages",
        "2-1",
        KEPT,
        moving_average=average,
        **calls("batch", modified(follow)),
    ),
    *(
        case(
            f"averages of {name}",
            "2-1",
            refused("moving_average"),
            moving_average=average_of(which),
        )
        for name, which in (("some", slice(1)), ("frozen ones", slice(None)))
    ),
    case("nothing of huge ones", "0-1 3-2", KEPT, HugeWeights),
    case("nothing of a single one", "2-2", KEPT, OneWeight),
    case("nothing of a single one, averaged", "2-2", KEPT, OneWeight, **AVERAGED),
    *(
        case(
            f"a single one{name}",
            "2-2",
            ended("'weight'"),
            OneWeight,
            **more,
            **on_batch(clamp_weight, 2),
        )
        for name, more in (("", {}), (", averaged", AVERAGED))
    ),
    case("averages in validation", "2-2", ended("'weight'"), partial(OneWeight, True), **AVERAGED),
]

REQUIRES_GRAD = [
    *(
        case(
            f"{name} {norm}",
            f"0-{workers}",
            KEPT,
            of(freeze) if name == "on" else Layers,
            plain=1,
            batches=same_vectors,
            grad_norm=norm,
            **switch(which),
        )
        for name, which, workers, norm in (
            ("off", OFF, 1, 0.1),
            ("off", OFF, 2, False),
            ("off and on", OFF_AND_ON, 2, 0.1),
            ("twice off", TWICE_OFF, 2, 0.1),
            ("on", ON, 1, False),
            ("on", ON, 2, 0.1),
        )
    ),
    *(
        case(name, where, ended(WEIGHT, "trainer.no_grad"), **switch(which))
        for (name, which), where in zip([*SWITCHES, *SWITCHES], SHARDED.split())
    ),
    *(
        case(f"{name} groups", where, ended(WEIGHT), **switch(which, groups=True))
        for (name, which), where in zip([*SWITCHES, *SWITCHES], SHARDED.split())
    ),
    case(
        "on without the optimizer",
        "0-1 3-1",
        ended(WEIGHT, "trainer.no_grad"),
        of(freeze),
        optimizer=sgd_of_trainable,
        **switch(ON),
    ),
    *(
        case(f"gradual unfreezing {i}", "2-1", refused("gradual_unfreezing"), **each)
        for i, each in enumerate(
            (unfreezing(), unfreezing(discriminative_fine_tuning=True), unfreezing(type="combined"))
        )
    ),
]

PARAMETERS = [
    *(
        case(name, "1-1 3-2", expected, **calls("start", change))
        for name, change, expected in (
            ("tied", tie, ended("decoder.weight")),
            ("replaced", replace, ended("decoder.weight")),
            ("a group added", add_group, ended("trainer.optimizer.parameter_groups")),
        )
    ),
    case("constructed late", "1-1 3-2", ended("late.weight"), of(in_forward(construct_late))),
    case(
        "frozen replaced",
        "1-1 3-2",
        ended("prototype", "register_buffer"),
        of(replace_frozen),
    ),
    case(
        "replaced and saved",
        "0-1",
        ended("decoder.weight", "trainer.checkpointer"),
        checkpointer=Lazy(DeepSpeedCheckpointer),
        **calls("start", replace),
    ),
    case(
        "opaque state saved",
        "2-1",
        ended("opaque._extra_state"),
        of(lambda model: setattr(model, "opaque", Opaque())),
        checkpointer=Lazy(DeepSpeedCheckpointer),
    ),
    *(
        case(f"{add.__name__}{name}", where, refused(parameter), of(add), **more)
        for add, parameter, name, where, more in (
            (doubles, WEIGHT, "", "0-1 1-2", {}),
            (one_double, "double_scale", "", "2-1 3-2", {}),
            (complex_phases, "phases", "", "0-2", {}),
            (one_double, "double_scale", " partitioned", "3-1", PARTITIONED),
            (complex_phases, "phases", " partitioned bf16", "3-1", {**PARTITIONED, **BF16}),
            (doubles, WEIGHT, " partitioned", "3-1", PARTITIONED),
            (frozen_first, "indices", "", "1-1 3-1", {}),
            (frozen_short, "decoder.indices", "", "3-1", {}),
            (lazy_layer, "decoder.weight", "", "0-1 2-1", {}),
            (lazy_buffers, "normalization.running_mean", "", "1-1", {}),
            (lazy_layer, "decoder.weight", " partitioned", "3-1", PARTITIONED),
        )
    ),
    case("frozen of types", "0-2 1-2 2-1 3-2", KEPT, of(frozen_of_types)),
    case("frozen of types partitioned", "3-2", KEPT, of(frozen_of_types), **PARTITIONED),
    case("inference mode", "2-2 3-1 3-2", KEPT, of(in_forward(inference))),
    case("old spectral norm", "2-1", KEPT, of(old_spectral_norm)),
    case("spectral norm", "0-1 3-2", KEPT, of(spectral_norm), **VALIDATION),
    case("penalty with frozen", "2-1 3-1 3-2", KEPT, Penalized),
]

SHARING = [
    *(
        case(share.__name__, where, refused(WEIGHT), of(share))
        for share, where in zip(
            (share_data, wrap_again, share_rows, frozen_alias, buffer), SHARDED.split(), strict=True
        )
    ),
    *(
        case(f"{share.__name__} partitioned", "3-1", refused(WEIGHT), of(share), **PARTITIONED)
        for share in (share_data, wrap_again)
    ),
    case("share_data in bf16", "0-1", refused(WEIGHT, "decoder.weight"), of(share_data), **BF16),
    *(
        case(share.__name__, "0-1", KEPT, of(share))
        for share in (share_data, wrap_again, share_rows, frozen_alias, buffer)
    ),
    *(
        case(share.__name__, where, KEPT, of(share))
        for share, where in (
            (one_parameter, "1-2 3-1"),
            (split_columns, "2-1 3-2"),
            (as_data, "1-2"),
            (in_a_child, "2-1"),
            (in_objects, "2-2"),
            (in_the_first_pass, "2-2"),
            (as_array, "0-1"),
            (in_each_pass, "3-2"),
        )
    ),
    case("of frozen", "3-2", KEPT, of(freeze, as_data)),
    *(
        case(f"{share.__name__}{name}", where, refused(WEIGHT), of(share), **more)
        for share, where, name, more in (
            (as_array, "1-1", "", {}),
            (of_another_type, "2-1", "", {}),
            (as_data, "3-1", "", {}),
            (in_a_child, "3-1", " partitioned", PARTITIONED),
            (as_array, "3-1", " partitioned", PARTITIONED),
        )
    ),
    case("in_the_first_pass", "3-1 3-2", ended("'table'", WEIGHT), of(in_the_first_pass)),
    case(
        "in_the_first_pass persistent",
        "3-2",
        ended("'table'", WEIGHT),
        of(in_the_first_pass),
        **PERSISTENT,
    ),
]

LOSSES = [
    *(
        case(
            f"NaN gradients{name}",
            where,
            ended("torch.autograd.set_detect_anomaly"),
            of(in_forward(root_at_0)),
            batches=zeros_in_step_3,
            log_every_num_steps=1,
            **more,
        )
        for name, where, more in (
            ("", "0-1 0-2 1-2 2-1 3-1 3-2", {}),
            (" in bf16", "0-1 1-2 2-1 3-2", BF16),
            (" under autocast", "1-1", AUTOCAST),
        )
    ),
    case(
        "NaN loss",
        "0-1 2-2 3-2",
        ended("nan loss encountered at step 3 of epoch 1"),
        batches=not_a_number,
    ),
    case("no graph", "0-1 3-2", ended("torch.no_grad()"), partial(Independent, has_graph=False)),
    case("no parameters", "0-1 3-1", KEPT, partial(Independent, has_graph=True)),
    case("mistake in a submodule", "3-1 3-2", ended("size of tensor"), of(mistaken)),
    case(
        "nothing under autocast",
        "3-2",
        KEPT,
        **AUTOCAST,
        **VALIDATION,
        log_every_num_steps=1,
        tolerance=0.05,
    ),
]

BUFFERS = [
    case("reassigned and made", "0-2 1-2 2-2 3-2", KEPT, KeepsAverages),
    case("made late", "2-2", KEPT, partial(KeepsAverages, has_mean=False, in_pass=6)),
    *(
        case(
            f"made by one rank in pass {i}",
            f"{stage}-2",
            ended("different buffers"),
            partial(KeepsAverages, has_mean, in_pass=i, on_rank=1),
        )
        for i, has_mean, stage in ((1, True, 0), (1, False, 2), (3, False, 2))
    ),
    *(
        case(
            name,
            "0-2 2-2 3-2" if name == "slice" else "3-2",
            KEPT,
            of_a_view(view),
            plain_model=of_a_view(lambda rows, view=view: view(rows).clone().contiguous()),
        )
        for name, view in VIEWS.items()
    ),
    case("repeated on rank 0", "0-2", ended("different buffers"), of_a_view(repeated_on_rank_0)),
]

READING = [
    *(
        case(f"{read.__name__} in metrics", f"3-{n}", RELEASED, construct)
        for read, n in ((norm, 2), (flatten, 1))
        for construct in [partial(ReadInMetrics, read)]
    ),
    *(
        case(f"{read.__name__} in forward", f"3-{n}", RELEASED, of(in_forward(read)))
        for read, n in ((norm, 1), (follow_by_list, 2), (copy_layer, 1))
    ),
    *(
        case(f"{read.__name__} in on_{when}", f"3-{n}", RELEASED, **calls(when, model(read)))
        for read, when, n in (
            (norm, "batch", 1),
            (follow_data, "batch", 2),
            (load_state, "batch", 1),
            (copy_layer, "start", 2),
        )
    ),
    *(
        case(f"teacher: {name}", where, KEPT, of(taught, teach), **more)
        for name, teach, where, more in (
            ("copy", copy_itself, "3-2", {}),
            ("copy, partitioned", copy_itself, "3-1 3-2", PARTITIONED),
            ("another, partitioned", construct_another, "3-2", PARTITIONED),
            ("copy of the first pass", copy_in_the_first_pass, "3-1", {}),
            ("copy of the first pass, partitioned", copy_in_the_first_pass, "3-2", PARTITIONED),
        )
    ),
    case("teacher: of a callback", "3-1 3-2", KEPT, of(taught), callbacks=lambda: [Follow()]),
]

STATES = [
    case(change.__name__, where, KEPT, **look_up_state(change), zero=zero)
    for change, where, zero in (
        (clear, "1-2", {}),
        (clear, "2-2", {"offload_optimizer": {"device": "cpu"}}),
        (clear, "3-2", {"sub_group_size": 20}),
        (replace_states, "2-2 3-2", {}),
        (zero_all, "2-2 3-2", {}),
        (reload, "2-2 3-2", {}),
        (zero_moments_of_one, "0-2 1-2 2-2 3-2", {}),
    )
]

TABLE = {
    "weights": WEIGHTS,
    "requires_grad": REQUIRES_GRAD,
    "parameters": PARAMETERS,
    "sharing": SHARING,
    "losses": LOSSES,
    "buffers": BUFFERS,
    "reading": READING,
    "states": STATES,
}


def side_of(case: Case, stage: Optional[int], workers: int) -> Side:
    arguments = {"batches": vectors, **case.arguments}
    plain_model = arguments.pop("plain_model", case.construct)
    for name in ("plain", "tolerance"):
        arguments.pop(name, None)
    if stage is None:
        arguments.pop("zero", None)
        arguments.pop("is_constructed_partitioned", None)
    construct = plain_model if stage is None else case.construct
    batches = arguments.pop("batches")
    return Side(construct, batches, stage, workers, **arguments)


Weights = Dict[str, torch.Tensor]


def outcomes(side: Side, directory: Path) -> List[Tuple[str, Any]]:
    """Of each rank, `"kept"` with its weights, and rank 0's buffers, or a message."""

    def work(rank: int) -> Tuple[str, Any]:
        with process_environment(CPU, rank), ExitStack() as session:
            how = "refused"
            try:
                trainer: Any = side.construct(rank, directory)
                if isinstance(trainer, DeepSpeedTrainer):
                    session.enter_context(trainer.session())
                how = "ended"
                trainer.train()
                arrays = state_arrays(trainer)
            except Exception as error:
                return how, str(error)
            names = [name for name, _ in trainer.model.named_parameters()]
            return "kept", arrays if rank == 0 else {name: arrays[name] for name in names}

    return run_workers(side.world_size, work)


_plain: Dict[Tuple[int, int], List[Any]] = {}


def expected_weights(case: Case, workers: int, directory: Path) -> List[Any]:
    """Those of `gradient_descent`, which is trained once for all stages."""
    workers = case.arguments.get("plain", workers)
    key = id(case.construct), id(case.arguments), workers
    if key not in _plain:
        directory.mkdir()
        _plain[key] = outcomes(side_of(case, None, workers), directory)
    return _plain[key]


@pytest.mark.parametrize(
    "stage, workers, case",
    [
        pytest.param(stage, workers, case, id=f"{name}: {case.change}-{stage}-{workers}")
        for name, cases in TABLE.items()
        for case in cases
        for stage, workers in (map(int, each.split("-")) for each in case.where.split())
    ],
)
def test_change(stage: int, workers: int, case: Case, tmp_path: Path) -> None:
    actual = outcomes(side_of(case, stage, workers), tmp_path)
    assert [how for how, _ in actual] == [case.expected.how] * workers, actual
    if case.expected.how != "kept":
        messages = [message for _, message in actual]
        assert all(len(message.splitlines()) <= 8 for message in messages)
        # A rank without the parameter's shard says that it is another one's.
        is_named = [all(name in each for name in case.expected.names) for each in messages]
        assert any(is_named), messages
        assert all(named or "another rank" in each for named, each in zip(is_named, messages))
        return
    expected = expected_weights(case, workers, tmp_path / "plain")
    for rank, (_, weights) in enumerate(actual):
        _, plain = expected[rank % len(expected)]
        assert_same_weights(
            {name: torch.tensor(array) for name, array in weights.items()},
            {name: torch.tensor(plain[name]) for name in weights},
            case.arguments.get("tolerance", 1e-5),
        )
        if rank == 0:
            assert weights.keys() == plain.keys()
            saved = torch.load(tmp_path / "best.th", weights_only=True)
            assert all(saved[name].equal(torch.tensor(weights[name])) for name in saved)


# What has more to look at than weights and a message


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_master_weights_are_changed_in_half_precision(stage: int) -> None:
    value = 1.0001  # in fp32 only

    def fill(trainer: Any) -> None:
        weight = trainer.model.encoder.weight
        with trainer.modified_weights():
            assert weight.dtype == torch.float32
            weight.fill_(value)
        assert weight.dtype != torch.float32

    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)  # noqa: E731
    side = Side(Layers, vectors, stage, optimizer=sgd, **BF16, **calls("batch", fill))
    assert side.train()["encoder.weight"].equal(torch.full((DIM, DIM), value))


def test_the_changes_of_rank_0_count() -> None:
    def fill(trainer: Any) -> None:
        with trainer.modified_weights(["encoder.bias", trainer.model.decoder.weight]):
            trainer.model.encoder.bias.fill_(dist.get_rank())

    side = Side(Layers, vectors, 2, 2, **calls("batch", fill))
    assert side.train()["encoder.bias"].tolist() == [0] * DIM


def test_weights_that_a_callback_has_changed_after_the_last_epoch_are_not_saved(
    tmp_path: Path,
) -> None:
    more = {"num_epochs": 1, "checkpointer": DeepSpeedCheckpointer(tmp_path)}
    side = Side(Layers, vectors, 2, **more, **calls("epoch", model(clamp_data)))
    ((how, message),) = outcomes(side, tmp_path)
    assert how == "ended" and "'encoder.weight'" in message
    assert not list(tmp_path.glob("checkpoint_*/commit.json"))


@pytest.mark.parametrize("stage", [0, 2])
def test_attributes_follow_the_parameter_in_half_precision(stage: int, tmp_path: Path) -> None:
    def train(rank: int) -> List[float]:
        with process_environment(CPU, rank):
            trainer: Any = Side(of(as_data), vectors, stage, **BF16).construct(rank, tmp_path)
            trainer.train()
            table, weight = trainer.model.table, trainer.model.encoder.weight
            of_engine = float((table - weight).abs().max())
            trainer.close()  # here the weights are in fp32 again
            assert trainer.model.table.dtype == torch.float32
            return [of_engine, float((trainer.model.table - weight).abs().max())]

    assert run_workers(1, train) == [[0, 0]]


def test_weights_that_are_tied_in_on_start_are_saved_and_restored_at_stage_0(
    tmp_path: Path,
) -> None:
    def train(name: str, num_epochs: int, stage: Optional[int] = 0) -> Weights:
        more = {} if stage is None else {"checkpointer": DeepSpeedCheckpointer(tmp_path / name)}
        side = Side(Layers, vectors, stage, num_epochs=num_epochs, **more, **calls("start", tie))
        (tmp_path / name).mkdir(exist_ok=True)
        return side.train(tmp_path / name)

    expected = train("uninterrupted", 2)
    train("resumed", 1)
    assert_same_weights(train("resumed", 2), expected, tolerance=0)
    assert_same_weights(expected, train("plain", 2, None))


class Count(nn.Module):
    """Counts outside of tensors, in tensors of types that backends can't send, and in a list."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.count = 0
        self.names: List[str] = []
        self.computed = torch.zeros(2, dtype=torch.int16)
        if has_buffers:
            self.register_buffer("short", torch.zeros((), dtype=torch.int16))
            self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))
            self.register_buffer("flags", torch.zeros(9, dtype=torch.bool))
            self.register_buffer("sparse", torch.zeros(3).to_sparse())
        self.register_buffer("precise", torch.zeros(2, dtype=torch.float64))

    def add(self) -> None:
        self.count += 1
        self.names.append(str(self.count))
        self.computed += 1
        for _, buffer in self.named_buffers():
            if buffer.layout is torch.sparse_coo:
                self.sparse = self.sparse + torch.tensor([1.0, 0, 0]).to_sparse()
            elif buffer.dtype == torch.bool:
                buffer[self.count % 9] = True
            else:
                buffer.add_(1 / 3 if buffer.is_floating_point() else 1)

    def get_extra_state(self) -> Any:
        return {"count": self.count, "names": list(self.names)}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.names = state["count"], state["names"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}computed"] = self.computed.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.computed = state_dict.pop(f"{prefix}computed")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def everything(self) -> Dict[str, Any]:
        buffers = {name: buffer.to_dense().tolist() for name, buffer in self.named_buffers()}
        return {**self.get_extra_state(), "computed": self.computed.tolist(), **buffers}


class Counting(Layers):
    """Is best after its first epoch."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.counter = Count(has_buffers)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if self.training:
            self.counter.add()
        return super().forward(x)

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"score": -float(self.counter.count)}


@pytest.mark.parametrize("stage, workers", [(0, 1), (2, 2), (3, 2)])
def test_all_of_the_state_comes_back_with_the_best_weights(stage: int, workers: int) -> None:
    def everything(trainer: Any) -> Dict[str, Any]:
        trainer.train()
        return trainer.model.counter.everything()

    construct = partial(Counting, has_buffers=workers == 1)
    more = {"validation_metric": "+score", "num_epochs": 3, **VALIDATION}
    actual, expected = (
        Side(construct, vectors, each, workers, **more).on_all_ranks(everything)
        for each in (stage, None)
    )
    assert expected[0]["count"] == len(vectors(0))
    assert actual == expected


class Watched(nn.Module):
    """Counts how often properties of the names that embeddings have are evaluated."""

    num_evaluations = 0

    def _count(self) -> Any:
        Watched.num_evaluations += 1
        return None

    weight = max_norm = sparse = is_quantized = bias = padding_idx = property(_count)


def test_properties_of_modules_are_not_evaluated() -> None:
    def count(trainer: Any) -> int:
        trainer.train()
        return Watched.num_evaluations

    construct = of(lambda model: setattr(model, "watched", Watched()))
    assert Side(construct, vectors, 3, 2, **VALIDATION).on_all_ranks(count) == [0, 0]


def sizes(model: Any) -> torch.Tensor:
    """The number of elements, in each way to say it."""
    parameters = list(model.parameters())
    counts = [sum(p.numel() for p in parameters), sum(p.nelement() for p in parameters)]
    counts += [sum(torch.numel(p) for p in parameters), sum(p.size().numel() for p in parameters)]
    counts += [sum(p.shape.numel() for p in parameters), sum(p.nbytes // 4 for p in parameters)]
    dims = sum(len(p) + p.size(0) + p.ndim + p.dim() + p.ndimension() for p in parameters)
    return torch.tensor([*counts, dims], dtype=torch.float32).norm()


def norm_of_gathered(model: Any) -> torch.Tensor:
    with gathered(model):
        return norm(model)


def look_at_first(model: Any) -> None:
    first = next(model.parameters())
    assert first.dtype == torch.float32 and first.device.type == "cpu" and first.is_leaf
    assert first in set(model.parameters()) and repr(first)


@pytest.mark.parametrize("stage, workers", [(0, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("read", [sizes, norm_of_gathered])
def test_shapes_and_gathered_parameters_are_those_of_gradient_descent(
    read: Callable[[Any], torch.Tensor], stage: int, workers: int
) -> None:
    def metric(trainer: Any) -> float:
        return trainer.train()["training_read"]

    more = {**calls("batch", model(look_at_first)), **VALIDATION}
    actual, expected = (
        Side(partial(ReadInMetrics, read), vectors, each, workers, **more).on_all_ranks(metric)
        for each in (stage, None)
    )
    assert actual == pytest.approx(expected) and min(expected) > 0


@pytest.mark.parametrize("read", [norm, copy_layer, flatten, lambda model: model.state_dict()])
def test_what_several_workers_leave_sharded_is_not_read_after_training(
    read: Callable[[Any], Any], tmp_path: Path
) -> None:
    def work(rank: int) -> str:
        trainer = Side(Layers, vectors, 3, world_size=2).construct(rank, tmp_path)
        trainer.train()
        assert sizes(trainer.model) == sizes(Layers())
        with pytest.raises(RuntimeError) as error:
            read(trainer.model)
        return str(error.value)

    for message in run_workers(2, work):
        assert "'encoder.weight'" in message and "archive" in message


def test_the_model_of_one_process_can_be_read_and_copied_after_training(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        trainer = Side(Layers, vectors, 3).construct(rank, tmp_path)
        trainer.train()
        assert norm(copy.deepcopy(trainer.model)) == norm(trainer.model) > 0

    run_workers(1, work)
