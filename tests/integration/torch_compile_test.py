"""The trainer's "torch_compile": numbers are those without, and nothing of it is left behind."""

import re
from functools import partial
from typing import Any, Dict, List, NamedTuple

import pytest
import torch
import torch._dynamo  # once, and not in each forked worker
import torch._inductor.config  # noqa: F401
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.metrics import CategoricalAccuracy
from allennlp.training.moving_average import ExponentialMovingAverage
from torch import nn
from torch._dynamo.utils import counters

from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, numbers
from tests.support.workers import run_workers  # noqa: F401  # workers are forked

DIM, NUM_LABELS = 6, 3
LEAVES = {"leaf_module": {"classes": ["Layer"]}}
GRAPHS = {"backend": "aot_eager"}  # of both passes, without compiling them to anything
FORWARD_GRAPHS = {"backend": "eager"}  # of the forward pass
SGD = partial(torch.optim.SGD, lr=0.3)
ADAM = partial(torch.optim.Adam, lr=0.01)


class Layer(nn.Module):
    """Two layers in one, which a graph can hold as a whole."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.2)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(states)) * mask.unsqueeze(-1)
        return states + self.second(self.dropout(hidden)) / (self.number + 1)


class Classifier(Model):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(Vocabulary())
        self.embedding = nn.Embedding(10, DIM)
        self.layers = nn.ModuleList(Layer(i) for i in range(num_layers))
        self.head = nn.Linear(DIM, NUM_LABELS)
        self.accuracy = CategoricalAccuracy()

    def forward(self, ids, labels) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        mask = (ids > 0).float()
        states = self.embedding(ids)
        for layer in self.layers:
            states = layer(states, mask)
        logits = self.head(states.mean(dim=1))
        self.accuracy(logits, labels)
        return {"loss": nn.functional.cross_entropy(logits, labels)}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"accuracy": self.accuracy.get_metric(reset)}


def id_batches(rank: int, count: int = 4) -> List[Dict[str, torch.Tensor]]:
    """Of other lengths each time."""
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "ids": torch.randint(10, (4, 5 + i % 2), generator=generator),
            "labels": torch.randint(NUM_LABELS, (4,), generator=generator),
        }
        for i in range(count)
    ]


def compiled(stage: int, model: Any = Classifier, batches: Any = id_batches, **arguments) -> Side:
    """Trains on two workers, unless said otherwise."""
    zero = {**(LEAVES if stage == 3 else {}), **arguments.pop("zero", {})}
    return Side(
        model,
        batches,
        stage,
        zero=zero,
        **{"world_size": 2, "torch_compile": GRAPHS, **arguments},
    )


class Outcome(NamedTuple):
    weights: Dict[str, Any]
    metrics: Dict[str, float]
    num_graphs: int


def train(trainer: Any) -> Outcome:
    """Also counts the graphs that are compiled."""
    counters.clear()
    metrics = trainer.train()
    return Outcome(
        numbers(trainer),
        {key: value for key, value in metrics.items() if re.search("loss|accuracy", key)},
        counters["stats"]["unique_graphs"],
    )


def assert_same(actual: Side, expected: List[Outcome]) -> None:
    """On each rank."""
    weights = {name: torch.tensor(array) for name, array in expected[0].weights.items()}
    for outcome, expected_outcome in zip(actual.on_all_ranks(train), expected, strict=True):
        assert outcome.num_graphs > 0
        assert outcome.metrics == pytest.approx(expected_outcome.metrics, rel=1e-5, abs=1e-6)
        assert_same_weights({k: torch.tensor(v) for k, v in outcome.weights.items()}, weights)


def everything(**arguments: Any) -> Dict[str, Any]:
    """Validation, an average, and groups of micro-batches of which the last is short."""
    return {
        "num_gradient_accumulation_steps": 3,
        "validation_data_loader": Batches(id_batches(7)),
        "moving_average": lambda model: ExponentialMovingAverage(
            model.named_parameters(), decay=0.8
        ),
        **arguments,
    }


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What compiling imports the first time, workers find imported."""
    for backend in ("eager", "aot_eager"):
        torch.compile(torch.neg, backend=backend)(torch.ones(2))


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_numbers_are_those_of_gradient_descent(optimizer: Any) -> None:
    arguments = everything(optimizer=optimizer)
    expected = Side(Classifier, id_batches, world_size=2, **arguments).on_all_ranks(train)
    graphs = GRAPHS if optimizer is SGD else FORWARD_GRAPHS
    for stage in range(4):
        assert_same(compiled(stage, torch_compile=graphs, **arguments), expected)
