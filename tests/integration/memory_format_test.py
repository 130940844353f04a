"""
Parameters of any shape and layout train as they do with AllenNLP's own trainer.
"""

import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.offline import find_checkpoint
from allennlp_deepspeed.checkpoint.state_files import StateFiles
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side


class AnyLayout(Model):
    """Parameters that DeepSpeed can't view as bytes, or share between ranks."""

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.convolution = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        # Drawn, because the layers below are well conditioned as they are drawn after it: with
        # others a rounding error of 6e-8 at the start makes 5e-5 of `logit_scale` in the end.
        self.shift = nn.Parameter(torch.rand(2) * 0)
        self.frozen_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.frozen_transposed = nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
        self.output = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        image = self.convolution(x.view(-1, 4, 6, 1)).mean(dim=1).squeeze(-1)
        hidden = torch.tanh(image @ self.transposed) @ self.frozen_transposed
        logits = self.output(hidden) * self.logit_scale.exp() * self.frozen_scale
        logits = logits + self.shift
        return {"loss": logits.logsumexp(dim=-1).mean() + 0.1 * logits.pow(2).mean()}


def _model() -> Model:
    return AnyLayout(Vocabulary())


class WithEmpty(AnyLayout):
    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen_empty = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = super().forward(x)["loss"]
        return {"loss": loss + self.empty.sum() + self.frozen_empty.sum()}


def _batches(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(3, 24, generator=generator)} for _ in range(6)]


@pytest.fixture(scope="module")
def reference() -> Dict[str, torch.Tensor]:
    return Side(_model, _batches, world_size=2).train()


def test_parameters_of_any_shape_and_layout_train_as_they_are_constructed_partitioned(
    reference: Dict[str, torch.Tensor],
):
    side = Side(_model, _batches, 3, 2, is_constructed_partitioned=True, grad_norm=100.0)
    assert_same_weights(side.train(), reference)


@pytest.mark.parametrize("is_constructed_partitioned", [False, True])
def test_parameters_without_elements_are_refused_at_stage_3(is_constructed_partitioned: bool):
    side = Side(
        lambda: WithEmpty(Vocabulary()),
        _batches,
        3,
        is_constructed_partitioned=is_constructed_partitioned,
    )
    assert re.search("'empty' is empty.*\"stage\": 2", side.refusal())


def test_parameters_of_any_shape_and_layout_are_saved_recovered_resized_and_exported(
    reference: Dict[str, torch.Tensor], tmp_path: Path
):
    def side(**arguments: Any) -> Side:
        return Side(_model, _batches, 3, checkpointer=DeepSpeedCheckpointer(tmp_path), **arguments)

    side(world_size=2, num_epochs=1).train(tmp_path)
    recovered = side(world_size=2).train(tmp_path)
    assert_same_weights(recovered, reference)
    checkpoint = find_checkpoint(str(tmp_path))[0]
    assert_same_weights(StateFiles(checkpoint).state_dict(), reference)
    assert_same_weights(side(world_size=1).train(tmp_path), reference)


class Set(TrainerCallback):
    """Gives all that is trained one value after the last step."""

    def on_batch(self, trainer, *args: Any, **kwargs: Any) -> None:
        if kwargs["is_training"] and trainer.steps_completed == 12:
            with trainer.modified_weights(), torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(7)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_of_any_shape_and_layout_are_changed_in_bf16(stage: int):
    side = Side(
        _model,
        _batches,
        stage,
        deepspeed_config={"bf16": {"enabled": True}},
        callbacks=lambda: [Set("")],
    )
    for name, value in side.train().items():
        assert name.startswith("frozen") or bool((value == 7).all()), name
