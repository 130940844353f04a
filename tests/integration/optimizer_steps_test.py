"""
Optimizers of users that count steps in their groups, or have other weights for evaluation, and
callbacks that reset or read the states of an optimizer.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.common import Params
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.moving_average import ExponentialMovingAverage
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed import DeepSpeedCheckpointer
from tests.integration.elementwise_test import Layers, batches
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, error_of_training


class Counting(torch.optim.Optimizer):
    """Its rates depend on what it has counted in each group, in a number and in a tensor."""

    def __init__(self, params: Any, lr: float = 0.3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("sum_of_rates", torch.zeros(())).add_(group["lr"])
            rate = group["lr"] / (group["step"] + float(group["sum_of_rates"]))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - rate * group["weight_decay"])
                    parameter.sub_(parameter.grad, alpha=rate)


class CountingInItself(torch.optim.SGD):
    """Its rates depend on what it has counted in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.3, weight_decay=0.1)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.5 / self.num_steps
        return super().step(closure)


class Averaged(Counting):
    """As the optimizers without schedules: it evaluates the average of the weights."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["train_mode"] = False

    def _switch(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if "other" in state:
                        other = state["other"].clone()
                        state["other"].copy_(parameter.data)
                        parameter.data.copy_(other)
                group["train_mode"] = train_mode

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["train_mode"]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = state.setdefault("other", torch.zeros_like(parameter))
                average.lerp_(parameter, 1 / group["step"])


class Normalized(torch.optim.SGD):
    """Divides gradients by the norm of all of them."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step(closure)


class CallModes(TrainerCallback):
    """What the READMEs of such optimizers ask for."""

    def __init__(self) -> None:
        super().__init__("")

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.optimizer.train()

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.optimizer.eval()


class SwitchAfterBatches(CallModes):
    """On every rank, as a callback that writes samples does."""

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.optimizer.eval()
        trainer.optimizer.train()

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        pass


def groups(parameters: Any) -> List[Dict[str, Any]]:
    first, first_bias, second, second_bias = parameters
    return [
        {"params": [first, second]},
        {"params": [first_bias], "weight_decay": 0.0},
        {"params": [second_bias], "weight_decay": 0.0, "lr": 0.1},
    ]


def side(
    optimizer: Any,
    stage: Optional[int] = None,
    world_size: int = 1,
    data: Any = batches,
    **kwargs: Any,
) -> Side:
    return Side(
        Layers,
        data,
        stage,
        world_size,
        optimizer=lambda parameters: optimizer(groups(parameters)),
        **kwargs,
    )


@pytest.mark.parametrize(
    "stage, world_size, zero, optimizer",
    [
        (0, 1, {}, Counting),
        (1, 2, {}, CountingInItself),
        (2, 1, {}, Counting),
        (3, 1, {}, CountingInItself),
        (3, 2, {}, Counting),
        (3, 2, {"sub_group_size": 1}, CountingInItself),
        (3, 1, {"sub_group_size": 1, "offload_optimizer": {"device": "cpu"}}, Counting),
        (3, 1, {"sub_group_size": 1, "offload_optimizer": {"device": "cpu"}}, CountingInItself),
    ],
)
def test_each_group_counts_each_step_once(
    stage: int, world_size: int, zero: Any, optimizer: Any
) -> None:
    expected = side(optimizer, world_size=world_size).train()
    assert_same_weights(side(optimizer, stage, world_size, zero=zero).train(), expected)


def test_a_step_that_overflows_is_not_counted() -> None:
    def counts(trainer: Any) -> Any:
        trainer.train()
        return [group.get("step") for group in trainer.optimizer.param_groups]

    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}
    (numbers,) = side(Counting, 3, deepspeed_config=fp16).on_all_ranks(counts)
    assert len(set(numbers)) == 1 and 0 < numbers[0] < 8


@pytest.mark.parametrize("optimizer", [Counting, Averaged])
@pytest.mark.parametrize("stage, world_sizes", [(0, (1, 1)), (2, (2, 2)), (3, (2, 2)), (3, (2, 1))])
def test_what_is_counted_continues_when_resumed(
    stage: int, world_sizes: Any, optimizer: Any, tmp_path: Path
) -> None:
    expected = side(optimizer, stage, data=lambda rank: batches(0)).train()
    for num_epochs, world_size in enumerate(world_sizes, start=1):
        checkpointer = DeepSpeedCheckpointer(tmp_path)
        actual = side(
            optimizer,
            stage,
            world_size,
            data=lambda rank: batches(0),
            num_epochs=num_epochs,
            checkpointer=checkpointer,
        ).train(tmp_path)
    assert_same_weights(actual, expected)


class UsedOnce(Layers):
    """Uses a layer in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.num_passes = 0

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.num_passes += 1
        return super().forward(self.first(x) if self.num_passes == 1 else x)


def multi(parameters: Any) -> torch.optim.Optimizer:
    sgd = {"type": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    params = {
        "type": "multi",
        "optimizers": {"default": sgd, "others": {**sgd, "lr": 0.05, "momentum": 0.0}},
        "parameter_groups": [[["[13579]"], {"optimizer_name": "others"}]],
    }
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    return Optimizer.from_params(Params(params), model_parameters=named)


@pytest.mark.parametrize("world_sizes", [(1,), (1, 1), (2, 2)])
def test_multi_updates_what_a_step_does_not_use(world_sizes: Any, tmp_path: Path) -> None:
    expected = Side(UsedOnce, lambda rank: batches(0), optimizer=multi).train()
    for num_epochs, world_size in enumerate(world_sizes, start=3 - len(world_sizes)):
        actual = Side(
            UsedOnce,
            lambda rank: batches(0),
            0,
            world_size,
            optimizer=multi,
            num_epochs=num_epochs,
            checkpointer=DeepSpeedCheckpointer(tmp_path),
        ).train(tmp_path)
    assert_same_weights(actual, expected)


@pytest.mark.parametrize(
    "stage, world_size, callback",
    [
        (0, 1, None),
        (0, 1, SwitchAfterBatches),
        (1, 2, CallModes),
        (2, 1, None),
        (2, 1, CallModes),
        (3, 1, SwitchAfterBatches),
        (3, 2, None),
        (3, 2, CallModes),
        (3, 2, SwitchAfterBatches),
    ],
)
def test_modes_are_switched(stage: int, world_size: int, callback: Any) -> None:
    expected = side(Averaged, world_size=world_size, callbacks=lambda: [CallModes()]).train()
    callbacks = [] if callback is None else [callback]
    actual = side(
        Averaged, stage, world_size, callbacks=lambda: [each() for each in callbacks]
    ).train()
    assert_same_weights(actual, expected)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_validation_evaluates_the_average(stage: int) -> None:
    (batch, *_) = batches(7)

    def losses(trainer: Any) -> Any:
        metrics = trainer.train()
        with torch.no_grad():
            return metrics["validation_loss"], float(trainer.model(**batch)["loss"])

    validated = side(
        Averaged, stage, num_epochs=1, validation_data_loader=Batches([batch])
    ).on_all_ranks(losses)
    assert validated[0][0] == pytest.approx(validated[0][1], abs=1e-6)


@pytest.mark.parametrize("stage, world_size", [(1, 2), (2, 2), (3, 1), (3, 2)])
def test_one_that_updates_shards_differently_is_refused(
    stage: int, world_size: int, expect_message
) -> None:
    expect_message(side(partial(Normalized, lr=0.1), stage, world_size).refusal())


def test_a_moving_average_of_one_with_modes_is_refused(expect_message) -> None:
    averages = side(
        Averaged, 2, moving_average=lambda model: ExponentialMovingAverage(model.named_parameters())
    )
    expect_message(averages.refusal())


def test_states_on_nvme_of_one_with_modes_are_refused(expect_message, tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    expect_message(side(Averaged, 3, zero=zero).refusal())


# States that callbacks change

adam = partial(torch.optim.Adam, lr=0.05)
BF16 = {"bf16": {"enabled": True}}


class ChangeStates(TrainerCallback):
    """Calls a function after the third step."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__("")
        self._change = change
        self._num_steps = 0

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._num_steps += 1
        if self._num_steps == 3:
            self._change(trainer)


class ResetAfterEpoch(TrainerCallback):
    """Resets all states before the checkpoint of the first epoch is saved."""

    def on_epoch(self, trainer: Any, metrics: Any, epoch: int, **kwargs: Any) -> None:
        if epoch == 0:
            trainer.optimizer.state.clear()


@pytest.mark.parametrize("stage, world_sizes", [(0, (1, 1)), (1, (2, 2)), (2, (2, 1)), (3, (2, 2))])
def test_states_that_were_reset_before_a_checkpoint_are_reset_after_it(
    stage: int, world_sizes: Any, tmp_path: Path
) -> None:
    arguments: Dict[str, Any] = {
        "data": lambda rank: batches(0),
        "callbacks": lambda: [ResetAfterEpoch("")],
    }
    expected = side(adam, **arguments).train()
    for num_epochs, world_size in enumerate(world_sizes, start=1):
        arguments["checkpointer"] = DeepSpeedCheckpointer(tmp_path)
        actual = side(adam, stage, world_size, num_epochs=num_epochs, **arguments).train(tmp_path)
    assert_same_weights(actual, expected)


FORMS: List[Callable[[Any, Any], Any]] = [
    lambda state, parameter: state[parameter]["exp_avg"].zero_(),
    lambda state, parameter: state.get(parameter),
    lambda state, parameter: parameter in state,
    lambda state, parameter: state.pop(parameter, None),
    lambda state, parameter: state.setdefault(parameter, {}),
    lambda state, parameter: state.__setitem__(parameter, {}),
    lambda state, parameter: state.__delitem__(parameter),
]


@pytest.mark.parametrize(
    "stage, world_size, precision", [(0, 1, BF16), (1, 2, {}), (2, 1, BF16), (3, 2, {}), (3, 1, {})]
)
def test_a_look_up_by_a_parameter_is_an_error_where_other_tensors_are_updated(
    stage: int, world_size: int, precision: Any, expect_message: Callable[[str], None]
) -> None:
    def look_up(trainer: Any) -> None:
        parameters = [trainer.model.layers[0].weight]
        if stage == 3:  # whose groups have the model's parameters
            parameters.append(trainer.optimizer.param_groups[0]["params"][0])
        for parameter in parameters:
            for form in FORMS:
                with pytest.raises(RuntimeError, match="'layers.0.weight'"):
                    form(trainer.optimizer.state, parameter)

    def replace(trainer: Any) -> None:
        trainer.optimizer.state = {trainer.model.layers[0].weight: {}}

    def train(change: Any) -> Any:
        callbacks = lambda: [ChangeStates(change)]  # noqa: E731
        return side(adam, stage, world_size, deepspeed_config=precision, callbacks=callbacks)

    unchanged = train(lambda trainer: None).train()
    assert_same_weights(train(look_up).train(), unchanged)
    messages = train(replace).on_all_ranks(error_of_training)
    # The other rank may have lost the connection.
    expect_message(next(message for message in messages if "'layers.0.weight'" in message))
