"""Optimizers at the ZeRO stages that give them flat shards in the place of weights."""

import tempfile
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple, Type

import pytest
import torch
import transformers.optimization
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import DenseSparseAdam, HuggingfaceAdamWOptimizer, Optimizer
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.engine.optimizers import LionOptimizer
from allennlp_deepspeed.engine.optimizers.muon import MuonOptimizer
from allennlp_deepspeed.launch import train_command
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import assert_same_weights, load_config
from tests.support.side_by_side import Side, state_arrays, trained
from tests.support.workers import run_workers

LEARNING_RATES = {
    torch.optim.SGD: 0.3,
    torch.optim.ASGD: 0.3,
    torch.optim.Adadelta: 3.0,
    HuggingfaceAdamWOptimizer: 0.05,
}


class Layers(Model):
    """Its weights have 30, 5, 15 and 3 numbers, of which either worker has a half."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.layers(x)
        return {"loss": logits.logsumexp(dim=-1).mean() + logits.pow(2).mean()}


class Clipped(torch.optim.SGD):
    """A user's, which divides a step by its norm."""

    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step(closure)


def batches(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(4, 6, generator=generator)} for _ in range(4)]


NAMED = (DenseSparseAdam, HuggingfaceAdamWOptimizer, LionOptimizer)


def constructed(optimizer: Type[torch.optim.Optimizer], parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    if optimizer in NAMED:
        parameters = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    return optimizer(parameters, lr=LEARNING_RATES.get(optimizer, 0.02))  # type: ignore[call-arg]


ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
    *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
    *NAMED,
)


@pytest.mark.parametrize("first", range(0, len(ELEMENTWISE), 5))
@pytest.mark.parametrize("stage", [2])
def test_what_is_elementwise_steps_shards_as_it_steps_weights(stage: int, first: int) -> None:
    def train_all(rank: int) -> List[Any]:
        return [
            [
                Side(
                    Layers, batches, each, world_size=2, optimizer=partial(constructed, optimizer)
                ).on_rank(rank, trained)
                for each in (None, stage)
            ]
            for optimizer in ELEMENTWISE[first : first + 5]
        ]

    for expected, actual in run_workers(2, train_all)[0]:
        assert_same_weights(
            *(
                {name: torch.tensor(array) for name, array in weights.items()}
                for weights in (actual, expected)
            )
        )


def registered() -> List[str]:
    """Without those of the fixtures."""
    names = Optimizer.list_available()
    return [n for n in names if not Optimizer.by_name(n).__module__.startswith("tests.")]


@pytest.mark.parametrize("name", registered())
def test_every_registered_optimizer_is_accepted_or_refused(name: str) -> None:
    optimizer = {"type": name, **({"lr": 0.1} if name in ("sgd", "averaged_sgd") else {})}
    if name == "multi":
        optimizer.update(optimizers={"default": {"type": "adam"}}, parameter_groups=[])
    with ExitStack() as expected:
        if name in ("multi", "huggingface_adafactor"):
            expected.enter_context(pytest.raises(ConfigurationError))
        check("zero_2", optimizer)


def check(deepspeed_config: Any, optimizer: Any = None) -> None:
    config = load_config("classifier", {"trainer.cuda_device": -1})
    config["trainer"].update(
        type="deepspeed", deepspeed_config=deepspeed_config, optimizer=optimizer
    )
    train_command.check(Params(config))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer, reason",
    [
        ("huggingface_adafactor", "isn't element-wise"),
        (
            {
                "type": "multi",
                "optimizers": {"default": {"type": "sgd", "lr": 0.1}},
                "parameter_groups": [[["bias"], {"optimizer_name": "default"}]],
            },
            "whose inner optimizers DeepSpeed",
        ),
    ],
)
def test_one_that_looks_at_whole_weights_is_refused_where_they_are_sharded(
    stage: int, optimizer: Any, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason) as error:
        check(f"zero_{stage}" if stage != 2 else None, optimizer)  # the default
    assert '"zero_optimization": {"stage": 0}' in str(error.value)
    check({"zero_optimization": {"stage": 0}}, optimizer)


@pytest.mark.parametrize("name", ["Lamb", "Adafactor"])
def test_one_that_deepspeed_constructs_is_refused_too(name: str) -> None:
    section = {"optimizer": {"type": name, "params": {"lr": 0.1}}}
    with pytest.raises(ConfigurationError, match=f'optimizer.type\' is "{name}", which '):
        check(section)
    check({"zero_optimization": {"stage": 0}, **section})


def test_one_that_computes_losses_itself_is_refused_at_every_stage() -> None:
    section = {"optimizer": {"type": "LBFGS", "params": {"lr": 0.1}}}
    with pytest.raises(ConfigurationError, match='is "LBFGS", whose step calls'):
        check({"zero_optimization": {"stage": 0}, **section})


def trained_alone(optimizer: Any, stage: Any) -> Dict[str, torch.Tensor]:
    """In one process, this one."""
    side = Side(Layers, batches, stage, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as directory:
        trainer = side.construct(0, Path(directory))
        trainer.train()
        return trainer.model.state_dict()


class Plain(torch.optim.SGD):
    """A user's, which is element-wise."""

    def step(self, closure=None):  # type: ignore[override]
        return super().step(closure)


class Locked(Plain):
    """A user's, which can't be copied."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.lock = threading.Lock()


@pytest.mark.parametrize("optimizer, stage", [(Plain, 1), (Locked, 2), (Plain, 3), (Locked, 3)])
def test_an_unknown_one_is_trained_with_a_warning_unless_it_could_be_tested(
    optimizer: Any, stage: int, caplog
) -> None:
    actual = trained_alone(partial(constructed, optimizer), stage)
    assert_same_weights(actual, trained_alone(partial(constructed, optimizer), None))
    warnings = [r for r in caplog.messages if "may not be element-wise" in r]
    assert len(warnings) == (optimizer is Locked)


@pytest.mark.parametrize("stage", [0])
@pytest.mark.parametrize("optimizer", [Clipped, transformers.optimization.Adafactor])
def test_any_is_exact_where_it_steps_whole_weights(optimizer: Any, stage: int, caplog) -> None:
    def construct(parameters: Any) -> torch.optim.Optimizer:
        return optimizer(parameters, lr=0.02, **settings)

    settings = {"relative_step": False} if optimizer is not Clipped else {}
    actual = trained_alone(construct, stage)
    assert_same_weights(actual, trained_alone(construct, None))
    assert not [r for r in caplog.messages if "may not be element-wise" in r]


def test_adafactor_in_python_is_refused() -> None:
    side = Side(Layers, batches, 2, optimizer=transformers.optimization.Adafactor)
    assert "The optimizer is Adafactor, which isn't element-wise" in side.refusal()


# Of users, with updates that depend on more than gradients and values of the groups


class DecaysMatrices(torch.optim.SGD):
    """It decays only matrices."""

    weight_decay = 1e-4

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad.add_(parameter, alpha=self.weight_decay)
        return super().step(closure)


class AdamDecaysMatrices(torch.optim.AdamW):
    """As `DecaysMatrices`, decoupled from the gradients."""

    def __init__(self, parameters: Any, lr: float, **settings: Any) -> None:
        super().__init__(parameters, lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.mul_(1 - group["lr"] * DecaysMatrices.weight_decay)
        return super().step(closure)


@pytest.mark.parametrize("lr", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("optimizer", [DecaysMatrices, AdamDecaysMatrices])
def test_a_small_decay_that_depends_on_shapes_is_refused(optimizer: Any, lr: float) -> None:
    side = Side(Layers, batches, 2, optimizer=partial(optimizer, lr=lr, momentum=0.9))
    assert f"The optimizer is {optimizer.__name__}, which isn't element-wise" in side.refusal()


class Multiplied(torch.optim.Optimizer):
    """Its rates are in a list of the group, or in attributes of the parameters."""

    def __init__(self, parameters: Any, in_group: bool) -> None:
        group = {"params": list(parameters)}
        if in_group:
            group["scales"] = [1.0] * (len(group["params"]) - 1) + [10.0]
        super().__init__([group], {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            scales = group.get("scales", [getattr(p, "scale", 1.0) for p in group["params"]])
            for parameter, scale in zip(group["params"], scales):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * scale)


class Marked(Layers):
    """The attribute of the last weight is that of `Multiplied`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].bias.scale = 10.0  # type: ignore[assignment]


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "in_group, stage, precision",
    [(True, 1, {}), (True, 3, {}), (False, 0, BF16), (False, 2, {}), (False, 3, {})],
)
def test_one_that_reads_what_only_parameters_have_is_refused(
    in_group: bool, stage: int, precision: Any
) -> None:
    message = Side(
        Layers if in_group else Marked,
        batches,
        stage,
        deepspeed_config=precision,
        optimizer=partial(Multiplied, in_group=in_group),
    ).refusal()
    assert ("isn't element-wise" if stage else "reads attributes of parameters") in message


@pytest.mark.parametrize(
    "stage, precision, optimizer",
    [(0, {}, partial(Multiplied, in_group=False)), (0, BF16, None), (3, {}, None)],
)
def test_attributes_that_it_reads_only_from_parameters_or_not_at_all_are_allowed(
    stage: int, precision: Any, optimizer: Any
) -> None:
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.1)
    actual = Side(Marked, batches, stage, deepspeed_config=precision, optimizer=optimizer).train()
    expected = Side(Marked, batches, optimizer=optimizer).train()
    assert_same_weights(actual, expected, **({"tolerance": 0.1} if precision else {}))


class Zeroing(torch.optim.SGD):
    """Leaves gradients of 0, which have unused parameters decay."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


class Annealing(torch.optim.SGD):
    """Reduces its rate once a step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["lr"] *= 0.5


class Resetting(torch.optim.SGD):
    """Reduces its momentum once a step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for state in self.state.values():
            state["momentum_buffer"].mul_(0.5)


@pytest.mark.parametrize(
    "optimizer, stage", [(Zeroing, 0), (Zeroing, 2), (Annealing, 0), (Annealing, 3), (Resetting, 1)]
)
def test_one_with_an_effect_in_zero_grad_is_refused(optimizer: Any, stage: int) -> None:
    construct = partial(optimizer, lr=0.1, momentum=0.9)
    message = Side(Layers, batches, stage, optimizer=construct).refusal()
    effect = "sets gradients to zeros" if optimizer is Zeroing else "changes its groups, states or"
    assert f"whose `zero_grad` {effect}" in message


class Wrapper(torch.optim.Optimizer):
    """Steps an inner optimizer, which has the same groups or the same parameters."""

    def __init__(self, parameters: Any, shares: bool) -> None:
        parameters = list(parameters)
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        super().__init__(groups, {"lr": 0.1})
        self.inner = torch.optim.SGD([dict(g) for g in groups], lr=0.1, momentum=0.9)
        if shares:
            self.param_groups = self.inner.param_groups

    def step(self, closure=None):  # type: ignore[override]
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_inner_optimizer_with_groups_of_its_own_is_refused(stage: int) -> None:
    message = Side(Layers, batches, stage, optimizer=partial(Wrapper, shares=False)).refusal()
    assert "'inner', a SGD, has groups of its own" in message


@pytest.mark.parametrize("stage, shares", [(0, False), (0, True), (2, True), (3, True)])
def test_an_inner_optimizer_is_exact_if_it_has_the_same_groups_or_full_weights(
    stage: int, shares: bool, caplog
) -> None:
    optimizer = partial(Wrapper, shares=shares)
    assert_same_weights(trained_alone(optimizer, stage), trained_alone(optimizer, None))
    assert not [r for r in caplog.messages if "may not be element-wise" in r]


class ByName(MovingAverage):
    """A user's, with a state of its own, and another average of biases."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.count = 0

    def apply(self, num_updates: Optional[int] = None) -> None:
        self.count += 1
        for name, parameter in self._parameters:
            if name.endswith("bias"):
                self._shadows[name].lerp_(parameter.data, 1 / self.count)
            else:
                self._shadows[name] = self._shadows[name].lerp(parameter.data, 0.5)

    def state_dict(self) -> Dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]


def averages(trainer: Any) -> Dict[str, Any]:
    trainer.train()
    trainer._moving_average.assign_average_value()
    return state_arrays(trainer)


@pytest.mark.parametrize(
    "stage, world_sizes",
    [(0, (1, 1)), pytest.param(2, (2, 2), marks=pytest.mark.soak), (2, (2, 1)), (3, (1, 2))],
)
def test_a_moving_average_by_name_continues_when_resumed(
    stage: int, world_sizes: Tuple[int, int], tmp_path: Path
) -> None:
    def side(stage: Optional[int], world_size: int, **arguments: Any) -> Side:
        return Side(
            Layers,
            lambda rank: batches(0),
            stage,
            world_size,
            moving_average=lambda model: ByName(model.named_parameters()),
            **arguments,
        )

    expected = side(None, 1).on_all_ranks(averages)[0]
    for num_epochs, world_size in enumerate(world_sizes, start=1):
        checkpointer = DeepSpeedCheckpointer(tmp_path)
        resumed = side(stage, world_size, num_epochs=num_epochs, checkpointer=checkpointer)
        actual = resumed.on_all_ranks(averages, tmp_path)[0]
    assert_same_weights(
        *({n: torch.tensor(array) for n, array in each.items()} for each in (actual, expected))
    )


def muon(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    return MuonOptimizer.with_adamw(named, muon_parameters=["0"])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("clipping", ["grad_norm", "grad_clipping"])
def test_updates_of_muon_are_not_clipped(stage: int, clipping: str) -> None:
    zero = {"reduce_scatter": False}
    message = Side(Layers, batches, stage, zero=zero, optimizer=muon, **{clipping: 0.5}).refusal()
    assert "would clip Muon's updates" in message
