from typing import Any, Dict, List, Optional

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model

from allennlp_deepspeed.models.language_modeling import TokenLossModel
from allennlp_deepspeed.training.validation_loss import ValidationLoss, evaluate
from tests.support.side_by_side import Batch, Batches


class Losses(TokenLossModel):
    """Whose losses of tokens are in its batches."""

    def num_loss_tokens(self, **inputs: Any) -> int:
        return len(inputs["losses"])

    def forward(self, losses: torch.Tensor, is_dummy: bool = False) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if is_dummy:
            return {}
        num_tokens = torch.tensor(len(losses))
        return {"loss": losses.sum() / num_tokens.clamp(min=1), "square": num_tokens**2}


def batches() -> List[Batch]:
    return [{"losses": torch.tensor(losses)} for losses in ([], [1.0, 2.0, 3.0], [4.0], [])]


def validated(
    loss: ValidationLoss, model: Model, data: List[Batch], penalty: Optional[float] = None
) -> Any:
    """As AllenNLP validates: sums over batches, and their number."""
    outputs = []
    for batch in data:
        loss.count_tokens(batch)
        outputs.append(model(**batch))
        loss.add(outputs[-1])
    losses = [output["loss"].item() for output in outputs if "loss" in output]
    return loss.weight_by_tokens((sum(losses), penalty, len(losses)))


def test_each_token_counts_alike_and_dummy_batches_do_not() -> None:
    model = Losses(Vocabulary())
    loss = ValidationLoss(model)
    data = [*batches(), {"losses": torch.tensor([9.0]), "is_dummy": True}]
    # Of 4 batches, with a penalty of 0.5 each.
    assert validated(loss, model, data, penalty=2.0) == (10.0, 2.0, 4)


def test_a_validation_that_begins_anew_forgets_what_there_was() -> None:
    model = Losses(Vocabulary())
    loss = ValidationLoss(model)
    validated(loss, model, batches()[:2])
    loss.start()
    assert validated(loss, model, batches()) == (10.0, None, 4)


class MeanOfBatches(Model):
    def forward(self, losses: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": losses.sum()}


def test_the_loss_of_another_model_stays_as_it_is() -> None:
    model = MeanOfBatches(Vocabulary())
    assert validated(ValidationLoss(model), model, batches(), 0.5) == (10.0, 0.5, 4)
    assert evaluate(model, Batches(batches()), -1, "")["loss"] == 2.5


def test_evaluation_weighs_by_tokens_unless_another_weight_is_given() -> None:
    model, data = Losses(Vocabulary()), Batches(batches())
    assert evaluate(model, data, -1, "")["loss"] == pytest.approx(10 / 4)
    data = Batches(batches()[1:])
    assert evaluate(model, data, -1, "square")["loss"] == pytest.approx((9 * 2 + 4) / 10)
