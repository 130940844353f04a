"""Trains with one optimizer at every stage, in forked workers."""

import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn

from allennlp_deepspeed import DeepSpeedCheckpointer
from tests.support.side_by_side import Side, trained
from tests.support.workers import run_workers

STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-5


class Layers(Model):
    """A matrix of more numbers than an 8-bit optimizer keeps in fp32, and five smaller weights."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(
            nn.Linear(70, 70), nn.Tanh(), nn.LayerNorm(70), nn.Linear(70, 3)
        )

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.layers(x)
        return {"loss": logits.logsumexp(dim=-1).mean() + logits.pow(2).mean()}


class Modes(TrainerCallback):
    """Calls `train` and `eval` of an optimizer that has them, as its README asks for."""

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        getattr(trainer.optimizer, "train", lambda: None)()

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        getattr(trainer.optimizer, "eval", lambda: None)()


def batches(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": torch.randn(4, 70, generator=generator)} for _ in range(4)]


def groups(parameters: Any) -> List[Dict[str, Any]]:
    """Three groups: matrices, and two without weight decay."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    return [
        {"params": matrices},
        {"params": vectors[:2], "weight_decay": 0.0},
        {"params": vectors[2:], "weight_decay": 0.0},
    ]


class Result(NamedTuple):
    """
    # Parameters

    weights : `str`
        How the weights are those of AllenNLP's trainer.
    recovery : `str`
        How those of a recovered training are those of an uninterrupted one.
    """

    weights: str
    recovery: str = ""


def results(
    construct: Callable[[Any], torch.optim.Optimizer], world_size: int
) -> Dict[int, Result]:
    """What has become of a training with an optimizer at each stage."""

    def side(**arguments: Any) -> Side:
        return Side(
            Layers,
            batches,
            world_size=world_size,
            optimizer=lambda parameters: construct(groups(parameters)),
            **arguments,
        )

    def train_all(rank: int) -> Any:
        expected = side(callbacks=lambda: [Modes("")]).on_rank(rank, trained)
        outcomes: Dict[int, Result] = {}
        for stage in STAGES:
            try:
                actual = side(stage=stage).on_rank(rank, trained)
            except ConfigurationError as error:
                outcomes[stage] = Result(f"refused: {error}")
                continue
            recovered = _recovered(rank, stage, side)
            outcomes[stage] = Result(_difference(actual, expected), _difference(recovered, actual))
        return outcomes

    directory = tempfile.mkdtemp()

    def _recovered(rank: int, stage: int, side: Callable[..., Side]) -> Any:
        path = Path(directory) / str(stage)
        path.mkdir(exist_ok=True)
        for num_epochs in (1, 2):
            weights = side(
                stage=stage, num_epochs=num_epochs, checkpointer=DeepSpeedCheckpointer(path)
            ).on_rank(rank, trained, path)
        return weights

    return run_workers(world_size, train_all)[0]


def _difference(actual: Any, expected: Any) -> str:
    largest = max(float(abs(actual[name] - expected[name]).max()) for name in expected)
    if largest == 0:
        return "equal"
    return "exact" if largest < TOLERANCE else f"differs by {largest:.0e}"
