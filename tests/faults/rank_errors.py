"""
Writes what each rank fails with to a file, in runs with
`--include-package tests.faults.reporting_errors`.

The `allennlp` command only shows what the first rank that ended has failed with, and ends the
others.
"""

import functools
import time
from pathlib import Path
from typing import Any, List

import torch.distributed as dist

from allennlp_deepspeed.training.trainer import DeepSpeedTrainer

# Seconds. A rank that never writes its file has not failed by itself.
_PATIENCE = 20.0


def errors_of_ranks(serialization_dir: Path) -> List[str]:
    return [path.read_text() for path in sorted(serialization_dir.parent.glob("error_of_rank_*"))]


def _path(serialization_dir: Path, rank: int) -> Path:
    # Not in the serialization directory, on which there may be no room.
    return serialization_dir.parent / f"error_of_rank_{rank}"


def install() -> None:
    function = DeepSpeedTrainer.train

    @functools.wraps(function)
    def train(self: DeepSpeedTrainer) -> Any:
        directory = Path(self._serialization_dir)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        try:
            return function(self)
        except BaseException as error:
            _path(directory, rank).write_text(f"{type(error).__name__}: {error}")
            # The command ends the others as soon as one has failed.
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline:
                if all(_path(directory, other).exists() for other in range(world_size)):
                    break
                time.sleep(0.05)
            raise

    DeepSpeedTrainer.train = train  # type: ignore[method-assign]
