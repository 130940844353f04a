"""
Models that take gradients in their forward pass, or use parameters in ways of their own, against
AllenNLP's trainer in one process, which sees the batches of all workers in each step.
"""

import tempfile
from typing import Any, Dict, List, Type

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import prepare_environment
from allennlp.data import Instance, Vocabulary
from allennlp.data.data_loaders import SimpleDataLoader
from allennlp.data.fields import TensorField
from allennlp.training import GradientDescentTrainer
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.engine import weights
from tests.fixtures.inner_gradients import MODELS, NUM_IDS, NUM_LABELS, NUM_TOKENS
from tests.support.experiment import StateDict, assert_same_weights
from tests.support.workers import run_workers

BATCH_SIZE, NUM_BATCHES = 4, 8

TAKE_GRADIENTS = ["GradientPenalty", "BackwardOnInput", "FunctionalJvp", "PerExample"]


class Result:
    def __init__(self, state_dict: StateDict, metrics: Dict[str, Any]) -> None:
        # Not as tensors, which workers would share with the test.
        self._arrays = {name: tensor.numpy() for name, tensor in state_dict.items()}
        self.validation_loss = metrics["validation_loss"]

    def weights(self) -> StateDict:
        return {name: torch.from_numpy(array) for name, array in self._arrays.items()}


def trained(
    name: str,
    trainer_class: Any = GradientDescentTrainer,
    accumulation: int = 4,
    rank: int = 0,
    world_size: int = 1,
    callbacks: List[Type[TrainerCallback]] = None,
    **arguments: Any,
) -> Result:
    if callbacks is None:
        callbacks = []
    prepare_environment(Params({"random_seed": 1, "numpy_seed": 1, "pytorch_seed": 1}))
    instances = [
        Instance(
            {
                "ids": TensorField(torch.randint(NUM_IDS, (NUM_TOKENS,))),
                "label": TensorField(torch.randint(NUM_LABELS, ())),
            }
        )
        for _ in range(BATCH_SIZE * NUM_BATCHES)
    ]
    batches = [instances[i : i + BATCH_SIZE] for i in range(0, len(instances), BATCH_SIZE)]
    vocab = Vocabulary()
    model = MODELS[name](vocab)
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_class(
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2),
            SimpleDataLoader(sum(batches[rank::world_size], []), BATCH_SIZE, vocab=vocab),
            # So that every epoch is the best, whose weights the trainers end with.
            validation_data_loader=SimpleDataLoader(instances[:8], BATCH_SIZE, vocab=vocab),
            validation_metric="+num_resets",
            num_epochs=3,
            cuda_device=-1,
            num_gradient_accumulation_steps=accumulation,
            callbacks=[callback(directory) for callback in callbacks],
            enable_default_callbacks=False,
            run_confidence_checks=False,
            serialization_dir=directory,
            world_size=world_size,
            **arguments,
        )
        if trainer_class is GradientDescentTrainer:
            metrics = trainer.train()
            return Result(model.state_dict(), metrics)
        with trainer.session():
            metrics = trainer.train()
            state_dict = weights.full_state_dict(trainer.engine, True, None)
        return Result(state_dict, metrics)


def train_in_two_workers(name: str, stage: int, **arguments: Any) -> Result:
    sections = arguments.pop("sections", {})
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    results = run_workers(
        2,
        lambda rank: trained(
            name,
            DeepSpeedTrainer,
            accumulation=2,
            rank=rank,
            world_size=2,
            local_rank=rank,
            distributed=True,
            deepspeed_config={"zero_optimization": zero, **sections},
            **arguments,
        ),
    )
    return results[0]


def assert_same(actual: Result, expected: Result, tolerance: float = 2e-5) -> None:
    assert_same_weights(actual.weights(), expected.weights(), tolerance)
    assert actual.validation_loss == pytest.approx(expected.validation_loss, rel=tolerance)


@pytest.mark.parametrize(
    "name, stage", [("GradientPenalty", 0), ("FunctionalJvp", 1), ("GradientPenalty", 2)]
)
def test_gradients_taken_in_the_forward_pass_are_those_of_gradient_descent(name: str, stage: int):
    assert_same(train_in_two_workers(name, stage), trained(name))


@pytest.mark.parametrize("stage", [3])
@pytest.mark.parametrize("name", TAKE_GRADIENTS)
def test_gradients_taken_in_the_forward_pass_are_refused_at_stage_3(name: str, stage: int):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match='takes gradients.*"stage": 2'):
        trained(name, DeepSpeedTrainer, deepspeed_config={"zero_optimization": zero})
    assert torch.autograd._engine_run_backward is run_backward  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ReadBefore", "EncodedByTorch"])
def test_parameters_used_outside_of_their_modules_train_at_stage_3(name: str):
    assert_same(train_in_two_workers(name, stage=3), trained(name))


class PenalizeWeight(TrainerCallback):
    """Adds the norm of a gradient to the loss, and goes backward twice through one graph."""

    reads_gradients = False

    def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
        loss = batch_outputs["loss"] / trainer.group_size
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
    expected = trained("ReadBefore", callbacks=[PenalizeWeightAtOnce])
    actual = train_in_two_workers("ReadBefore", 2, callbacks=[PenalizeWeight])
    assert_same(actual, expected)


@pytest.mark.parametrize("name, stage", [("Scripted", 0), ("Traced", 1), ("Scripted", 2)])
def test_torchscript_trains_below_stage_3(name: str, stage: int):
    config = {"zero_optimization": {"stage": stage}}
    assert_same(trained(name, DeepSpeedTrainer, deepspeed_config=config), trained(name))


@pytest.mark.parametrize("name", ["Scripted", "Traced"])
def test_torchscript_is_refused_at_stage_3_by_the_name_of_the_module(name: str):
    with pytest.raises(ConfigurationError, match="module 'net'.*\"stage\": 2"):
        trained(name, DeepSpeedTrainer, deepspeed_config={"zero_optimization": {"stage": 3}})


def test_gradients_are_not_taken_through_checkpointed_activations():
    with pytest.raises(RuntimeError, match="Checkpointing is not compatible with .grad()"):
        trained(
            "GradientPenalty",
            DeepSpeedTrainer,
            activation_checkpointing=["net"],
            deepspeed_config={"zero_optimization": {"stage": 2}},
        )
