"""
Counts the bytes on the link of a host.
"""

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

FILE = "link_traffic.json"


@TrainerCallback.register("link_traffic")
class LinkTraffic(TrainerCallback):
    """
    Writes to a file of the serialization directory, on the first worker of each host: what its link
    has carried in each optimizer step in both directions, headers included, the loss of each
    micro-batch, and the bytes of the parameters in fp32.
    """

    reads_gradients = False

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self._bytes: List[int] = []
        self._losses: List[float] = []

    @override
    def on_start(self, *args: Any, **kwargs: Any) -> None:
        super().on_start(*args, **kwargs)
        self._count()

    @override
    def on_batch(
        self, trainer, batch_inputs, batch_outputs, *args: Any, is_training: bool, **kwargs: Any
    ) -> None:
        if is_training:
            self._losses += [outputs["loss"].item() for outputs in batch_outputs]
            self._count()

    def _count(self) -> None:
        dist.barrier()  # so that no rank is still sending, or in the next step
        self._bytes.append(bytes_so_far())

    @override
    def on_end(self, trainer, *args: Any, is_primary: bool = True, **kwargs: Any) -> None:
        # Where ZeRO-3 has partitioned a parameter, it has another size.
        sizes = [getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()]
        steps = [after - before for before, after in zip(self._bytes, self._bytes[1:])]
        result: Dict[str, Any] = {
            "bytes_of_steps": steps,
            "losses": self._losses,
            "parameter_bytes": 4 * sum(sizes),
        }
        if is_primary:
            Path(self.serialization_dir, FILE).write_text(json.dumps(result))


def bytes_so_far() -> int:
    """
    What this process's host has received and sent through its network interfaces, all but the
    loopback.
    """
    total = 0
    # Those of the network namespace that this process is in.
    for line in Path(f"/proc/{os.getpid()}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            counts = numbers.split()
            total += int(counts[0]) + int(counts[8])
    return total
