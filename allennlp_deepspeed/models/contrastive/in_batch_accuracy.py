from typing import Dict, Optional

import torch
import torch.distributed as dist
from allennlp.training.metrics import Metric
from typing_extensions import override

from allennlp_deepspeed.engine.process.collectives import world_size


@Metric.register("in_batch_accuracy")
class InBatchAccuracy(Metric):
    """
    Share of anchors that are more similar to one of their positives than to any negative of their
    batch. It is counted on the device, without host synchronization before `get_metric`.
    """

    def __init__(self) -> None:
        # Numbers of correct anchors and of all anchors.
        self._counts: Optional[torch.Tensor] = None

    @override
    def __call__(self, num_correct: torch.Tensor, num_anchors: int) -> None:  # type: ignore[override]
        counts = torch.stack([num_correct, torch.full_like(num_correct, num_anchors)])
        self._counts = counts if self._counts is None else self._counts + counts

    @override
    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        """
        Returns the accuracy since the last reset, synchronizing with the device.

        # Returns

        `Dict[str, float]`
            Empty if there was no anchor. With `reset` it is reduced over all ranks, and every rank
            must call it.
        """
        counts = self._counts
        if reset:
            self.reset()
            if counts is not None and world_size() > 1:
                dist.all_reduce(counts)
        if counts is None:
            return {}
        num_correct, num_anchors = counts.tolist()
        return {"in_batch_accuracy": num_correct / num_anchors}

    @override
    def reset(self) -> None:
        self._counts = None
