"""
Parameters that a step, or some of its micro-batches, leave unused have a gradient of what has used
them, and of zero if nothing has.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

from tests.support.experiment import StateDict, assert_same_weights
from tests.support.plain_loop import Batch, train_in_a_plain_loop
from tests.support.side_by_side import Side
from tests.support.workers import run_workers  # noqa: F401  # for `conftest.py`

SGD = partial(torch.optim.SGD, lr=0.2)
ADAM = partial(torch.optim.Adam, lr=0.01)


class TwoHeads(Model):
    """A regression with an encoder and two heads, of which each batch names one."""

    def __init__(self, size: int = 6) -> None:
        super().__init__(Vocabulary())
        self.encoder = torch.nn.Linear(size, size)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(size, 3) for _ in range(2)])

    def forward(self, inputs, targets, head) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        predictions = self.heads[head](torch.tanh(self.encoder(inputs)))
        return {"loss": (predictions - targets).pow(2).mean()}


def batches_of(heads: str, num_workers: int, size: int = 6) -> List[List[Batch]]:
    """On each worker a batch for each of the heads, such as "001"."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            {
                "inputs": torch.randn(8, size, generator=generator),
                "targets": torch.randn(8, 3, generator=generator),
                "head": int(head),
            }
            for head in heads
        ]
        for _ in range(num_workers)
    ]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(2)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PATTERNS = {
    # One head in each step.
    "one a step": ("0101001101", 1, "auto"),
    # In each step of three micro-batches one or both, in the last and not.
    "step": ("000111010101100001110", 3, "step"),
    "micro-batch": ("000111010101100001110", 3, "micro_batch"),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "zero, pattern, num_workers, optimizer",
    [
        pytest.param(OFFLOAD, "one a step", 1, ADAM, id="one a step offloaded"),
        pytest.param(OFFLOAD, "step", 2, SGD, id="step offloaded"),
        pytest.param(OFFLOAD, "micro-batch", 2, SGD, id="micro-batch offloaded"),
        pytest.param({}, "micro-batch", 2, SGD, id="micro-batch"),
    ],
)
def test_training_is_that_of_a_plain_loop(
    stage: int, zero: Dict[str, Any], pattern: str, num_workers: int, optimizer: Any
) -> None:
    model, batches = TwoHeads(), batches_of(PATTERNS[pattern][0], num_workers)
    actual = trained(model, batches, stage, zero, pattern, optimizer)
    steps = PATTERNS[pattern][1]
    expected = train_in_a_plain_loop(model, batches, optimizer, steps, max_norm=0.5)
    assert_same_weights(actual, expected)


@pytest.mark.skipif(
    not AsyncIOBuilder().is_compatible(verbose=False),
    reason="needs libaio's headers (Debian's package libaio-dev)",
)
def test_offload_to_nvme(tmp_path: Path) -> None:
    # DeepSpeed keeps tensors below a megabyte in memory.
    size, pattern = 800, "micro-batch"
    model, batches = TwoHeads(size), batches_of(PATTERNS[pattern][0], 2, size)
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    actual = trained(model, batches, 3, nvme, pattern)
    steps = PATTERNS[pattern][1]
    assert_same_weights(actual, train_in_a_plain_loop(model, batches, SGD, steps, max_norm=0.5))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # swap files


def trained(
    model: TwoHeads,
    batches: List[List[Batch]],
    stage: int,
    zero: Dict[str, Any],
    pattern: str,
    optimizer: Any = SGD,
    **sections: Any,
) -> StateDict:
    _, steps, mode = PATTERNS[pattern]
    return Side(
        lambda: copy.deepcopy(model),
        lambda rank: batches[rank],
        stage,
        len(batches),
        zero=zero,
        deepspeed_config=sections,
        optimizer=optimizer,
        num_epochs=1,
        num_gradient_accumulation_steps=steps,
        gradient_synchronization=mode,
        grad_norm=0.5,
    ).train()
