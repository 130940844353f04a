"""What of a model can be computed again in the backward pass, and what that saves."""

import copy
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules.seq2seq_encoders import LstmSeq2SeqEncoder
from allennlp.modules.transformer.t5 import T5EncoderStack
from allennlp.nn.checkpoint import CheckpointWrapper
from allennlp.training.metrics import CategoricalAccuracy
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from allennlp_deepspeed.engine.lifecycle.activation_checkpointing import checkpoint_modules
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side, error_of_training
from tests.support.tensor_memory import TensorMemory

BATCH_SIZE, NUM_TOKENS, DIM = 4, 5, 8


@dataclass
class States:
    values: torch.Tensor
    history: List[torch.Tensor]


class Mask(NamedTuple):
    values: torch.Tensor
    name: str


class FromIds(nn.Module):
    """No input has a gradient, and the output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.embedding(ids), 0.2).view(BATCH_SIZE, NUM_TOKENS, DIM)


class Peculiar(nn.Module):
    """Arguments and results of many kinds, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.linear = nn.Linear(DIM, DIM)
        self.calls: List[bool] = []

    def forward(
        self,
        states: States,
        bias: Dict[str, Tuple[torch.Tensor, Optional[torch.Tensor]]],
        nothing: None,
        power: int = 1,
        *,
        mask: Mask,
    ) -> Tuple[States, Dict[str, Any]]:
        assert nothing is None and mask.name == "mask"
        self.calls.append(self.training)
        first, second = bias["both"]
        assert second is None
        values = self.linear(states.values * self.scale**power + first) * mask.values
        values = nn.functional.dropout(torch.tanh(values), 0.3)
        return States(values, [*states.history, states.values]), {"mean": values.mean(), "n": 1}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True, num_layers=2, dropout=0.1)

    def forward(self, packed: PackedSequence) -> Tuple[PackedSequence, Any]:
        return self.lstm(packed)


class OfManyKinds(Model):
    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.first = FromIds()
        self.layers = nn.ModuleList([Peculiar(), Peculiar()])
        self.packed = Packed()
        self.norm = nn.BatchNorm1d(DIM)
        self.metric = CategoricalAccuracy()

    def forward(self, ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        values = self.first(ids)
        # The same tensors for both layers.
        bias = {"both": (values.sum(dim=1, keepdim=True), None)}
        mask = Mask((ids > 0).unsqueeze(-1), "mask")
        states, total = States(values, []), values.new_zeros(())
        for i, layer in enumerate(self.layers):
            states, others = layer(states, bias, None, power=i + 1, mask=mask)
            total = total + others["mean"] + others["n"]
        packed = pack_padded_sequence(states.values, torch.tensor([5, 4, 3, 1]), batch_first=True)
        values, _ = pad_packed_sequence(self.packed(packed)[0], batch_first=True)
        values = self.norm((values + sum(states.history)).sum(dim=1))
        return {"loss": (values - 1).pow(2).sum() + total}


def trained(directory: Path, stage: Optional[int] = None, seed: int = 1, **arguments: Any) -> Any:
    def model() -> Model:
        torch.manual_seed(seed)
        return OfManyKinds(Vocabulary())

    generator = torch.Generator().manual_seed(1)
    batches = [
        {"ids": torch.randint(10, (BATCH_SIZE, NUM_TOKENS), generator=generator)} for _ in range(6)
    ]
    sgd = partial(torch.optim.SGD, lr=0.01)
    arguments["num_gradient_accumulation_steps"] = 2
    trainer = Side(model, lambda rank: batches, stage, optimizer=sgd, **arguments).construct(
        0, directory
    )
    trainer.train()
    return trainer.model


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, torch.Tensor]:
    """Weights and statistics without checkpointing. With other dropout they are others."""
    state_dict = trained(tmp_path_factory.mktemp("plain")).state_dict()
    other = trained(tmp_path_factory.mktemp("other"), seed=2)
    with pytest.raises(AssertionError):
        assert_same_weights(other.state_dict(), state_dict, tolerance=1e-3)
    return state_dict


LARGE, SMALL = ["first", "layers", "packed", "norm"], ["linear", "lstm", "embedding"]
SYNCHRONIZED = {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}}


@pytest.mark.parametrize("stage, patterns", [(0, SMALL), (2, LARGE), (3, LARGE), (3, SMALL)])
def test_weights_and_statistics_are_those_without_checkpointing(
    expected: Dict[str, torch.Tensor], stage: int, patterns: List[str], tmp_path: Path
):
    config = SYNCHRONIZED if stage == 3 else {}
    actual = trained(tmp_path, stage, deepspeed_config=config, activation_checkpointing=patterns)
    assert_same_weights(actual.state_dict(), expected, tolerance=1e-6)
    assert not any("forward" in vars(module) for module in actual.modules())


def test_only_training_computes_twice(tmp_path: Path):
    model = trained(tmp_path, 2, activation_checkpointing=["layers"])
    assert [len(layer.calls) for layer in model.layers] == [2 * 2 * 6] * 2


def test_activations_are_not_moved_from_the_cpu_to_the_cpu(tmp_path: Path):
    config = {"activation_checkpointing": {"cpu_checkpointing": True}}
    with pytest.raises(ConfigurationError, match="cpu_checkpointing' is true.*remove the key"):
        trained(tmp_path, 2, deepspeed_config=config, activation_checkpointing=["layers"])


class RunningScale(nn.Module):
    """Reads a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.linear(values) * self.scale.clone()
        self.scale.data.mul_(0.5).add_(values.detach().abs().mean())
        return values.tanh()


class Annealed(nn.Module):
    """Reads a number that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.num_steps = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return (self.linear(values) / self.num_steps).tanh()


class OfPower(nn.Module):
    """Its weight has buffers that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(DIM, DIM))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values).tanh()


class Switched(nn.Module):
    """Computes as its attributes say, which others set, or it itself, between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.adapter: Optional[str] = None
        self.factors: Tuple[float, ...] = (1.0, 0.5)
        self.scale = torch.ones(())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.linear(values)
        values = values.sin() if self.adapter is None else values.cos()
        values = (values * self.scale * self.factors[0]).tanh()
        self.adapter = "other" if self.adapter is None else None
        self.factors = self.factors[::-1]
        self.scale = 0.5 * self.scale + values.detach().abs().mean()
        return values


class Drawn(nn.Module):
    """Multiplies by random numbers of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self._generator = torch.Generator().manual_seed(1)
        self._draw = {
            "python": lambda: torch.tensor([random.random() for _ in range(DIM)]),
            "numpy": lambda: torch.from_numpy(np.random.rand(DIM)).float(),
            "own": lambda: torch.rand(DIM, generator=self._generator),
        }[kind]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.linear(values) * self._draw()).tanh()


class AroundPart(Model):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__(Vocabulary())
        self.part = part()
        random.seed(1)
        np.random.seed(1)
        self.out = nn.Linear(DIM, 2)

    def forward(self, values: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        # Called twice before the backward pass.
        return {"loss": (self.out(self.part(self.part(values))) - 1).pow(2).mean()}


@pytest.mark.parametrize(
    "part, stage",
    [
        *((RunningScale, 0), (RunningScale, 3), (Annealed, 3), (OfPower, 2)),
        *((Switched, 0), (Switched, 3)),
        *((partial(Drawn, kind), stage) for kind in ("python", "numpy", "own") for stage in (0, 3)),
    ],
)
def test_what_reads_state_that_it_changes_computes_the_same_a_second_time(
    part: Callable[[], nn.Module], stage: int
):
    generator = torch.Generator().manual_seed(1)
    batches = [{"values": torch.rand(3, DIM, generator=generator)} for _ in range(4)]
    expected, actual = (
        Side(partial(AroundPart, part), lambda rank: batches, each, **arguments).train()
        for each, arguments in ((None, {}), (stage, {"activation_checkpointing": ["^part$"]}))
    )
    assert_same_weights(actual, expected)


class Shift(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, DIM)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, inputs: Dict[str, torch.Tensor]) -> torch.Tensor:
        inputs["ids"][:, 1:].add_(1)
        return self.linear(self.embedding(inputs["ids"].clone())).tanh()


class AroundShift(Model):
    """Calls it twice with the same tensor."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.shift = Shift()

    def forward(self, ids: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        inputs = {"ids": ids.clone()}
        values = self.shift(inputs) * self.shift(inputs)
        return {"loss": (values.sum(dim=-1) - inputs["ids"]).pow(2).mean()}


def test_what_changes_its_inputs_gets_the_former_ones_a_second_time():
    batches = [{"ids": torch.arange(8).view(2, 4)}] * 3
    expected, actual = (
        Side(AroundShift, lambda rank: batches, stage, **arguments).train()
        for stage, arguments in ((None, {}), (2, {"activation_checkpointing": ["shift"]}))
    )
    assert_same_weights(actual, expected)


class AroundChange(AroundPart):
    """Changes what the part has got, or in the part, which needs its gradient."""

    def __init__(self, is_within: bool) -> None:
        super().__init__(partial(nn.Sequential, nn.Tanh(), nn.Linear(DIM, DIM)))
        self.first = nn.Linear(DIM, DIM)
        if is_within:
            self.part.insert(0, nn.ReLU(inplace=True))

    def forward(self, values: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        values = self.first(values)
        outputs = self.part(values)
        return {"loss": (outputs + values.mul_(2)).mean()}


@pytest.mark.parametrize("is_within", [True, False])
def test_a_change_that_recomputation_would_see_is_refused(is_within: bool):
    side = Side(
        partial(AroundChange, is_within),
        lambda rank: [{"values": torch.rand(3, DIM)}],
        2,
        activation_checkpointing=["^part$"],
    )
    (message,) = side.on_all_ranks(error_of_training)
    assert "Sequential" in message and "trainer.activation_checkpointing" in message


class Deep(Model):
    num_layers, width = 8, 16

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
            for _ in range(self.num_layers)
        )

    def forward(self, values: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        for layer in self.layers:
            values = layer(values)
        return {"loss": values.sum()}


def peak(directory: Path, **arguments: Any) -> int:
    """The bytes of tensors in one optimizer step, at their peak."""
    batch = {"values": torch.ones(2048, Deep.width)}
    # Their defaults are GB.
    zero = {"reduce_bucket_size": 10**4, "stage3_prefetch_bucket_size": 10**3}
    side = Side(Deep, lambda rank: [batch], 3, zero=zero, num_epochs=1, **arguments)
    trainer = side.construct(0, directory)
    with TensorMemory() as memory:
        trainer.train()
    return memory.peak


def test_the_activations_of_one_layer_are_held_at_a_time(tmp_path: Path):
    before = peak(tmp_path)
    after = peak(tmp_path, activation_checkpointing=["layers"])
    activation = 2048 * Deep.width * 4  # bytes
    # Of each of its 4 parts a layer keeps what goes into it and what goes into its GELU; of a
    # checkpointed one only its input is there.
    held = Deep.num_layers * 8 * activation
    assert before > held
    assert before - after == pytest.approx(held - (Deep.num_layers + 8) * activation, rel=0.1)


def t5_encoder(checkpoint_wrapper: Optional[CheckpointWrapper]) -> T5EncoderStack:
    torch.manual_seed(1)
    return T5EncoderStack.basic_encoder(
        nn.Embedding(10, 512), num_blocks=2, checkpoint_wrapper=checkpoint_wrapper
    )


def test_a_wrapped_module_computes_the_same_without_an_engine():
    wrapped = t5_encoder(CheckpointWrapper.by_name("deepspeed")())
    plain = t5_encoder(None)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    ids = torch.arange(6).view(2, 3)
    for encoder in (wrapped, copy.deepcopy(wrapped)):
        torch.manual_seed(2)
        actual = encoder(ids).last_hidden_state
        torch.manual_seed(2)
        assert torch.equal(actual, plain(ids).last_hidden_state)
    actual.sum().backward()


@pytest.mark.parametrize(
    "patterns, message",
    [
        ([r"layers\.9"], r"layers.*9.*matches the name of no module\..*layers\.\d"),
        (["layers", "linear"], 'has "linear", which matches layers.0.linear'),
        (["("], "no regular expression"),
        ("layers", 'is "layers": must be a list'),
        ([], r"is \[\]: must be a list"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: Any, message: str):
    with pytest.raises(ConfigurationError, match=message):
        checkpoint_modules(OfManyKinds(Vocabulary()), patterns)


@pytest.mark.parametrize(
    "module, message",
    [
        (LstmSeq2SeqEncoder(2, 2, stateful=True), "part is stateful"),
        (OfManyKinds(Vocabulary()), "part updates a metric"),
        (
            CheckpointWrapper.by_name("deepspeed")().wrap_module(nn.Linear(1, 1)),
            "part are checkpointed twice",
        ),
        (
            nn.Sequential(CheckpointWrapper.by_name("deepspeed")().wrap_module(nn.Linear(1, 1))),
            "part.0 is itself checkpointed",
        ),
    ],
)
def test_what_would_not_be_the_same_a_second_time_is_refused(module: nn.Module, message: str):
    model = nn.Module()
    model.part = module
    with pytest.raises(ConfigurationError, match=message):
        checkpoint_modules(model, ["^part$"])
