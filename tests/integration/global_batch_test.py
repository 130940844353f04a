"""
`"num_gradient_accumulation_steps": "auto"` gives the weights of the global batch in one piece,
however many micro-batches and workers share it.
"""

import copy
import math
import random
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Type
from unittest import mock

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import BasicClassifier, Model
from allennlp.modules.seq2vec_encoders import BagOfEmbeddingsEncoder
from allennlp.modules.text_field_embedders import BasicTextFieldEmbedder
from allennlp.modules.token_embedders import Embedding
from allennlp.nn import RegularizerApplicator
from allennlp.nn.regularizers import L2Regularizer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import CategoricalAccuracy

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.engine.parameters import free_memory
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batch, Batches, Side, state_arrays

GLOBAL_BATCH_SIZE, LENGTH = 12, 6
# Of an epoch, the last step with fewer, which workers have in uneven shares.
STEPS = [12, 12, 5]


class MeanOverTokens(Model):
    """As a user writes one: over how many tokens its loss is a mean, it says itself."""

    def __init__(self) -> None:
        regularizer = RegularizerApplicator([("output.weight", L2Regularizer(0.05))])
        super().__init__(Vocabulary(), regularizer)
        self.embedding = torch.nn.Embedding(9, 4)
        self.output = torch.nn.Linear(4, 3)
        self.register_buffer("num_seen", torch.tensor(0))
        self.accuracy = CategoricalAccuracy()

    def num_loss_terms(self, **inputs: Any) -> torch.Tensor:
        return (inputs["tags"] != -100).sum()

    def forward(self, words, tags, metadata, flag) -> Dict[str, Any]:  # type: ignore[override]
        assert len(words) == len(metadata) and flag == "of all"
        scores = self.output(torch.tanh(self.embedding(words)))
        self.accuracy(scores, tags.clamp(min=0), tags != -100)
        if self.training:
            self.num_seen += len(words)
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), tags.flatten(), reduction="sum"
        )
        num_tokens = self.num_loss_terms(tags=tags).clamp(min=1)
        return {"loss": losses / num_tokens, "scores": scores}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"accuracy": self.accuracy.get_metric(reset)}


class Loader(Batches):
    """Of batches of a size."""

    def __init__(self, batches: List[Batch], batch_size: int) -> None:
        super().__init__(batches)
        self.batch_size = batch_size


def global_batches() -> List[Batch]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for size in STEPS:
        words = torch.randint(9, (size, LENGTH), generator=generator)
        # Of tokens some have none.
        lengths = torch.randint(LENGTH + 1, (size, 1), generator=generator)
        tags = torch.where(torch.arange(LENGTH) < lengths, words % 3, -100)
        metadata = [{"id": i} for i in range(size)]
        batches.append({"words": words, "tags": tags, "metadata": metadata, "flag": "of all"})
    return batches


def labeled_batches() -> List[Batch]:
    """For AllenNLP's classifier. Of labels some are those that PyTorch leaves out."""
    return [
        {
            "tokens": {"tokens": {"tokens": batch["words"] + 1}},
            "label": torch.where(batch["tags"][:, 1] == -100, -100, batch["words"][:, 0] % 2),
        }
        for batch in global_batches()
    ]


def shares(
    world_size: int, batches: Callable[[], List[Batch]] = global_batches
) -> Callable[[int], Loader]:
    def of(rank: int) -> Loader:
        def every(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: every(item) for name, item in value.items()}
            return value if isinstance(value, str) else value[rank::world_size]

        return Loader([every(batch) for batch in batches()], GLOBAL_BATCH_SIZE // world_size)

    return of


def with_memory(num_bytes: Optional[int], function: Callable[[], Any]) -> Any:
    """What there seems to be left on rank 0, the others have plenty of it."""

    def free_bytes(device: torch.device) -> int:
        return num_bytes if torch.distributed.get_rank() == 0 else 10**12  # type: ignore[return-value]

    if num_bytes is None:
        return function()
    with mock.patch.object(free_memory, "free_bytes", free_bytes):
        return function()


def trained(trainer: Any) -> Tuple[Dict[str, Any], Dict[str, Any], Any]:
    """Weights and buffers, metrics of the last epoch, and what has been found."""
    is_ours = isinstance(trainer, DeepSpeedTrainer)
    metrics = {k: v for k, v in trainer.train().items() if re.search("loss|accuracy", k)}
    part = trainer.parts()["micro_batches"].state_dict() if is_ours else None
    if is_ours:  # six steps of a whole batch, as DeepSpeed counts
        assert trainer.engine.global_samples == 2 * len(STEPS) * GLOBAL_BATCH_SIZE
    return state_arrays(trainer), metrics, part


def in_micro_batches(
    model: Model,
    stage: int,
    world_size: int = 2,
    batches: Callable[[], List[Batch]] = global_batches,
    **arguments: Any,
) -> Side:
    return Side(
        lambda: copy.deepcopy(model),
        shares(world_size, batches),
        stage,
        world_size,
        num_gradient_accumulation_steps="auto",
        global_batch_size=GLOBAL_BATCH_SIZE,
        **arguments,
    )


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(2)
    return MeanOverTokens()


@pytest.fixture(scope="module")
def expected(model: Model) -> Any:
    side = Side(lambda: copy.deepcopy(model), shares(1))
    side.arguments["grad_norm"] = 0.5
    return side.on_all_ranks(trained)[0]


_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
_OFFLOAD_ALL = {**_OFFLOAD, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    "world_size, stage, num_bytes, size, arguments",
    [
        (1, 0, 5000, 4, {}),
        (1, 2, None, 12, {}),
        (2, 0, 3000, 2, {}),
        (2, 2, 4200, 4, {}),
        (2, 3, 1, 1, {}),
        (2, 2, 1, 1, {"gradient_synchronization": "step"}),
        (2, 2, 1, 1, {"gradient_synchronization": "micro_batch", "zero": _OFFLOAD}),
        (2, 3, 1, 1, {"zero": _OFFLOAD_ALL}),
        (2, 2, 1, 1, {"torch_compile": {"backend": "eager"}}),
    ],
)
def test_numbers_are_those_of_the_global_batch(
    model: Model,
    expected: Any,
    world_size: int,
    stage: int,
    num_bytes: Optional[int],
    size: int,
    arguments: Dict[str, Any],
) -> None:
    side = in_micro_batches(model, stage, world_size, grad_norm=0.5, **arguments)
    results = with_memory(num_bytes, lambda: side.on_all_ranks(trained))
    arrays, metrics, _ = expected
    weights = {name: torch.tensor(array) for name, array in arrays.items() if name != "num_seen"}
    # In two epochs. The search leaves no trace in it.
    seen_by_rank_0 = 2 * sum(math.ceil(num_instances / world_size) for num_instances in STEPS)
    assert results[0][0]["num_seen"] == seen_by_rank_0
    for arrays, actual_metrics, part in results:
        del arrays["num_seen"]
        actual = {name: torch.tensor(array) for name, array in arrays.items()}
        assert_same_weights(actual, weights)
        if size > 1:  # of 3 instances and of 2 there are as many micro-batches
            assert actual_metrics["training_accuracy"] == metrics["training_accuracy"]
        for name in ("training_loss", "training_reg_loss"):
            assert actual_metrics[name] == pytest.approx(metrics[name], rel=1e-5)
        assert part["found"][0][0] == size


@pytest.mark.parametrize(
    "stage, precision, num_bytes",
    [
        (2, {"bf16": {"enabled": True}}, 1),
        (2, {"fp16": {"enabled": True, "loss_scale": 128}}, None),
        (3, {"fp16": {"enabled": True, "initial_scale_power": 10}}, 1),
    ],
)
def test_half_precision_is_near_the_global_batch(
    model: Model, expected: Any, stage: int, precision: Dict[str, Any], num_bytes: Optional[int]
) -> None:
    side = in_micro_batches(model, stage, deepspeed_config=precision, grad_norm=0.5)
    before = {name: p.detach() for name, p in model.named_parameters()}
    for arrays, _, _ in with_memory(num_bytes, lambda: side.on_all_ranks(trained)):
        for name, start in before.items():
            moved = torch.tensor(arrays[name]) - start
            wanted = torch.tensor(expected[0][name]) - start
            # A wrong scale of a step would be seen, and so would a step too many.
            assert (moved - wanted).norm() < 0.1 * wanted.norm(), name


class ClassWeighted(MeanOverTokens):
    """Its loss is a mean over a sum of weights, which is no integer."""

    weights = torch.tensor([0.1, 0.5, 1.7])

    def num_loss_terms(self, **inputs: Any) -> torch.Tensor:
        tags = inputs["tags"]
        return (self.weights[tags.clamp(min=0)] * (tags != -100)).sum()

    def forward(self, words, tags, metadata, flag) -> Dict[str, Any]:  # type: ignore[override]
        scores = super().forward(words, tags, metadata, flag)["scores"].flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(
            scores, tags.flatten(), weight=self.weights, reduction="sum"
        )
        total = self.num_loss_terms(tags=tags)
        return {"loss": losses / torch.where(total > 0, total, 1.0)}


def basic_classifier() -> Model:
    vocab = Vocabulary({"tokens": {f"word{i}": 1 for i in range(9)}, "labels": {"a": 1, "b": 1}})
    embedding = Embedding(embedding_dim=4, num_embeddings=vocab.get_vocab_size("tokens"))
    embedder = BasicTextFieldEmbedder({"tokens": embedding})
    return BasicClassifier(vocab, embedder, BagOfEmbeddingsEncoder(4, averaged=True))


@pytest.mark.parametrize(
    "construct, batches, stage",
    [(ClassWeighted, global_batches, 2), (basic_classifier, labeled_batches, 3)],
)
def test_parts_may_weigh_fractions_and_nothing(
    construct: Callable[[], Model], batches: Callable[[], List[Batch]], stage: int
) -> None:
    torch.manual_seed(2)
    model = construct()
    plain = Side(lambda: copy.deepcopy(model), shares(1, batches))
    side = in_micro_batches(model, stage, batches=batches)
    expected = plain.on_all_ranks(trained)[0]
    for actual in with_memory(1, lambda: side.on_all_ranks(trained)):
        assert actual[1]["training_loss"] == pytest.approx(expected[1]["training_loss"], rel=1e-5)
        weights, expected_weights = (
            {name: torch.tensor(a) for name, a in arrays.items() if name != "num_seen"}
            for arrays in (actual[0], expected[0])
        )
        assert_same_weights(weights, expected_weights)


class CountMicroBatches(TrainerCallback):
    """In each step."""

    numbers: List[int] = []

    def on_batch(self, trainer: Any, batch_inputs: List[Any], *args: Any, **kwargs: Any) -> None:
        self.numbers.append(len(batch_inputs))


def in_one_process(model: Model, batches: List[Batch], **arguments: Any) -> Side:
    arguments.setdefault("num_epochs", 1)
    return Side(
        lambda: copy.deepcopy(model),
        lambda rank: Loader(batches, GLOBAL_BATCH_SIZE),
        2,
        num_gradient_accumulation_steps="auto",
        global_batch_size=GLOBAL_BATCH_SIZE,
        **arguments,
    )


def micro_batches(model: Model, batches: List[Batch], num_bytes: Optional[int]) -> List[int]:
    """How many each step has."""
    side = in_one_process(model, batches, callbacks=lambda: [CountMicroBatches("")])

    def train(trainer: Any) -> List[int]:
        trainer.train()
        return CountMicroBatches.numbers

    return with_memory(num_bytes, lambda: side.on_all_ranks(train))[0]


def longer(batch: Batch, num_tokens: int = LENGTH) -> Batch:
    """With padding."""
    padded = {
        name: torch.nn.functional.pad(batch[name], (0, num_tokens), value=value)
        for name, value in (("words", 0), ("tags", -100))
    }
    return {**batch, **padded}


def test_longer_batches_are_divided_into_more(model: Model) -> None:
    first, second, _ = global_batches()
    batches = [first, longer(second), second]
    assert micro_batches(model, batches, 5600) == [3, 6, 3]
    assert micro_batches(model, batches, None) == [1, 1, 1]


def test_what_steps_have_used_is_not_missing_in_a_later_search(model: Model) -> None:
    first, second, _ = global_batches()

    def free_bytes(device: torch.device) -> int:
        return 1 if CountMicroBatches.numbers else 5600

    with mock.patch.object(free_memory, "free_bytes", free_bytes):
        assert micro_batches(model, [first, longer(second)], None) == [3, 6]


class Counting(MeanOverTokens):
    """Counts where only `get_extra_state` says it, and has a buffer that can't be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]
        self.register_buffer("expanded", torch.zeros(1).expand(10))

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        self.seen[0] += len(kwargs["words"])
        return super().forward(*args, **kwargs)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_the_search_leaves_no_trace_in_extra_states_either() -> None:
    side = in_one_process(Counting(), global_batches())

    def train(trainer: Any) -> int:
        trainer.train()
        return trainer.model.seen[0]

    assert with_memory(5200, lambda: side.on_all_ranks(train))[0] == sum(STEPS)


class Shifting(MeanOverTokens):
    """Changes its inputs, and remembers what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.given: List[Any] = []

    def forward(self, words, **inputs: Any) -> Dict[str, Any]:  # type: ignore[override]
        self.given.append(words.tolist())
        words += 1
        return super().forward(words % 9, **inputs)


def test_an_instance_that_is_repeated_is_the_one_before_the_model_has_changed_it() -> None:
    """Of the last 5 instances rank 1 has 2, and repeats one."""

    def given(trainer: Any) -> List[Any]:
        trainer.train()
        return trainer.model.given[-3:]

    side = in_micro_batches(Shifting(), 2, num_epochs=1)
    _, (first, second, repeated) = with_memory(1, lambda: side.on_all_ranks(given))
    assert repeated == first != second


class Remembering(MeanOverTokens):
    """Reads by one name what it writes by another, and has state of Python's types."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.alias, self.part = self.sums, self.sums[1:]
        self.counts, self.generator = {"steps": 0.0}, random.Random(0)
        self.seen: List[float] = []
        self.output.seen = self.seen

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        if not hasattr(self, "first"):
            self.register_buffer("first", kwargs["words"].float().mean(), persistent=False)
        self.sums.add_(self.output.weight.detach()[0])
        self.counts["steps"] += self.generator.random()
        self.seen.append(float(self.sums[0]))
        outputs = super().forward(*args, **kwargs)
        state = self.alias.sum() + self.part.sum() + sum(self.counts.values()) + self.first
        return {**outputs, "loss": outputs["loss"] * (state + sum(self.output.seen))}


def test_the_search_leaves_no_trace_in_attributes_and_what_shares_them() -> None:
    model = Remembering()
    side = in_one_process(model, global_batches(), num_epochs=2)
    expected = Side(lambda: copy.deepcopy(model), shares(1))
    assert_same_weights(side.train(), expected.train())


class GoesBackward(TrainerCallback):
    def on_backward(self, *args: Any, **kwargs: Any) -> bool:
        return False


class Normalizing(MeanOverTokens):
    def __init__(self) -> None:
        super().__init__()
        self.normalization = torch.nn.BatchNorm1d(4)


class Unknown(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.output = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    "refused, callbacks, message",
    [
        (Unknown, [], "it is unknown what the loss of Unknown is averaged over"),
        (
            Normalizing,
            [],
            r"BatchNorm1d \('normalization'\) computes statistics over a micro-batch",
        ),
        (MeanOverTokens, [GoesBackward("")], "callback GoesBackward has 'on_backward', but with"),
    ],
)
def test_what_is_refused_when_the_trainer_is_constructed(
    tmp_path: Path, refused: Type[Model], callbacks: List[TrainerCallback], message: str
) -> None:
    side = in_one_process(refused(), global_batches(), callbacks=lambda: callbacks)
    with pytest.raises(ConfigurationError, match=message):
        side.construct(0, tmp_path)


def test_batches_without_a_fixed_size_are_refused(model: Model, tmp_path: Path) -> None:
    side = in_one_process(model, global_batches())
    side.batches = lambda rank: Batches(global_batches())
    with pytest.raises(ConfigurationError, match="batches of 'data_loader' vary in size"):
        side.construct(0, tmp_path)


def test_an_input_that_is_of_the_whole_batch_is_refused(model: Model, tmp_path: Path) -> None:
    batches = [{**batch, "prototypes": torch.zeros(3, 2)} for batch in global_batches()]
    trainer: Any = in_one_process(model, batches).construct(0, tmp_path)
    with pytest.raises(ConfigurationError, match="input 'prototypes' of the model can't be split"):
        trainer.train()
