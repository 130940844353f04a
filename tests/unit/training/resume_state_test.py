"""A worker is brought back to where it was at a checkpoint."""

from typing import Any, Dict

import torch
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed.engine.process.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.training.agreement import Agreement
from allennlp_deepspeed.training.callbacks import EpochMetricsCallback
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.resume_state import ResumeState
from allennlp_deepspeed.training.running_loss import RunningLoss
from allennlp_deepspeed.training.validation_history import ValidationHistory


class Remembering(TrainerCallback):
    def __init__(self, seen: float) -> None:
        self.seen = seen

    def state_dict(self) -> Dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def resume_state(*callbacks: TrainerCallback) -> ResumeState:
    progress = Progress()
    exchange = Agreement(lambda: torch.device("cpu")).exchange
    history = ValidationHistory(progress, [], exchange, False, lambda where: None)
    model: Any = torch.nn.Module()
    return ResumeState(
        progress, model, list(callbacks), RunningLoss(), history, False, lambda: None
    )


def test_a_callback_of_the_trainers_own_may_come_and_go_with_its_key() -> None:
    before, after = EpochMetricsCallback(""), EpochMetricsCallback("")
    before.metrics = {"loss": 0.5}
    with_summary = resume_state(Remembering(3.0), CommsSummaryCallback(""), before)
    remembering = Remembering(0.0)
    without = resume_state(remembering, after)
    without.load_state_dict(with_summary.state_dict())
    assert (remembering.seen, after.metrics) == (3.0, {"loss": 0.5})
    remembering.seen = 4.0
    again = Remembering(0.0)
    resume_state(again, CommsSummaryCallback(""), EpochMetricsCallback("")).load_state_dict(
        without.state_dict()
    )
    assert again.seen == 4.0
