"""
Metrics in trainings with several workers, whose forward passes call them as often as they like.
"""

import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
import torch.distributed as dist
from allennlp.common import Lazy
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import is_distributed
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn.util import dist_reduce, dist_reduce_sum
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import BooleanAccuracy, CategoricalAccuracy, Metric
from torch import nn

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from tests.support.communication import CommunicationCounter
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side

# Instances of each batch, by rank. An instance is a question, which is a call of a metric.
SIZES = ((3, 4, 1), (5, 1, 2))

Metrics = Dict[str, float]


class Questions(Metric):
    """Reduces once a question, as metrics of reading comprehension do."""

    summed_attributes = ("total", "seen")

    def __init__(self) -> None:
        self.reset()

    def __call__(self, score: float) -> None:  # type: ignore[override]
        self.total += dist_reduce_sum(score)
        self.seen += dist_reduce_sum(1)

    def get_metric(self, reset: bool = False) -> Metrics:
        metrics = {"score": self.total / max(self.seen, 1), "seen": self.seen}
        if reset:
            self.reset()
        return metrics

    def reset(self) -> None:
        self.total, self.seen = 0.0, 0


class Scorer:
    """A plain object in a metric."""

    summed_attributes = ("weight",)

    def __init__(self) -> None:
        self.weigh, self.weight, self.scale = abs, 0.0, 1.0


class Declared(Metric):
    """Says of what kinds of attributes the sums are."""

    summed_attributes = ("by_label", "by_parity", "histogram", "scorers")

    def __init__(self) -> None:
        self.device, self.last = None, 0.0
        self.reset()

    def __call__(self, score: float, label: int) -> None:  # type: ignore[override]
        self.device, self.last = torch.device("cpu"), score
        self.scorers[0].weight += self.scorers[0].weigh(score) * self.scorers[0].scale
        self.by_label[label] += 1
        self.by_parity[label % 2]["of"] += 1
        self.histogram[:, label] += 1

    def get_metric(self, reset: bool = False) -> Metrics:
        assert self.device is None or self.device.type == "cpu"
        assert self.histogram.shape == (2, 3)
        assert isinstance(self.by_label, Counter)
        metrics = {"weight": self.scorers[0].weight, "odd": self.by_parity[1]["of"]}
        metrics.update({f"label_{label}": self.by_label[label] for label in range(3)})
        metrics.update({f"in_{label}": self.histogram[1, label].item() for label in range(3)})
        if reset:
            self.reset()
        return metrics

    def reset(self) -> None:
        self.by_label: Dict[int, int] = Counter()
        self.by_parity: Any = defaultdict(lambda: {"of": 0})
        self.histogram = np.zeros((2, 3))
        self.scorers = [Scorer()]


class Highest(Metric):
    """Which the sums of counts are nothing of."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self, score: float) -> None:  # type: ignore[override]
        self.value = max(self.value, dist_reduce(score, dist.ReduceOp.MAX))

    def get_metric(self, reset: bool = False) -> Metrics:
        metrics = {"highest": self.value}
        self.value = 0.0 if reset else self.value
        return metrics


# Stand-ins of metrics of allennlp-models.
COREFERENCE = """
from allennlp.nn.util import dist_reduce_sum
from allennlp.training.metrics import Metric

class ConllCorefScores(Metric):
    def __init__(self):
        self.reset()

    def __call__(self, scores):
        for scorer in self.scorers:
            for score in scores:
                scorer.update(score)

    def get_metric(self, reset=False):
        result = sum(scorer.recall() for scorer in self.scorers)
        if reset:
            self.reset()
        return {"recall": result}

    def reset(self):
        self.scorers = [Scorer(metric) for metric in (Scorer.plain, Scorer.square)]

class Scorer:
    def __init__(self, metric):
        self.precision_numerator = self.precision_denominator = 0
        self.recall_numerator = self.recall_denominator = 0
        self.metric = metric

    def update(self, score):
        self.recall_numerator += dist_reduce_sum(self.metric(score))
        self.recall_denominator += dist_reduce_sum(1)

    def recall(self):
        return self.recall_numerator / max(self.recall_denominator, 1)

    @staticmethod
    def plain(score):
        return 0 if score < 0 else score  # an integer on some ranks

    @staticmethod
    def square(score):
        return score**2
"""
ROLES = """
from collections import defaultdict
from allennlp.common.util import is_distributed
from allennlp.training.metrics import Metric

class SrlEvalScorer(Metric):
    def __init__(self):
        self.reset()

    def __call__(self, labels):
        for label in labels:
            self._true_positives[label] += 1

    def get_metric(self, reset=False):
        if is_distributed():
            raise RuntimeError("Not supported.")
        result = {f"tag_{tag}": count for tag, count in self._true_positives.items()}
        if reset:
            self.reset()
        return result

    def reset(self):
        self._true_positives = defaultdict(int)
        self._false_positives = defaultdict(int)
        self._false_negatives = defaultdict(int)
"""


def library_metric(module_name: str, source: str) -> Callable[[], Metric]:
    module = ModuleType(f"allennlp_models.{module_name}")
    exec(source, vars(module))
    sys.modules[module.__name__] = module
    return getattr(module, source.split("class ")[1].split("(")[0])


class Answers(Model):
    """Calls its metrics once an instance, or once a batch."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(4, 3)
        self.accuracy, self.questions, self.declared = (
            CategoricalAccuracy(),
            Questions(),
            Declared(),
        )
        self.highest = Highest()
        library = {
            "coref.metrics.conll_coref_scores": COREFERENCE,
            "structured_prediction.metrics.srl_eval_scorer": ROLES,
        }
        self.library = [library_metric(*item)() for item in library.items()]
        self.collectives = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore
        logits = self.layer(x)
        scores, labels = x[:, 0].tolist(), y.tolist()
        self.count(logits, y, scores, labels)
        self.highest(max(scores))
        return {"loss": nn.functional.cross_entropy(logits, y)}

    @torch.compiler.disable
    def count(self, logits: Any, y: Any, scores: List[float], labels: List[int]) -> None:
        with CommunicationCounter() as counter:
            self.accuracy(logits, y)
            for score, label in zip(scores, labels):
                self.questions(score)
                self.declared(score, label)
            self.library[0](scores)
            self.library[1](labels)
        self.collectives += sum(each.calls for each in counter.read().values())

    def get_metrics(self, reset: bool = False) -> Metrics:
        metrics = {"accuracy": self.accuracy.get_metric(reset)}
        for metric in (self.questions, self.declared, self.highest, *self.library):
            metrics.update(metric.get_metric(reset))
        return metrics


def batches(seed: int, rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed + rank)
    return [
        {
            "x": torch.randn(size, 4, generator=generator),
            "y": torch.randint(3, (size,), generator=generator),
        }
        for size in SIZES[rank]
    ]


def expected_metrics(seed: int, num_batches: int = 3) -> Metrics:
    """In one process."""
    each = [batch for rank in range(2) for batch in batches(seed, rank)[:num_batches]]
    x, y = (torch.cat([batch[name] for batch in each]) for name in ("x", "y"))
    torch.manual_seed(7)
    model = Answers()
    assert not is_distributed()
    for instance, label in zip(x, y):
        model(instance[None], label[None])
    return model.get_metrics()


class Read(TrainerCallback):
    """What is there for callbacks after each batch, for the primary more often."""

    def __init__(self) -> None:
        super().__init__("")
        self.seen: List[Any] = []

    def on_batch(  # type: ignore[override]
        self,
        trainer: Any,
        inputs: Any,
        outputs: Any,
        metrics: Metrics,
        *args: Any,
        is_primary: bool,
        **_: Any,
    ) -> None:
        own = [trainer.model.get_metrics() for _ in range(1 + is_primary)][-1]
        self.seen.append((metrics["seen"], own["seen"], round(own["score"], 6)))


class Adding(TrainerCallback):
    """Adds another one when training starts."""

    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        trainer.callbacks.append(Read())


def side(**arguments: Any) -> Side:
    return Side(
        arguments.pop("model", Answers),
        lambda rank: batches(0, rank),
        **{
            "stage": 2,
            "world_size": 2,
            "num_epochs": 1,
            # All metrics are those of the same weights.
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            **arguments,
        },
    )


@pytest.mark.parametrize("callback", [Read, Adding])
def test_metrics_are_those_of_all_workers_without_a_collective_in_a_forward_pass(
    callback: Any,
) -> None:
    def train(trainer: Any) -> Any:
        metrics = trainer.train()
        (reading,) = [each for each in trainer.callbacks if isinstance(each, Read)]
        return metrics, reading.seen, trainer.model.collectives

    (metrics, seen, collectives), (of_rank_1, seen_by_1, _) = side(
        callbacks=lambda: [callback("")] if callback is Adding else [callback()],
        # The same for both workers.
        validation_data_loader=Batches(batches(2, 0)),
    ).on_all_ranks(train)
    assert collectives == 0
    expected = expected_metrics(0)
    for key, value in expected.items():
        assert metrics[f"training_{key}"] == pytest.approx(value), key
        assert of_rank_1[f"training_{key}"] == metrics[f"training_{key}"]
    assert metrics["validation_seen"] == 2 * sum(SIZES[0])
    # After three steps and three batches of the validation.
    counts = [8, 13, 16, 6, 14, 16]
    assert [each[:2] for each in seen] == [(count, count) for count in counts]
    assert seen == seen_by_1


@pytest.mark.parametrize(
    "torch_compile", [None, pytest.param({"backend": "eager"}, marks=pytest.mark.soak)]
)
def test_metrics_are_right_that_are_read_once_an_epoch(torch_compile: Any) -> None:
    def train(trainer: Any) -> Any:
        return trainer.train(), trainer.model.get_metrics()["seen"]

    once = side(log_every_num_steps=1000, torch_compile=torch_compile)
    for metrics, seen in once.on_all_ranks(train):
        found = {key: metrics[f"training_{key}"] for key in expected_metrics(0)}
        assert found == pytest.approx(expected_metrics(0))
        assert seen == 0


class Evaluating(TrainerCallback):
    """Evaluates on every worker after the second step, as many instances in passes of its own."""

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.steps_completed == 2:
            with torch.no_grad():
                trainer.model(**batches(2, 0)[0])
            self.found = trainer.model.get_metrics(reset=True)
            if dist.get_rank() == 0:
                assert trainer.model.get_metrics()["seen"] == 0


def test_metrics_in_a_callback_are_as_up_to_date_as_its_own_passes() -> None:
    def train(trainer: Any) -> Any:
        return trainer.train(), trainer.callbacks[0].found

    arguments: Dict[str, Any] = {"callbacks": lambda: [Evaluating("")], "stage": 2}
    for metrics, found in side(**arguments).on_all_ranks(train):
        assert found["seen"] == sum(SIZES[0][:2]) + sum(SIZES[1][:2]) + 2 * SIZES[0][0]
        # What the third step has counted.
        assert metrics["training_seen"] == SIZES[0][2] + SIZES[1][2]


class Peeking(Answers):
    """Reads a metric while others count."""

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, torch.Tensor]:
        outputs = super().forward(*args, **kwargs)
        self.seen = self.accuracy.get_metric()
        return outputs


class PeekingInEachCall(Peeking):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy.summed_attributes = ()  # type: ignore[attr-defined]


def test_reading_in_a_forward_pass_is_for_metrics_that_reduce_in_each_call() -> None:
    def train(trainer: Any) -> Any:
        try:
            return trainer.train()["training_accuracy"]
        except ConfigurationError as error:
            return str(error)

    for message in side(model=Peeking).on_all_ranks(train):
        assert "CategoricalAccuracy" in message and "summed_attributes" in message
    for accuracy in side(model=PeekingInEachCall).on_all_ranks(train):
        assert accuracy == pytest.approx(expected_metrics(0)["accuracy"])


class Reading(Metric):
    """Reads a metric in it in each call."""

    def __init__(self) -> None:
        self.inner, self.seen = BooleanAccuracy(), 0.0

    def get_metric(self, reset: bool = False) -> Metrics:
        return {"seen": self.seen, "accuracy": self.inner.get_metric(reset)}

    def reset(self) -> None:
        self.inner.reset()


class ReadingCounts(Reading):
    def __call__(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore
        self.inner(predictions, labels)
        self.seen += float(self.inner._total_count)


class ReadingMetrics(Reading):
    def __call__(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore
        self.inner(predictions, labels)
        self.seen += self.inner.get_metric()


class WithReading(Model):
    def __init__(self, metric: Metric) -> None:
        super().__init__(Vocabulary())
        self.layer, self.metric = nn.Linear(4, 3), metric

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore
        logits = self.layer(x)
        self.metric(logits.argmax(-1), y)
        return {"loss": nn.functional.cross_entropy(logits, y)}

    def get_metrics(self, reset: bool = False) -> Metrics:
        return self.metric.get_metric(reset)  # type: ignore[return-value]


@pytest.mark.parametrize("metric", [ReadingCounts, ReadingMetrics])
def test_a_metric_reads_the_counts_of_all_workers_from_one_in_it(metric: Any) -> None:
    def metrics_of_training(trainer: Any) -> Any:
        metrics = trainer.train()
        return [metrics[f"training_{name}"] for name in ("seen", "accuracy")]

    expected, actual = (
        side(model=lambda: WithReading(metric()), stage=stage).on_all_ranks(metrics_of_training)
        for stage in (None, 2)
    )
    assert actual == expected


class MakesMetricsLate(WithReading):
    """In the first step."""

    def __init__(self) -> None:
        super().__init__(CategoricalAccuracy())
        self.metrics: Dict[str, Metric] = {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore
        self.metric = self.metrics.setdefault("of_step", CategoricalAccuracy())
        logits = self.layer(x)
        self.metric(logits, y)
        return {"loss": nn.functional.cross_entropy(logits, y)}

    def get_metrics(self, reset: bool = False) -> Metrics:
        return {name: metric.get_metric(reset) for name, metric in self.metrics.items()}


def test_metrics_that_are_made_late_count_on_after_a_validation() -> None:
    def metrics_of_training(trainer: Any) -> Any:
        return trainer.train()["training_of_step"]

    validation = {"validation_data_loader": Batches(batches(0, 0)[:1])}
    expected, actual = (
        side(model=MakesMetricsLate, stage=stage, **validation, **more).on_all_ranks(
            metrics_of_training
        )
        for stage, more in ((None, {}), (2, {"validate_every_num_batches": 1}))
    )
    assert actual == expected


class Saving(TrainerCallback):
    """Asks for the state of the trainer on one worker, which waits for no other."""

    reads_metrics = False

    def on_batch(self, trainer: Any, *args: Any, is_primary: bool, **kwargs: Any) -> None:
        if is_primary:
            trainer.get_checkpoint_state()


def test_a_training_that_resumes_in_an_epoch_has_the_metrics_of_all_of_it(tmp_path: Path) -> None:
    trained = side(
        # Nothing is read at the steps that are saved, except to save.
        log_every_num_steps=1000,
        callbacks=lambda: [Saving("")],
        checkpointer=Lazy(
            DeepSpeedCheckpointer,
            constructor_extras={"save_every_num_batches": 2, "keep_most_recent_by_count": None},
        ),
    )

    def train(trainer: Any) -> Any:
        return {key: value for key, value in trainer.train().items() if "memory" not in key}

    expected = trained.on_all_ranks(train, tmp_path)
    shutil.rmtree(tmp_path / "checkpoint_e1_b0")
    resumed = trained.on_all_ranks(train, tmp_path)
    for metrics, wanted in zip(resumed, expected):
        metrics.pop("training_duration"), wanted.pop("training_duration")
        assert metrics == wanted
        assert metrics["training_seen"] == expected_metrics(0)["seen"]


def test_metrics_that_are_made_after_the_trainer_are_found() -> None:
    def train(trainer: Any) -> Any:
        trainer.model.questions = Questions()
        seen = trainer.train()["training_seen"]
        trainer.model.questions(1.0)
        return seen, trainer.model.questions.seen

    assert side().on_all_ranks(train) == [(expected_metrics(0)["seen"], 2)] * 2


def test_metrics_that_only_some_workers_have_are_refused() -> None:
    def train(trainer: Any) -> Any:
        if dist.get_rank() == 0:
            trainer.model.more = [Questions()]
        with pytest.raises(RuntimeError) as error:
            trainer.train()
        return str(error.value)

    for message in side().on_all_ranks(train):
        assert "more.0" in message


class Forgetful(Metric):
    """Of one worker: `AllenNLP` leaves it to metrics to sum."""

    def __init__(self, value: Callable[[int], float]) -> None:
        self.of, self.value = value, 0.0

    def __call__(self) -> None:  # type: ignore[override]
        self.value = self.of(dist.get_rank())

    def get_metric(self, reset: bool = False) -> Metrics:
        return {type(self).__name__.lower(): self.value}

    def reset(self) -> None:
        self.value = 0.0


class Agreeing(Forgetful):
    """The same on all workers, but for the order of a sum."""


class Remembering(Answers):
    def __init__(self) -> None:
        super().__init__()
        self.library = [Forgetful(lambda rank: rank), Agreeing(lambda rank: 0.5 + 1e-9 * rank)]

    def count(self, *args: Any) -> None:
        for metric in self.library:
            metric()

    def get_metrics(self, reset: bool = False) -> Metrics:
        return {k: v for metric in self.library for k, v in metric.get_metric(reset).items()}


def test_metrics_of_one_worker_s_instances_are_named(caplog: Any) -> None:
    def train(trainer: Any) -> List[str]:
        trainer.train()
        return [r.getMessage() for r in caplog.records if "training_" in r.getMessage()]

    messages, _ = side(model=Remembering, num_epochs=2).on_all_ranks(train)
    assert len(messages) == 1
    assert "training_forgetful" in messages[0]
    assert "training_agreeing" not in messages[0] and "loss" not in messages[0]


class Annealing(Model):
    """Counts how often its metrics are asked for."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.linear = nn.Linear(2, 2)
        self.accuracy = CategoricalAccuracy()
        self.weight = 1.0

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.linear(x)
        self.accuracy(logits, label)
        return {"loss": self.weight * nn.functional.cross_entropy(logits, label)}

    def get_metrics(self, reset: bool = False) -> Metrics:
        self.weight *= 0.9
        return {"accuracy": self.accuracy.get_metric(reset)}


def labelled_batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    return [{"x": torch.eye(2) + i, "label": torch.tensor([0, 1])} for i in range(4)]


def test_metrics_are_asked_for_as_often_as_by_gradient_descent() -> None:
    arguments: Dict[str, Any] = {
        "validation_data_loader": Batches(labelled_batches(0)),
        "validation_metric": "+accuracy",
    }
    expected = Side(Annealing, labelled_batches, **arguments).train()
    actual = Side(Annealing, labelled_batches, 2, log_every_num_steps=1, **arguments).train()
    assert_same_weights(actual, expected)
