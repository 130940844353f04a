"""A worker is brought back to where it was at a checkpoint."""

import random
from typing import Any, Dict, Iterator, List, Sequence

import torch
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed.engine.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.training.callbacks import EpochMetricsCallback
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.replay import Replay
from allennlp_deepspeed.training.running_loss import RunningLoss
from allennlp_deepspeed.training.validation_history import ValidationHistory

STEPS = 4


class Counting(torch.nn.Module):
    """Has a state that no `state_dict()` knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0


class Remembering(TrainerCallback):
    def __init__(self) -> None:
        self.seen: List[float] = []

    def state_dict(self) -> Dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class InOnePass:
    """Validation data that go on where they stopped."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(2):
            self.position += 1
            yield self.position


class Run:
    """What a trainer does with a `Replay`, with random numbers in the place of data."""

    def __init__(
        self, keeps_validations: bool = False, own: Sequence[TrainerCallback] = ()
    ) -> None:
        self.progress = Progress()
        self.model = Counting()
        self.callback = Remembering()
        self.losses = RunningLoss()
        self.validation_data = InOnePass()
        self.validated: List[int] = []
        history = ValidationHistory(
            self.progress, self.validation_data, torch.device("cpu"), False, lambda where: None
        )
        self.replay = Replay(
            self.progress,
            self.model,  # type: ignore[arg-type]
            [self.callback, *own],
            self.losses,
            history,
            keeps_validations,
        )
        self.saved: Dict[str, Any] = {}

    def save(self) -> None:
        self.saved = {"progress": self.progress.state_dict(), "replay": self.replay.state_dict()}

    def load(self, saved: Dict[str, Any]) -> None:
        self.progress.load_state_dict(saved["progress"])
        self.replay.load_state_dict(saved["replay"])

    def train(self, num_epochs: int, save_at: Any = None, save_in_validation: int = -1) -> None:
        self.replay.start_training()
        for epoch in range(num_epochs):
            self.losses.start_epoch(has_regularizer=False)
            self.replay.start_epoch()
            for _ in range(STEPS):
                datum = random.random()
                if self.progress.is_replaying:
                    self.replay.skip_step()
                    continue
                self.losses.start_group(1)
                self.losses.add({"loss": torch.tensor(datum) + torch.rand(())})
                self.model.num_calls += 1
                self.callback.seen.append(datum)
                self.progress.complete_step()
                if self.progress.point == save_at:
                    self.save()
            self.replay.finish_steps()
            loss = self.losses.read().train_loss
            metrics = self.replay.finish_epoch({"loss": loss})
            if not self.progress.is_replaying_epoch:
                self.callback.seen.append(metrics["loss"])
                self.replay.start_validation()
                for i, batch in enumerate(self.validation_data):
                    self.callback.seen.append(random.random())
                    if epoch == save_in_validation and i == 1:
                        self.replay.interrupt_validation()
                        self.save()
                        return
                    self.validated.append(batch)
            self.progress.epochs_completed += 1
            self.progress.batches_in_epoch_completed = 0


def seed() -> None:
    random.seed(3)
    torch.manual_seed(3)


def test_a_training_that_is_continued_is_one_that_never_stopped() -> None:
    for save_at in [(0, 2), (0, STEPS), (1, 1), (2, 3)]:
        seed()
        whole = Run()
        whole.train(3, save_at)
        seed()
        continued = Run()
        continued.load(whole.saved)
        continued.train(3)
        assert continued.callback.seen == whole.callback.seen
        assert continued.model.num_calls == whole.model.num_calls
        assert continued.progress.total_batches_completed == 3 * STEPS
        assert continued.losses.read() == whole.losses.read()
        assert continued.validated == whole.validated[len(whole.validated) - 2 * (3 - save_at[0]) :]


def test_a_validation_that_was_interrupted_begins_anew() -> None:
    seed()
    whole = Run(keeps_validations=True)
    whole.train(3)
    seed()
    interrupted = Run(keeps_validations=True)
    interrupted.train(3, save_in_validation=1)
    seed()
    continued = Run(keeps_validations=True)
    continued.load(interrupted.saved)
    continued.train(3)
    assert continued.callback.seen == whole.callback.seen
    assert continued.validated == whole.validated[2:]


def test_losses_are_scaled_to_another_number_of_steps() -> None:
    seed()
    whole = Run()
    whole.train(1, (0, 2))
    half = whole.saved["replay"]["running_loss"]["train_loss"]
    whole.saved["progress"]["batches_in_epoch_completed"] = 1  # with twice as many workers
    continued = Run()
    continued.load(whole.saved)
    continued.replay.start_training()
    continued.replay.start_epoch()
    continued.replay.skip_step()
    assert continued.losses.read().train_loss == half / 2
    assert continued.progress.total_batches_completed == 2


def test_a_callback_of_the_trainers_own_may_come_and_go_with_its_key() -> None:
    before, after = EpochMetricsCallback(""), EpochMetricsCallback("")
    before.metrics = {"loss": 0.5}
    with_summary = Run(own=[CommsSummaryCallback(""), before])
    with_summary.train(1, save_at=(0, 2))
    without = Run(own=[after])
    without.load(with_summary.saved)
    assert after.metrics == {"loss": 0.5}
    assert without.callback.seen == with_summary.saved["replay"]["callbacks"][0]["seen"]
    without.train(1, save_at=(0, 3))
    again = Run(own=[CommsSummaryCallback(""), EpochMetricsCallback("")])
    again.load(without.saved)
    again.train(1)
    assert again.callback.seen == without.callback.seen
