"""A gradient that overflows on one rank."""

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from allennlp.training.callbacks import TrainerCallback

from tests.integration.fp16_test import AUTOCAST, FP16, TOLERANCE, Task, config
from tests.support.experiment import assert_same_weights
from tests.support.workers import run_workers


class Overflow(TrainerCallback):
    """On one rank, in one step."""

    reads_gradients = False

    def on_backward(self, trainer, batch_outputs, backward_called: bool, **kwargs: Any) -> bool:
        loss = batch_outputs["loss"]
        if trainer._total_batches_completed == 3 and trainer._rank == 1:
            loss = loss * 1e30
        trainer.engine.backward(loss, scale_wrt_gas=False)
        return True


@pytest.mark.parametrize("stage, precision", [(0, AUTOCAST), *((i, FP16) for i in (0, 2, 3))])
def test_an_overflow_on_one_rank_is_one_on_all(
    tmp_path: Path, stage: int, precision: Dict[str, Any]
) -> None:
    reference = Task()
    reference.optimizer.skipped = {3}
    reference.train(tmp_path / "fp32", None, num_epochs=1)

    task = Task()  # here, where the data isn't shared out to the workers

    def train(rank: int) -> Any:
        task.train(
            tmp_path / "fp16",
            config(stage, precision),
            num_epochs=1,
            distributed=True,
            local_rank=rank,
            world_size=2,
            callbacks=[task.record, Overflow("")],
        )
        return task.record.skipped

    assert run_workers(2, train) == [{3}, {3}]
    weights = torch.load(tmp_path / "fp16" / "best.th", weights_only=True)
    moved = {
        name: reference.model.state_dict()[name] - reference.untrained[name] for name in weights
    }
    assert_same_weights(
        {name: weights[name] - reference.untrained[name] for name in weights}, moved, TOLERANCE
    )
