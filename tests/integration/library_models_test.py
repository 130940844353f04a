"""
Stand-ins for what models of AllenNLP's library do that others don't: heads that no rank uses in a
step, and modules that ranks call unequally often.
"""

from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.modules.augmented_lstm import AugmentedLstm
from allennlp.modules.elmo_lstm import ElmoLstm
from deepspeed.ops.adam import FusedAdam
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batch, Side, state_arrays

DIM = 3
NUM_BATCHES = 3


class TwoHeads(Model):
    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(DIM, DIM)
        self.heads = nn.ModuleDict({"first": nn.Linear(DIM, 1), "second": nn.Linear(DIM, 1)})

    def forward(self, inputs: torch.Tensor, head: str) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if head == "none":
            return {"loss": torch.ones((), requires_grad=True)}
        return {"loss": self.heads[head](self.layer(inputs).tanh()).square().mean()}


class Lengths(Model):
    """Its LSTM calls a cell for each time step."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.lstm = AugmentedLstm(DIM, DIM)
        self.output = nn.Linear(DIM, 1)

    def forward(self, inputs: torch.Tensor, head: str) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        packed = pack_padded_sequence(inputs, [inputs.size(1)] * len(inputs), batch_first=True)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return {"loss": self.output(hidden).square().mean()}


class Elmo(Model):
    """Its layers add to what those before return."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.lstm = ElmoLstm(DIM, DIM, cell_size=4, num_layers=2, requires_grad=True)
        self.output = nn.Linear(2 * DIM, 1)

    def forward(self, inputs: torch.Tensor, head: str) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.lstm.reset_states()
        hidden = self.lstm(inputs, torch.ones(inputs.shape[:2], dtype=torch.bool))
        return {"loss": self.output(hidden).square().mean()}


def batches(rank: int) -> List[Batch]:
    """Of other lengths on each rank. The second head is used in the first of them only."""
    generator = torch.Generator().manual_seed(rank)
    lengths = [[2, 5, 3], [4, 2, 6]][rank]
    return [
        {
            "inputs": torch.randn(2, lengths[i], DIM, generator=generator),
            "head": "second" if i == 0 else "first",
        }
        for i in range(NUM_BATCHES)
    ]


def of_both_ranks(rank: int) -> List[Batch]:
    return [batch for pair in zip(batches(0), batches(1)) for batch in pair]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def train(model: Callable[[], Model], stage: Optional[int], world_size: int) -> Any:
    if stage is not None:
        return Side(model, batches, stage, world_size, optimizer=adam).train()
    steps = {"num_gradient_accumulation_steps": world_size}
    return Side(
        model, batches if world_size == 1 else of_both_ranks, optimizer=adam, **steps
    ).train()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_head_that_no_rank_uses_is_left_alone_at_stage_0(world_size: int) -> None:
    expected = train(TwoHeads, None, world_size)
    assert_same_weights(train(TwoHeads, 0, world_size), expected, tolerance=1e-6)


def others(rank: int) -> List[Batch]:
    """In each of which the ranks use different heads."""
    heads = ["first", "second"]
    return [{**b, "head": heads[(i + rank) % 2]} for i, b in enumerate(batches(rank))]


def nothing(rank: int) -> List[Batch]:
    """For rank 1 to learn from."""
    return [{**batch, "head": ["first", "none"][rank]} for batch in batches(rank)]


@pytest.mark.parametrize(
    "stage, zero, of_rank",
    [(0, {}, others), (1, {"overlap_comm": True}, others), (2, {}, others), (2, {}, nothing)],
)
def test_heads_that_only_one_rank_uses_are_found_in_the_first_step(
    stage: int, zero: Any, of_rank: Callable[[int], List[Batch]]
) -> None:
    def of_both(rank: int) -> List[Batch]:
        return [batch for pair in zip(of_rank(0), of_rank(1)) for batch in pair]

    expected = Side(TwoHeads, of_both, optimizer=adam, num_gradient_accumulation_steps=2).train()
    actual = Side(TwoHeads, of_rank, stage, 2, optimizer=adam, zero=zero).train()
    assert_same_weights(actual, expected, tolerance=1e-6)


def later(rank: int) -> List[Batch]:
    """In all but the first of which the ranks use different heads."""
    return [batches(rank)[1], *others(rank)]


def test_what_the_first_step_finds_is_known_after_an_interruption() -> None:
    def find(trainer: Any) -> Any:
        trainer.train()
        return trainer.parts()["gradient_synchronization"].state_dict()

    state, _ = Side(TwoHeads, others, 2, 2).on_all_ranks(find)

    def go_on(trainer: Any) -> Any:
        trainer.parts()["gradient_synchronization"].load_state_dict(state)
        trainer.train()
        return state_arrays(trainer)

    def of_both(rank: int) -> List[Batch]:
        return [batch for pair in zip(later(0), later(1)) for batch in pair]

    actual, _ = Side(TwoHeads, later, 2, 2).on_all_ranks(go_on)
    expected = Side(TwoHeads, of_both, num_gradient_accumulation_steps=2).train()
    actual = {name: torch.tensor(array) for name, array in actual.items()}
    assert_same_weights(actual, expected, tolerance=1e-6)


def test_heads_that_only_one_rank_uses_later_are_noticed() -> None:
    """They have one size, so that DeepSpeed would sum up the gradients of both."""

    def error(trainer: Any) -> str:
        with pytest.raises(RuntimeError) as raised:
            trainer.train()
        return str(raised.value)

    for message in Side(TwoHeads, later, 2, 2, log_every_num_steps=1).on_all_ranks(error):
        assert "find_unused_parameters" in message


@pytest.mark.parametrize("model", [Lengths, Elmo])
def test_an_lstm_of_cells_trains_on_sequences_of_other_lengths_at_stage_3(model: Any) -> None:
    assert_same_weights(train(model, 3, 2), train(model, None, 2), tolerance=1e-6)


class WithOneCount(FusedAdam):
    """DeepSpeed's, whose parameters share one step count, with a step that needs no compiler."""

    def __init__(self, parameters: Any) -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.1, "step": 0})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            corrections = [1 - beta ** group["step"] for beta in (0.9, 0.999)]
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] or {"mean": p.grad * 0, "square": p.grad * 0}
                    self.state[p] = state
                    state["mean"].lerp_(p.grad, 0.1)
                    state["square"].lerp_(p.grad**2, 0.001)
                    mean, square = map(torch.div, state.values(), corrections)
                    p.data.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


def test_a_fused_optimizer_is_given_gradients_of_zero() -> None:

    class Zeros(TwoHeads):
        def forward(self, **batch: Any) -> Dict[str, torch.Tensor]:  # type: ignore[override]
            outputs = super().forward(**batch)
            unused = sum(p.sum() for p in self.heads.parameters())
            return {"loss": outputs["loss"] + 0.0 * unused}

    expected = Side(Zeros, batches, optimizer=adam).train()
    actual = Side(TwoHeads, batches, 0, optimizer=WithOneCount).train()
    assert_same_weights(actual, expected, tolerance=1e-5)
