"""Divides batches into chunks."""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from allennlp_deepspeed.engine.lifecycle.activation_checkpointing import in_place_version

# Types of values that belong to all examples of a batch, such as AllenNLP's `FlagField`.
_TYPES_OF_ALL_EXAMPLES = (bool, int, float, str, type(None))


class Chunk(NamedTuple):
    """
    Some examples of a rank's batch.

    # Parameters

    inputs : `Dict[str, Any]`
    rows : `slice`
        The indices of these examples in the batch.
    is_dummy : `bool`
        Whether it only lets this rank take part in the collectives of ranks with more chunks.
    """

    inputs: Dict[str, Any]
    rows: slice
    is_dummy: bool


def split_into_chunks(
    inputs: Dict[str, Any], batch_size: int, max_batch_size: int, chunk_size: int
) -> List[Chunk]:
    """
    Divides a batch into the number of chunks of the rank with the largest batch.

    # Parameters

    inputs : `Dict[str, Any]`, required.
        The inputs of all examples of this rank.
    batch_size : `int`, required.
        The number of these examples, at least one.
    max_batch_size : `int`, required.
        The largest batch size of all ranks.
    chunk_size : `int`, required.
        The number of examples of a chunk.
    """
    chunks = []
    for start in range(0, max_batch_size, chunk_size):
        is_dummy = start >= batch_size
        rows = slice(0, 1) if is_dummy else slice(start, min(start + chunk_size, batch_size))
        sliced = slice_rows(inputs, rows.start, rows.stop)
        # The row is in another chunk, too, and a model may change its inputs in place.
        chunks.append(Chunk(copy_batch(sliced) if is_dummy else sliced, rows, is_dummy))
    return chunks


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """
    Returns the examples from `start` to `stop` (exclusive).

    # Parameters

    batch : `Any`, required.
        Tensors whose first dimension is the example, lists with an element for each, or
        dictionaries of these at any depth. Numbers, strings and `None` are of all examples.
    start : `int`, required.
    stop : `int`, required.
    """
    if isinstance(batch, dict):
        return {name: slice_rows(value, start, stop) for name, value in batch.items()}
    return batch if isinstance(batch, _TYPES_OF_ALL_EXAMPLES) else batch[start:stop]


def copy_batch(batch: Any) -> Any:
    """Returns a copy of dictionaries, lists and tensors, which a model may change in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def versions(batch: Any) -> List[int]:
    """Returns a number for each tensor that increases if the tensor is changed in place."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return list(map(in_place_version, tensors))


def num_examples(batch: Any) -> int:
    """Returns the number of examples of a batch."""
    _, value = next(_leaves(batch))
    return value.size(0) if isinstance(value, torch.Tensor) else len(value)


def indivisible_inputs(batch: Any) -> List[str]:
    """
    Returns the names of inputs that don't have one row for each example, so that `slice_rows` would
    be wrong.
    """
    numbers = {name: _num_rows(value) for name, value in _leaves(batch)}
    if not numbers:
        return list(batch)
    expected = next((number for number in numbers.values() if number is not None), None)
    return [name for name, number in numbers.items() if number is None or number != expected]


def split_evenly(num_examples: int, num_chunks: int) -> List[Tuple[int, int]]:
    """
    Returns the bounds of chunks of a batch whose sizes differ by at most one example.

    # Parameters

    num_examples : `int`, required.
    num_chunks : `int`, required.
        At most the number of examples.
    """
    ends = [i * num_examples // num_chunks for i in range(num_chunks + 1)]
    return list(zip(ends, ends[1:]))


def has_batch_statistics(module: torch.nn.Module) -> bool:
    """
    Returns whether a module's output for an example depends on the other examples of the batch.
    """
    norm = torch.nn.modules.batchnorm
    if isinstance(module, norm._BatchNorm):
        return True
    # Instance normalization is per example, unless it tracks running statistics.
    return isinstance(module, norm._NormBase) and module.track_running_stats


def _num_rows(value: Any) -> Optional[int]:
    if isinstance(value, torch.Tensor) and value.dim() > 0 or isinstance(value, list):
        return len(value)
    return None


def _leaves(batch: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    """Yields values that aren't dictionaries and belong to examples, with their names."""
    if not isinstance(batch, dict):
        if not isinstance(batch, _TYPES_OF_ALL_EXAMPLES):
            yield path, batch
        return
    for name, value in batch.items():
        yield from _leaves(value, f"{path}.{name}" if path else str(name))
