"""A model goes on from what `attribute_states` has kept of it as if it had not stopped."""

import io
from collections import Counter, defaultdict, deque
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.modules.seq2seq_encoders import LstmSeq2SeqEncoder
from allennlp.training.metrics import CategoricalAccuracy, FBetaMeasure, Metric

from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates

Batch = Tuple[Any, ...]

NUM_CLASSES = 4


def vocabulary() -> Vocabulary:
    vocab = Vocabulary(non_padded_namespaces=["labels"])
    for label in ("O", "B-PER", "I-PER", "B-LOC"):
        vocab.add_token_to_namespace(label, "labels")
    return vocab


def classes(generator: torch.Generator) -> Batch:
    return (
        torch.rand(8, NUM_CLASSES, generator=generator),
        torch.randint(NUM_CLASSES, (8,), generator=generator),
    )


def number(generator: torch.Generator) -> Batch:
    return (int(torch.randint(100, (), generator=generator)),)


class Scorer:
    """A plain object with sums."""

    summed_attributes = ("total", "weight")

    def __init__(self) -> None:
        self.total, self.weight, self.function = 0, torch.zeros(1), len

    def __repr__(self) -> str:
        return f"{self.total} {self.weight}"


@Metric.register("keeps_everything")
class KeepsEverything(Metric):
    """Has attributes of every type that a metric keeps its sums in."""

    def __init__(self) -> None:
        self.counts: Dict[Any, int] = defaultdict(int)
        self.lists: Dict[str, List[int]] = defaultdict(list)
        self.tensors: Dict[str, torch.Tensor] = {}
        self.counter: Counter[str] = Counter()
        self.seen: set = set()
        self.window: deque = deque(maxlen=3)
        self.array = np.zeros(2)
        self.scalar = np.float64(0)
        self.inner = CategoricalAccuracy()
        self.by_label = {"x": CategoricalAccuracy(), "y": CategoricalAccuracy()}
        self.scorers = [Scorer(), Scorer()]
        self.function = len  # neither saved nor touched

    def __call__(self, number: int) -> None:  # type: ignore[override]
        self.counts[number] += 1
        self.counts["a", number] += 1
        self.lists[f"of {number % 2}"].append(number)
        self.tensors[str(number)] = torch.tensor([number])
        self.counter[str(number)] += 1
        self.seen |= {number, ("pair", number)}
        self.window.append(number)
        self.array += number
        self.scalar = self.scalar + np.float64(0.1)
        self.scorers[0].total += number
        self.scorers[1].weight += number
        for metric in (self.inner, *self.by_label.values()):
            metric(torch.eye(2), torch.tensor([number % 2, 1]))

    def get_metric(self, reset: bool = False) -> Dict[str, Any]:
        metrics = (self.inner, *self.by_label.values())
        values = {k: v for k, v in vars(self).items() if k not in ("inner", "by_label", "function")}
        values["seen"] = sorted(map(str, self.seen))
        return {**values, "accuracies": [metric.get_metric() for metric in metrics]}

    def reset(self) -> None:
        KeepsEverything.__init__(self)


METRICS: List[Tuple[Callable[[], Metric], Callable[[torch.Generator], Batch]]] = [
    (CategoricalAccuracy, classes),
    (lambda: FBetaMeasure(average="micro"), classes),
    (KeepsEverything, number),
]
METRIC_NAMES = [f"{i}-{type(construct()).__name__}" for i, (construct, _) in enumerate(METRICS)]


class ModelWithMetric(torch.nn.Module):
    """Has the same metric wherever a model may keep one."""

    def __init__(self, construct: Callable[[], Metric]) -> None:
        super().__init__()
        self.metric = construct()
        self._metrics: Dict[str, Any] = {"first": construct(), "nested": [construct()]}
        self._tuple = (construct(), "a constant")
        self.child = torch.nn.Module()
        self.child.metric = construct()

    def metrics(self) -> List[Metric]:
        nested = self._metrics["nested"]
        return [self.metric, self._metrics["first"], *nested, self._tuple[0], self.child.metric]


def through_a_file(states: Any) -> Any:
    """Saves the states and loads them, as a checkpoint does."""
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def started(model: torch.nn.Module) -> AttributeStates:
    """The attributes of a newly constructed model, before training changes them."""
    states = AttributeStates(model)
    states.start()
    return states


def load(model: torch.nn.Module, states: AttributeStates) -> None:
    AttributeStates(model).load_state_dict(through_a_file(states.state_dict()))


def same(actual: Any, expected: Any) -> bool:
    return str(actual) == str(expected)


def test_containers_stay_what_they_were():
    model, loaded = (ModelWithMetric(KeepsEverything) for _ in range(2))
    states = started(model)
    for metric in model.metrics():
        for number in range(5):
            metric(number)
    load(loaded, states)
    for metric, expected in zip(loaded.metrics(), model.metrics(), strict=True):
        for name, attribute in vars(expected).items():
            assert type(getattr(metric, name)) is type(attribute)
        for number in (5, 6):  # a missing key still has its default, and the window its length
            metric(number)
            expected(number)
        assert same(metric.get_metric(), expected.get_metric())
        assert metric.function is len


def test_a_stateful_encoder_carries_its_state_on():
    def encoder() -> LstmSeq2SeqEncoder:
        torch.manual_seed(0)
        return LstmSeq2SeqEncoder(3, 4, stateful=True)

    mask = torch.ones(2, 5, dtype=torch.bool)
    batches = torch.rand(3, 2, 5, 3)
    model, loaded = encoder(), encoder()
    states = started(model)
    for batch in batches[:2]:
        model(batch, mask)
    load(loaded, states)
    assert isinstance(loaded._states, tuple)
    assert torch.equal(loaded(batches[2], mask), model(batches[2], mask))


def test_numbers_and_tensors_of_a_module_are_kept_and_constants_left_alone():
    class Module(torch.nn.Module):
        def __init__(self, steps: int, device: str) -> None:
            super().__init__()
            self.steps = steps
            self.history = torch.full((2,), float(steps))
            self.weight = torch.nn.Parameter(torch.full((2,), float(steps)))
            self.names = {"device": device, "steps": steps}
            self.vocab = vocabulary()

    model, loaded = Module(5, "old"), Module(0, "new")
    states = started(model)
    model.steps, model.names["steps"] = 6, 6
    model.history += 1
    load(loaded, states)
    assert loaded.steps == 6
    assert torch.equal(loaded.history, model.history)
    assert torch.equal(loaded.weight, torch.zeros(2))
    assert loaded.names == {"device": "new", "steps": 6}


@pytest.mark.parametrize("construct, batch", METRICS, ids=METRIC_NAMES)
def test_what_has_changed_is_enough_for_a_metric(
    construct: Callable[[], Metric], batch: Callable[[torch.Generator], Batch]
):
    generator = torch.Generator().manual_seed(0)
    model = ModelWithMetric(construct)
    states = started(model)
    assert states.state_dict() == {}
    for arguments in [batch(generator), batch(generator)]:
        for metric in model.metrics():
            metric(*arguments)
    loaded = ModelWithMetric(construct)
    load(loaded, states)
    last = batch(generator)
    for metric, expected in zip(loaded.metrics(), model.metrics(), strict=True):
        metric(*last)
        expected(*last)
        assert same(metric.get_metric(), expected.get_metric())


class Constants(torch.nn.Module):
    """Constants of every type, and next to each of them something that training changes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.rank = number
        self.name = f"rank {number}"
        self.temperature = float("nan") if number == 0 else 0.5
        self.weights = torch.full((2,), float(number))
        self.adjacency = torch.eye(2 + number).to_sparse()
        self.table = np.full(2, number)
        self.accuracy = CategoricalAccuracy(top_k=1 + number)
        self.metrics = {"k": CategoricalAccuracy(top_k=1 + number)}
        self.steps = 0
        self.history = torch.zeros(2)
        self.sums = np.zeros(2)

    def train_once(self) -> None:
        self.steps += 1
        self.history += 1
        self.sums += 1
        for metric in (self.accuracy, *self.metrics.values()):
            metric(torch.eye(4), torch.tensor([0, 1, 2, 0]))

    def constants(self) -> List[str]:
        constants = (self.rank, self.name, self.temperature, self.weights, self.table)
        metrics = (self.accuracy, *self.metrics.values())
        return [*map(str, constants), str(self.adjacency), *(str(m._top_k) for m in metrics)]


def test_constants_are_as_they_are_constructed_now():
    model, loaded = Constants(0), Constants(1)
    states = started(model)
    model.train_once()
    load(loaded, states)
    assert loaded.constants() == Constants(1).constants()
    assert loaded.steps == 1
    assert torch.equal(loaded.history, model.history) and (loaded.sums == model.sums).all()
    assert loaded.accuracy.total_count == loaded.metrics["k"].total_count == 4


def test_what_training_has_changed_back_is_as_it_was_constructed():
    model, loaded = Constants(0), Constants(0)
    states = started(model)
    model.train_once()
    model.steps = 0
    load(loaded, states)
    assert (loaded.steps, float(loaded.history[0])) == (0, 1.0)


def test_modules_that_are_no_longer_there_are_left_out():
    model, loaded = torch.nn.Module(), torch.nn.Module()
    states = started(model)
    model.child = ModelWithMetric(CategoricalAccuracy)
    load(loaded, states)
    assert not list(loaded.children())
