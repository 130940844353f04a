"""The trainer's "torch_compile": numbers are those without, and nothing of it is left behind."""

import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import numpy as np
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

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.models.contrastive import ContrastiveModel
from tests.support import workers
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, error_of_training, state_arrays

DIM, NUM_LABELS = 6, 3
LEAVES = {"leaf_module": {"classes": ["Layer"]}}
GRAPHS = {"backend": "aot_eager"}  # of both passes, without compiling them to anything
FORWARD_GRAPHS = {"backend": "eager"}  # of the forward pass
SGD = partial(torch.optim.SGD, lr=0.3)


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
    """Of one length: each other one is compiled anew, which takes longer than the training."""
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "ids": torch.randint(10, (4, 5), generator=generator),
            "labels": torch.randint(NUM_LABELS, (4,), generator=generator),
        }
        for _ in range(count)
    ]


def compiled(stage: int, model: Any = Classifier, batches: Any = id_batches, **arguments) -> Side:
    """Trains on two workers, unless said otherwise."""
    zero = {**(LEAVES if stage == 3 else {}), **arguments.pop("zero", {})}
    return Side(
        model, batches, stage, zero=zero, **{"world_size": 2, "torch_compile": GRAPHS, **arguments}
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
        state_arrays(trainer),
        {key: value for key, value in metrics.items() if re.search("loss|accuracy", key)},
        counters["stats"]["unique_graphs"],
    )


def assert_same(actual: Side, expected: List[Outcome], tolerance: float = 1e-5) -> None:
    """On each rank."""
    weights = {name: torch.tensor(array) for name, array in expected[0].weights.items()}
    for outcome, expected_outcome in zip(actual.on_all_ranks(train), expected, strict=True):
        assert outcome.num_graphs > 0
        assert outcome.metrics == pytest.approx(expected_outcome.metrics, rel=tolerance)
        trained = {name: torch.tensor(array) for name, array in outcome.weights.items()}
        assert_same_weights(trained, weights, tolerance)


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


@pytest.fixture(scope="module")
def with_gradient_descent() -> List[Outcome]:
    return Side(Classifier, id_batches, world_size=2, **everything()).on_all_ranks(train)


@pytest.mark.parametrize("stage", range(4))
def test_numbers_are_those_of_gradient_descent(
    with_gradient_descent: List[Outcome], stage: int
) -> None:
    graphs = GRAPHS if stage in (2, 3) else FORWARD_GRAPHS
    assert_same(compiled(stage, **everything(torch_compile=graphs)), with_gradient_descent)


class WithNoise(Model):
    """From NumPy's generator."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        noise = torch.from_numpy(np.random.rand(*x.shape).astype("float32"))
        dropped = torch.nn.functional.dropout(self.linear(x) * noise, 0.2, self.training)
        return {"loss": dropped.square().sum()}


def noisy_batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    np.random.seed(1)
    return [{"x": torch.arange(8.0).view(2, 4) / (i + 8)} for i in range(4)]


def test_numpy_draws_as_uncompiled() -> None:
    expected = Side(WithNoise, noisy_batches).train()
    actual = Side(WithNoise, noisy_batches, 2, torch_compile={"backend": "eager"}).train()
    assert_same_weights(actual, expected)


def uncompiled(side: Side) -> List[Outcome]:
    """What the same side trains to without."""
    side.arguments = {**side.arguments, "torch_compile": None}
    return side.on_all_ranks(train)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            {"activation_checkpointing": [r"layers\.0$", "1.first"]},
            id="recomputed",
            marks=pytest.mark.soak,
        ),
        pytest.param({"deepspeed_config": {"bf16": {"enabled": True}}}, id="bf16"),
        pytest.param(
            {"is_constructed_partitioned": True}, id="partitioned", marks=pytest.mark.soak
        ),
    ],
)
def test_numbers_are_those_without_at_stage_3(arguments: Dict[str, Any]) -> None:
    graphs = FORWARD_GRAPHS if "is_constructed_partitioned" in arguments else GRAPHS
    arguments = {**arguments, "num_gradient_accumulation_steps": 2, "torch_compile": graphs}
    expected = uncompiled(compiled(3, **arguments))
    is_rounded = "deepspeed_config" in arguments
    assert_same(compiled(3, **arguments), expected, tolerance=2e-3 if is_rounded else 1e-5)


def with_other_weights() -> Classifier:
    model = Classifier()
    for parameter in model.parameters():
        parameter.data.add_(1)
    return model


@pytest.mark.soak
def test_a_recovered_training_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    def train(num_epochs: int, name: str, model: Any = Classifier) -> Dict[str, torch.Tensor]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        arguments = {"num_epochs": num_epochs, "checkpointer": DeepSpeedCheckpointer(directory)}
        return compiled(2, model, torch_compile=FORWARD_GRAPHS, **arguments).train(directory)

    train(1, "recovered")
    recovered = train(2, "recovered", with_other_weights)
    assert_same_weights(recovered, train(2, "uninterrupted"), tolerance=0)


class Encoder(ContrastiveModel):
    """Encodes numbers, with dropout, as layers do."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.ModuleList(Layer(i) for i in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def encode(self, **inputs: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {name: self._encode(tensor) for name, tensor in inputs.items()}

    def _encode(self, states: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(states[..., 0])
        for layer in self.layers:
            states = layer(states, mask)
        return states.mean(dim=1)

    def contrastive_loss(self, representations, **inputs: Any) -> Dict[str, torch.Tensor]:
        similarities = representations["one"] @ representations["other"].T / self.temperature
        labels = torch.arange(len(similarities))
        return {"loss": nn.functional.cross_entropy(similarities, labels)}


def pair_batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {name: torch.randn(6, 3, DIM, generator=generator) for name in ("one", "other")}
        for _ in range(3)
    ]


def test_chunks_of_grad_cache_drop_out_the_same_twice() -> None:
    arguments = {"grad_cache": {"chunk_size": 2}, "torch_compile": FORWARD_GRAPHS}
    expected = uncompiled(compiled(3, Encoder, pair_batches, **arguments))
    assert_same(compiled(3, Encoder, pair_batches, **arguments), expected)


def test_what_leaves_nothing_to_compile_is_refused() -> None:
    side = compiled(3, world_size=1, activation_checkpointing=[r"layers\.\d$"])
    assert "there is nothing to compile" in side.refusal()


class Squares(Model):
    """Each kernel that a compiler makes of a model takes it two seconds, of this one two."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.weight = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (inputs - torch.tanh(inputs * self.weight)).square().mean()}


@pytest.mark.soak
def test_generated_code_trains_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first kernel compiles PyTorch's headers, which takes half a minute of a core.
    monkeypatch.setattr(workers, "TIME_LIMIT", 180)

    def batches(rank: int) -> List[Dict[str, torch.Tensor]]:
        return [{"inputs": torch.linspace(-2, 1 + i, 3 * DIM).view(3, DIM)} for i in range(3)]

    side = compiled(2, Squares, batches, world_size=1, torch_compile=True)
    expected = Side(Squares, batches).on_all_ranks(train)
    assert_same(side, expected)


class CompilesItself(Model):
    """Compiles a part in its constructor."""

    def __init__(self, compile_part: Callable[["CompilesItself"], Any]) -> None:
        super().__init__(Vocabulary())
        self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        compile_part(self)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": (self.encode(inputs) - 1).square().mean()}

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(inputs).sin()

    def encode_twice(self, inputs: torch.Tensor) -> torch.Tensor:
        """Reads a weight of another module."""
        return nn.functional.linear(self.encoder(inputs), self.encoder[0].weight)


def _compile_method(model: Any) -> None:
    model.encode = torch.compile(model.encode, backend="eager")


def _compile_in_place(model: Any) -> None:
    model.encoder.compile(backend="eager")


def _compile_to_one_graph(model: Any) -> None:
    model.encode = torch.compile(model.encode, backend="eager", fullgraph=True)


def _compile_reader_of_weights(model: Any) -> None:
    model.encode = torch.compile(model.encode_twice, backend="eager")


def _wrap(model: Any) -> None:
    model.encoder = torch.compile(model.encoder, backend="eager")


def vectors(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(3, DIM, generator=generator)} for _ in range(3)]


@pytest.mark.parametrize(
    "compile_part, world_size",
    [pytest.param(_compile_method, 2, marks=pytest.mark.soak), (_compile_in_place, 1)],
)
def test_what_a_model_compiles_itself_trains_at_stage_3(
    compile_part: Callable[[Any], None], world_size: int
) -> None:
    sides = [
        Side(lambda: CompilesItself(compile_part), vectors, stage, world_size)
        for stage in (3, None)
    ]
    assert_same_weights(*(side.train() for side in sides))


@pytest.mark.parametrize("compile_part", [_compile_to_one_graph, _compile_reader_of_weights])
def test_compiled_code_that_cannot_gather_is_named(
    compile_part: Callable[[Any], None], expect_message: Callable[[str], None]
) -> None:
    side = Side(lambda: CompilesItself(compile_part), vectors, 3)
    (message,) = side.on_all_ranks(error_of_training)
    expect_message(message)


def test_a_wrapper_of_the_compiler_is_refused_at_stage_3(
    expect_message: Callable[[str], None],
) -> None:
    expect_message(Side(lambda: CompilesItself(_wrap), vectors, 3).refusal())
