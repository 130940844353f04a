"""
Models that take gradients in their forward pass, or use parameters in ways of their own, against
AllenNLP's trainer in one process, which sees the batches of all workers in each step.
"""

from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.training.callbacks import TrainerCallback

from tests.fixtures.nested_autograd import MODELS, NUM_IDS, NUM_LABELS, NUM_TOKENS
from tests.support.experiment import StateDict, assert_same_weights
from tests.support.side_by_side import Batch, Batches, Side, state_arrays

BATCH_SIZE, NUM_BATCHES = 4, 8

TAKE_GRADIENTS = ["GradientPenalty", "BackwardOnInput", "FunctionalJvp", "PerExample"]


def batches() -> List[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "ids": torch.randint(NUM_IDS, (BATCH_SIZE, NUM_TOKENS), generator=generator),
            "label": torch.randint(NUM_LABELS, (BATCH_SIZE,), generator=generator),
        }
        for _ in range(NUM_BATCHES)
    ]


def side(name: str, stage: Optional[int] = None, world_size: int = 1, **arguments: Any) -> Side:
    return Side(
        lambda: MODELS[name](Vocabulary()),
        lambda rank: batches()[rank::world_size],
        stage,
        world_size,
        optimizer=partial(torch.optim.SGD, lr=0.2),
        num_epochs=3,
        num_gradient_accumulation_steps=4 // world_size,
        # So that every epoch is the best, whose weights the trainers end with.
        validation_data_loader=Batches(batches()[:2]),
        validation_metric="+num_resets",
        **arguments,
    )


def trained(side: Side) -> Tuple[StateDict, float]:
    """The weights, and the loss of the validation after the last epoch."""

    def train(trainer: Any) -> Tuple[Dict[str, Any], float]:
        loss = trainer.train()["validation_loss"]
        return state_arrays(trainer), loss

    arrays, loss = side.on_all_ranks(train)[0]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, loss


def assert_same(actual: Side, expected: Side, tolerance: float = 2e-5) -> None:
    (weights, loss), (expected_weights, expected_loss) = trained(actual), trained(expected)
    assert_same_weights(weights, expected_weights, tolerance)
    assert loss == pytest.approx(expected_loss, rel=tolerance)


@pytest.mark.parametrize(
    "name, stage", [("GradientPenalty", 0), ("FunctionalJvp", 1), ("GradientPenalty", 2)]
)
def test_gradients_taken_in_the_forward_pass_are_those_of_gradient_descent(name: str, stage: int):
    assert_same(side(name, stage, 2), side(name))


@pytest.mark.parametrize("stage", [3])
@pytest.mark.parametrize("name", TAKE_GRADIENTS)
def test_gradients_taken_in_the_forward_pass_are_refused_at_stage_3(
    name: str, stage: int, tmp_path: Path
):
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match='computes gradients.*"stage": 2'):
        side(name, stage).construct(0, tmp_path).train()
    assert torch.autograd._engine_run_backward is run_backward  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ReadBefore", "EncodedByTorch"])
def test_parameters_used_outside_of_their_modules_train_at_stage_3(name: str):
    assert_same(side(name, 3, 2), side(name))


class PenalizeWeight(TrainerCallback):
    """Adds the norm of a gradient to the loss, and goes backward twice through one graph."""

    reads_gradients = False

    def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
        loss = batch_outputs["loss"] / trainer.num_gradient_accumulation_steps
        weight = trainer.model.out.weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        with trainer.no_sync():
            trainer.engine.backward(loss, retain_graph=True, scale_wrt_gas=False)
        trainer.engine.backward(gradient.pow(2).sum(), scale_wrt_gas=False)
        return True


class PenalizeWeightAtOnce(TrainerCallback):
    def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
        loss = batch_outputs["loss"] / 4
        (gradient,) = torch.autograd.grad(loss, trainer.model.out.weight, create_graph=True)
        (loss + 2 * gradient.pow(2).sum()).backward()
        return True


def test_a_callback_takes_gradients_and_goes_backward_twice():
    assert_same(
        side("ReadBefore", 2, 2, callbacks=lambda: [PenalizeWeight("")]),
        side("ReadBefore", callbacks=lambda: [PenalizeWeightAtOnce("")]),
    )


@pytest.mark.parametrize("name, stage", [("Scripted", 0), ("Traced", 1), ("Scripted", 2)])
def test_torchscript_trains_below_stage_3(name: str, stage: int):
    assert_same(side(name, stage), side(name))


@pytest.mark.parametrize("name", ["Scripted", "Traced"])
def test_torchscript_is_refused_at_stage_3_by_the_name_of_the_module(name: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="module 'net'.*\"stage\": 2"):
        side(name, 3).construct(0, tmp_path).train()


def test_gradients_are_not_taken_through_checkpointed_activations(tmp_path: Path):
    checkpointing = side("GradientPenalty", 2, activation_checkpointing=["net"])
    with pytest.raises(RuntimeError, match="Checkpointing is not compatible with .grad()"):
        checkpointing.construct(0, tmp_path).train()
