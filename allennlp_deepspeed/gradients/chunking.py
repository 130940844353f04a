"""
Parts of batches.
"""

from typing import Any

import torch


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """
    The examples from one index to before another.

    # Parameters

    batch : `Any`, required.
        Tensors whose first dimension is the example, lists with an element for each, or
        dictionaries of these at any depth.
    start : `int`, required.
    stop : `int`, required.
    """
    if isinstance(batch, dict):
        return {name: rows_of(value, start, stop) for name, value in batch.items()}
    return batch[start:stop]


def num_examples(batch: Any) -> int:
    """The length of what `rows_of` takes from."""
    while isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return batch.size(0) if isinstance(batch, torch.Tensor) else len(batch)
