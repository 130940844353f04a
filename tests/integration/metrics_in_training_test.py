"""
Metrics in trainings with several workers, whose forward passes call them as often as they like.
"""

from typing import Any, Dict, List

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn.util import dist_reduce_sum
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import CategoricalAccuracy, Metric
from torch import nn

from tests.support.communication import CommunicationCounter
from tests.support.side_by_side import Batches, Side

# Instances of each batch, by rank.
SIZES = ((3, 4), (5, 1))


class Scorer:
    """A plain object in a metric, as those of coreference have."""

    def __init__(self) -> None:
        self.weigh, self.weight = abs, 0.0


class Scores(Metric):
    """Of one instance in each call, in what kinds of attributes metrics have."""

    def __init__(self) -> None:
        self.device, self.scorers = None, [Scorer()]
        self.total, self.seen = 0.0, 0
        self.labels: Dict[int, int] = {}

    def __call__(self, score: float, label: int) -> None:  # type: ignore[override]
        self.device = torch.device("cpu")
        self.scorers[0].weight += self.scorers[0].weigh(score)
        self.total += dist_reduce_sum(score)
        self.seen += dist_reduce_sum(1)
        self.labels[label] = self.labels.get(label, 0) + 1

    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        assert self.device is None or self.device.type == "cpu"
        metrics = {"score": self.total / max(self.seen, 1), "seen": self.seen}
        metrics["weight"] = self.scorers[0].weight
        metrics.update({f"label_{label}": self.labels.get(label, 0) for label in range(3)})
        if reset:
            self.reset()
        return metrics

    def reset(self) -> None:
        self.total, self.seen, self.labels = 0.0, 0, {}
        self.scorers = [Scorer()]


class Questions(Model):
    """Calls a metric once an instance, and another once a batch."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(4, 3)
        self.accuracy, self.scores = CategoricalAccuracy(), Scores()
        self.collectives = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore
        logits = self.layer(x)
        with CommunicationCounter() as counter:
            self.accuracy(logits, y)
            for value, label in zip(x[:, 0].tolist(), y.tolist()):
                self.scores(value, label)
        self.collectives += sum(each.calls for each in counter.read().values())
        return {"loss": nn.functional.cross_entropy(logits, y)}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"accuracy": self.accuracy.get_metric(reset), **self.scores.get_metric(reset)}


class Read(TrainerCallback):
    """What is there for callbacks after each batch."""

    def __init__(self) -> None:
        super().__init__("")
        self.seen: List[Any] = []

    def on_batch(  # type: ignore[override]
        self, trainer: Any, inputs: Any, outputs: Any, metrics: Dict[str, Any], *args: Any, **_: Any
    ) -> None:
        own = trainer.model.get_metrics()
        self.seen.append((metrics["seen"], own["seen"], round(own["score"], 6)))


def batches(seed: int, rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed + rank)
    return [
        {
            "x": torch.randn(size, 4, generator=generator),
            "y": torch.randint(3, (size,), generator=generator),
        }
        for size in SIZES[rank]
    ]


def test_metrics_are_those_of_all_workers_without_a_collective_in_a_forward_pass() -> None:
    def train(trainer: Any) -> Any:
        return trainer.train(), trainer._callbacks[0].seen, trainer.model.collectives

    side = Side(
        Questions,
        lambda rank: batches(0, rank),
        stage=2,
        world_size=2,
        callbacks=lambda: [Read()],
        num_epochs=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        validation_data_loader=Batches(batches(2, 0)),
    )
    (metrics, seen, collectives), (of_rank_1, seen_by_1, _) = side.on_all_ranks(train)
    assert collectives == 0
    everything = [batch for rank in range(2) for batch in batches(0, rank)]
    x, y = (torch.cat([batch[name] for batch in everything]) for name in ("x", "y"))
    torch.manual_seed(7)
    right = (Questions().layer(x).argmax(-1) == y).float().mean().item()
    expected = {"accuracy": right, "score": x[:, 0].mean().item(), "seen": len(y)}
    expected["weight"] = x[:, 0].abs().sum().item()
    expected.update({f"label_{label}": int((y == label).sum()) for label in range(3)})
    for key, value in expected.items():
        assert metrics[f"training_{key}"] == pytest.approx(value), key
        assert of_rank_1[f"training_{key}"] == metrics[f"training_{key}"]
    assert metrics["validation_seen"] == 2 * sum(SIZES[0])
    # After both steps and both batches of the validation.
    assert [each[:2] for each in seen] == [(8, 8), (13, 13), (6, 6), (14, 14)]
    assert seen == seen_by_1


def test_metrics_are_allennlps_again_after_training() -> None:
    def train(trainer: Any) -> Any:
        trainer.train()
        trainer.model.scores(1.0, 0)
        return vars(trainer.model.scores)

    side = Side(Questions, lambda rank: batches(0, rank), stage=2, world_size=2, num_epochs=1)
    of_rank_0, of_rank_1 = side.on_all_ranks(train)
    assert set(of_rank_0) == set(vars(Scores()))
    assert of_rank_0["seen"] == of_rank_1["seen"] == 2
