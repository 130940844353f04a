"""What of a model can be computed again in the backward pass, and what that saves."""

import copy
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import prepare_environment
from allennlp.data import Instance, Vocabulary
from allennlp.data.data_loaders import SimpleDataLoader
from allennlp.data.fields import TensorField
from allennlp.models import Model
from allennlp.modules.seq2seq_encoders import LstmSeq2SeqEncoder
from allennlp.modules.transformer.t5 import T5EncoderStack
from allennlp.nn.checkpoint import CheckpointWrapper
from allennlp.training import GradientDescentTrainer
from allennlp.training.metrics import CategoricalAccuracy
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.engine.activation_checkpointing import checkpoint_modules
from tests.support.experiment import assert_same_weights
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
        self.num_calls = 0

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
        self.num_calls += 1
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
    def __init__(self, vocab: Vocabulary, normalizes: bool = True) -> None:
        super().__init__(vocab)
        self.first = FromIds()
        self.layers = nn.ModuleList([Peculiar(), Peculiar()])
        self.packed = Packed()
        self.norm = nn.BatchNorm1d(DIM) if normalizes else nn.Identity()
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


def trained(
    trainer_class: Any, seed: int = 1, normalizes: bool = True, **arguments: Any
) -> OfManyKinds:
    prepare_environment(Params({"random_seed": 1, "numpy_seed": 1, "pytorch_seed": seed}))
    instances = [
        Instance({"ids": TensorField(torch.randint(10, (NUM_TOKENS,)))}) for _ in range(24)
    ]
    vocab = Vocabulary.from_instances(instances)
    model = OfManyKinds(vocab, normalizes)
    trainer_class(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        SimpleDataLoader(instances, BATCH_SIZE, vocab=vocab),
        num_epochs=2,
        cuda_device=-1,
        num_gradient_accumulation_steps=2,
        run_confidence_checks=False,
        **arguments,
    ).train()
    return model


def zero(stage: int, **sections: Any) -> Dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


@pytest.fixture(scope="module")
def expected() -> Dict[str, torch.Tensor]:
    """Weights and statistics without checkpointing. With other dropout they are others."""
    state_dict = trained(GradientDescentTrainer).state_dict()
    other = trained(GradientDescentTrainer, seed=2)
    with pytest.raises(AssertionError):
        assert_same_weights(other.state_dict(), state_dict, tolerance=1e-3)
    return state_dict


LARGE, SMALL = ["first", "layers", "packed", "norm"], ["linear", "lstm", "embedding"]
SYNCHRONIZED = {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}}


@pytest.mark.parametrize("stage, patterns", [(0, SMALL), (2, LARGE), (3, LARGE), (3, SMALL)])
def test_weights_and_statistics_are_those_without_checkpointing(
    expected: Dict[str, torch.Tensor], stage: int, patterns: List[str]
):
    config = zero(stage, **(SYNCHRONIZED if stage == 3 else {}))
    actual = trained(DeepSpeedTrainer, deepspeed_config=config, activation_checkpointing=patterns)
    assert_same_weights(actual.state_dict(), expected, tolerance=1e-6)
    assert not any("forward" in vars(module) for module in actual.modules())


def test_only_training_computes_twice():
    model = trained(DeepSpeedTrainer, deepspeed_config=zero(2), activation_checkpointing=["layers"])
    assert [layer.num_calls for layer in model.layers] == [2 * 2 * 6] * 2


def test_activations_are_not_moved_from_the_cpu_to_the_cpu():
    config = zero(2, activation_checkpointing={"cpu_checkpointing": True})
    with pytest.raises(ConfigurationError, match="cpu_checkpointing is true.*remove the key"):
        trained(DeepSpeedTrainer, deepspeed_config=config, activation_checkpointing=["layers"])


class Deep(Model):
    num_layers, width = 8, 16

    def __init__(self, vocab: Vocabulary) -> None:
        super().__init__(vocab)
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
            for _ in range(self.num_layers)
        )

    def forward(self, values: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        for layer in self.layers:
            values = layer(values)
        return {"loss": values.sum()}


def peak(**arguments: Any) -> int:
    """The bytes of tensors in one optimizer step, at their peak."""
    batch_size = 2048
    instances = [Instance({"values": TensorField(torch.ones(Deep.width))})] * batch_size
    vocab = Vocabulary()
    model = Deep(vocab)
    trainer = DeepSpeedTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        SimpleDataLoader(instances, batch_size, vocab=vocab),
        num_epochs=1,
        cuda_device=-1,
        run_confidence_checks=False,
        **arguments,
    )
    with TensorMemory() as memory:
        trainer.train()
    return memory.peak


def test_the_activations_of_one_layer_are_held_at_a_time():
    config = zero(3)
    # Their defaults are GB.
    config["zero_optimization"].update(reduce_bucket_size=10**4, stage3_prefetch_bucket_size=10**3)
    before = peak(deepspeed_config=config)
    after = peak(deepspeed_config=config, activation_checkpointing=["layers"])
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
        ([r"layers\.9"], r"layers.*9.*no module matches it.*near are layers\.\d"),
        (["layers", "linear"], 'has "linear", which matches the module layers.0.linear'),
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
        (OfManyKinds(Vocabulary()), "part has a metric"),
        (
            CheckpointWrapper.by_name("deepspeed")().wrap_module(nn.Linear(1, 1)),
            "part are checkpointed twice",
        ),
        (
            nn.Sequential(CheckpointWrapper.by_name("deepspeed")().wrap_module(nn.Linear(1, 1))),
            "part.0 is checkpointed itself",
        ),
    ],
)
def test_what_would_not_be_the_same_a_second_time_is_refused(module: nn.Module, message: str):
    model = nn.Module()
    model.part = module
    with pytest.raises(ConfigurationError, match=message):
        checkpoint_modules(model, ["^part$"])
