"""Registered components that tests name in their configs. They log what the tests look for."""

import json
import logging
import os
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from allennlp.data import DataLoader, Vocabulary
from allennlp.models import BasicClassifier, Model
from allennlp.training.callbacks import TrainerCallback

logger = logging.getLogger(__name__)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@TrainerCallback.register("scale_gradients")
class ScaleGradients(TrainerCallback):
    """Calls backward itself and then changes the gradients, as the contract of `on_backward` allows."""

    def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
        batch_outputs["loss"].backward()
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                # Not linear, so that it matters whether gradients are averaged before or after.
                parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)
        return True


@TrainerCallback.register("two_backward_passes")
class TwoBackwardPasses(TrainerCallback):
    """Goes backward through half of the loss twice."""

    def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
        half = batch_outputs["loss"] / 2
        half.backward(retain_graph=True)
        half.backward()
        return True


@TrainerCallback.register("record_steps")
class RecordSteps(TrainerCallback):
    """Writes what `on_batch` is given to `steps_{rank}.jsonl`."""

    def on_batch(
        self,
        trainer,
        batch_inputs: List[Any],
        batch_outputs: List[Dict[str, Any]],
        batch_metrics: Dict[str, Any],
        epoch: int,
        batch_number: int,
        is_training: bool,
        is_primary: bool = True,
        batch_grad_norm: Optional[float] = None,
        **kwargs,
    ) -> None:
        if not is_training:
            return
        with open(os.path.join(self.serialization_dir, f"steps_{rank()}.jsonl"), "a") as file:
            json.dump(
                {
                    "epoch": epoch,
                    "batch_number": batch_number,
                    "num_micro_batches": len(batch_inputs),
                    "loss": batch_metrics["batch_loss"],
                    "lr": trainer.optimizer.param_groups[0]["lr"],
                    "grad_norm": batch_grad_norm,
                },
                file,
            )
            file.write("\n")


@TrainerCallback.register("fail")
class Fail(TrainerCallback):
    """Raises on one rank, at an optimizer step of the run."""

    def __init__(self, serialization_dir: str, on_rank: int = 0, at_step: int = 1) -> None:
        super().__init__(serialization_dir)
        self._on_rank = on_rank
        self._at_step = at_step

    def on_batch(self, trainer, *args, is_training: bool = True, **kwargs) -> None:
        if is_training and rank() == self._on_rank:
            if trainer._total_batches_completed == self._at_step:
                raise RuntimeError("this rank fails on purpose")


@Model.register("nan_classifier")
class NanClassifier(BasicClassifier):
    """Has a NaN loss on one rank, in one forward pass."""

    def __init__(self, vocab: Vocabulary, on_rank: int, at_forward: int, **kwargs) -> None:
        super().__init__(vocab, **kwargs)
        self._on_rank = on_rank
        self._remaining = at_forward

    def forward(self, *args, **kwargs) -> Dict[str, torch.Tensor]:
        outputs = super().forward(*args, **kwargs)
        self._remaining -= 1
        if self._remaining == 0 and rank() == self._on_rank:
            outputs["loss"] = outputs["loss"] + float("nan")
        return outputs
