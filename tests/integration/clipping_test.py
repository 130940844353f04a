"""What is clipped, penalized and scheduled, with optimizers and groups that aren't usual."""

from typing import Any, Dict, List

import pytest
import torch
from allennlp.common import Lazy
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn.regularizers import L2Regularizer, RegularizerApplicator
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from torch import nn

from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side


class Layers(Model):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(Vocabulary(), **arguments)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.second(self.first(x).tanh()) - x[:, :3]).square().mean()}


class AlwaysEvaluates(Layers):
    """With a penalty."""

    def __init__(self) -> None:
        super().__init__(regularizer=RegularizerApplicator([("weight", L2Regularizer(0.1))]))

    def train(self, mode: bool = True) -> "AlwaysEvaluates":
        return super().train(False)


def batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.rand(2, 4, generator=generator)} for _ in range(4)]


def take_signs(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.sign_()


class SignSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        take_signs(self)
        return super().step(closure)


def sign_sgd_by_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    optimizer.register_step_pre_hook(take_signs)
    return optimizer


def sign_sgd(parameters: Any) -> torch.optim.Optimizer:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)  # from now on its `step` calls hooks, too
    return SignSGD(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [sign_sgd_by_hook, sign_sgd])
def test_elements_are_clipped_once_before_the_optimizer_sees_them(optimizer: Any) -> None:
    arguments: Dict[str, Any] = {"optimizer": optimizer, "grad_clipping": 0.01}
    expected = Side(Layers, batches, **arguments).train()
    for stage in (0, 2, 3):
        assert_same_weights(Side(Layers, batches, stage, **arguments).train(), expected)


def test_a_model_that_stays_in_evaluation_mode_has_its_penalty() -> None:
    expected = Side(AlwaysEvaluates, batches).train()
    for stage in (2, 3):
        assert_same_weights(Side(AlwaysEvaluates, batches, stage).train(), expected)


def of_second_layer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[2:], lr=0.1)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_norm_of_gradients_that_the_optimizer_lacks_is_refused(stage: int) -> None:
    message = Side(Layers, batches, stage, optimizer=of_second_layer, grad_norm=0.1).refusal()
    assert "'first.weight'" in message and "'trainer.no_grad'" in message


def test_a_norm_of_zero_is_refused() -> None:
    assert "'trainer.grad_norm' is 0" in Side(Layers, batches, 2, grad_norm=0.0).refusal()


class OfGroups(LearningRateScheduler):
    """A factor for each group."""

    def __init__(self, optimizer: torch.optim.Optimizer, factors: List[float]) -> None:
        super().__init__(optimizer)
        self.factors = factors

    def get_values(self) -> List[float]:
        return [base * factor for base, factor in zip(self.base_values, self.factors)]


def after_an_empty_group(parameters: Any) -> torch.optim.Optimizer:
    first, second = list(parameters)[:2], list(parameters)[2:]
    return torch.optim.SGD([{"params": group} for group in ([], first, second)], lr=0.1)


def test_factors_of_groups_behind_an_empty_one_are_refused() -> None:
    schedule = Lazy(OfGroups, constructor_extras={"factors": [3.0, 1.0, 0.1]})
    message = Side(
        Layers, batches, 2, optimizer=after_an_empty_group, learning_rate_scheduler=schedule
    ).refusal()
    assert "'learning_rate_scheduler'" in message
