"""Micro-batches that are found take the memory of those that are written."""

from pathlib import Path
from typing import Any, Dict
from unittest import mock

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.training import gradient_memory
from tests.support.side_by_side import Batch, Batches
from tests.support.tensor_memory import TensorMemory

SHARE, LENGTH, DIM = 64, 32, 64
# Bytes of an activation of an instance: the inputs of four layers, and the last outputs.
ACTIVATION = LENGTH * DIM * 4


class Deep(Model):
    """Its activations are far larger than its weights, and than its outputs."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(4))

    def num_loss_terms(self, numbers: torch.Tensor) -> int:
        return len(numbers)

    def forward(self, numbers: torch.Tensor) -> Dict[str, Any]:  # type: ignore[override]
        # Shape: (batch_size, LENGTH, DIM)
        hidden = numbers[:, None, None].expand(-1, LENGTH, DIM)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"loss": hidden.pow(2).mean(), "logits": hidden[:, 0, :8].clone()}


class Loader(Batches):
    def __init__(self, num_steps: int, batch_size: int) -> None:
        batch: Batch = {"numbers": torch.arange(batch_size) / batch_size}
        super().__init__([batch] * num_steps)
        self.batch_size = batch_size


def peak(directory: Path, data_loader: Loader, **arguments: Any) -> int:
    """The bytes of tensors in two optimizer steps, at their peak."""
    model = Deep()
    trainer = DeepSpeedTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader,
        num_epochs=1,
        cuda_device=-1,
        serialization_dir=directory,
        enable_default_callbacks=False,
        run_confidence_checks=False,
        # Its default is 2 GB.
        deepspeed_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**5}},
        **arguments,
    )
    with TensorMemory() as memory:
        trainer.train()
    return memory.peak


def test_the_peak_is_that_of_a_micro_batch(tmp_path: Path) -> None:
    auto = {"num_gradient_accumulation_steps": "auto", "global_batch_size": SHARE}
    # Twice what 16 instances take, two gradients and the optimizer's states.
    num_bytes = 2 * 16 * 5 * ACTIVATION + (2 + 2) * 4 * 4 * (DIM + 1) * DIM + 50_000
    with mock.patch.object(gradient_memory, "left_free", return_value=num_bytes):
        found = peak(tmp_path / "found", Loader(2, SHARE), **auto)
    written = peak(tmp_path / "written", Loader(8, 16), num_gradient_accumulation_steps=4)
    whole = peak(tmp_path / "whole", Loader(2, SHARE))
    # The search leaves nothing behind.
    assert found == pytest.approx(written, rel=0.02)
    assert found < 0.4 * whole
