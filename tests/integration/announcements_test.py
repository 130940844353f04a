"""What the console says of a training that ends early, or continues in another way."""

import logging
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.learning_rate_schedulers import PolynomialDecay

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.announcements import announcement
from tests.support.side_by_side import Batches, Side


class Line(Model):
    """Whose loss has no gradient in validation, and gets no better."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = self.line(x).pow(2).mean()
        return {"loss": loss if self.training else torch.ones(())}


class Shown(logging.Handler):
    """The lines that the console would show."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if announcement(record) is not None or record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


def shown_by(trainer: Any) -> str:
    handler, root = Shown(), logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        trainer.train()
    finally:
        root.removeHandler(handler)
    return "\n".join(handler.lines)


def train(
    directory: Path, world_size: int = 1, num_epochs: int = 2, accumulation: int = 1, **kwargs: Any
) -> str:
    side = Side(
        Line,
        lambda rank: Batches([{"x": torch.ones(2, 1)} for _ in range(4)]),
        stage=2,
        world_size=world_size,
        num_epochs=num_epochs,
        num_gradient_accumulation_steps=accumulation,
        **kwargs,
    )
    return side.on_all_ranks(shown_by, directory)[0]


def test_a_training_that_stops_early_says_so(tmp_path: Path) -> None:
    validation = Batches([{"x": torch.ones(2, 1)}])
    shown = train(tmp_path, num_epochs=9, patience=2, validation_data_loader=validation)
    (line,) = [line for line in shown.splitlines() if "Early stopping" in line]
    assert "epoch 3" in line and "2 epochs ('trainer.patience')" in line and "loss" in line
    assert "Early stopping" not in train(
        tmp_path / "b", patience=2, validation_data_loader=validation
    )


def checkpointer(directory: Path) -> DeepSpeedCheckpointer:
    return DeepSpeedCheckpointer(directory)


def test_a_step_of_another_size_is_warned_of(tmp_path: Path) -> None:
    def continued(world_size: int, num_epochs: int, accumulation: int = 1) -> Optional[str]:
        kwargs = {"checkpointer": checkpointer(tmp_path)}
        shown = train(tmp_path, world_size, num_epochs, accumulation, **kwargs)
        lines = [line for line in shown.splitlines() if "The global batch size is" in line]
        return lines[0] if lines else None

    assert continued(2, num_epochs=1) is None
    line = continued(1, num_epochs=2)
    assert line is not None and " 1 now, and was 2 before" in line
    assert continued(1, num_epochs=3) is None
    assert continued(2, num_epochs=4) is not None
    assert continued(1, num_epochs=5, accumulation=2) is None


class Decay:
    """Constructs a schedule that begins at the full learning rate."""

    def __call__(self, optimizer: torch.optim.Optimizer) -> PolynomialDecay:
        return PolynomialDecay(optimizer, num_epochs=3, num_steps_per_epoch=4)


def test_a_decay_that_continues_does_not_rise(tmp_path: Path) -> None:
    from allennlp.common import Lazy

    def optimizer_line(num_epochs: int) -> str:
        schedule = Lazy(lambda optimizer, **_: Decay()(optimizer))
        kwargs = {"checkpointer": checkpointer(tmp_path), "learning_rate_scheduler": schedule}
        shown = train(tmp_path, num_epochs=num_epochs, **kwargs)
        return next(line for line in shown.splitlines() if line.strip().startswith("optimizer"))

    assert "warming up" not in optimizer_line(1)
    continued = optimizer_line(2)
    assert "warming up" not in continued and "learning rate" in continued
