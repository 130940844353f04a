"""
Parts of batches.
"""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

# What a batch has of all its examples together, such as AllenNLP's `FlagField`.
_OF_ALL = (bool, int, float, str, type(None))


class Chunk(NamedTuple):
    """
    Some examples of a rank's batch.

    # Parameters

    inputs : `Dict[str, Any]`
    rows : `slice`
        Which examples of the batch they are.
    is_filler : `bool`
        Whether it only keeps this rank in step with another one that has more.
    """

    inputs: Dict[str, Any]
    rows: slice
    is_filler: bool


def chunks_in_order(
    inputs: Dict[str, Any], batch_size: int, most: int, chunk_size: int
) -> List[Chunk]:
    """
    As many chunks as the rank with the largest batch has.

    # Parameters

    inputs : `Dict[str, Any]`, required.
        Of all examples of this rank.
    batch_size : `int`, required.
        How many these are, at least one.
    most : `int`, required.
        The largest batch of any rank.
    chunk_size : `int`, required.
        In examples.
    """
    chunks = []
    for start in range(0, most, chunk_size):
        is_filler = start >= batch_size
        rows = slice(0, 1) if is_filler else slice(start, min(start + chunk_size, batch_size))
        chunks.append(Chunk(rows_of(inputs, rows.start, rows.stop), rows, is_filler))
    return chunks


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """
    The examples from one index to before another.

    # Parameters

    batch : `Any`, required.
        Tensors whose first dimension is the example, lists with an element for each, or
        dictionaries of these at any depth. Numbers, strings and `None` are of all examples.
    start : `int`, required.
    stop : `int`, required.
    """
    if isinstance(batch, dict):
        return {name: rows_of(value, start, stop) for name, value in batch.items()}
    return batch if isinstance(batch, _OF_ALL) else batch[start:stop]


def num_examples(batch: Any) -> int:
    """The length of what `rows_of` takes from."""
    _, value = next(_leaves(batch))
    return value.size(0) if isinstance(value, torch.Tensor) else len(value)


def indivisible(batch: Any) -> List[str]:
    """The names of inputs that have no row for each example, of which `rows_of` would be wrong."""
    numbers = {name: _num_rows(value) for name, value in _leaves(batch)}
    if not numbers:
        return list(batch)
    expected = next((number for number in numbers.values() if number is not None), None)
    return [name for name, number in numbers.items() if number is None or number != expected]


def even_bounds(num_examples: int, num_parts: int) -> List[Tuple[int, int]]:
    """
    Where the parts of a batch begin and end, of which none has more than one example more than
    another.

    # Parameters

    num_examples : `int`, required.
    num_parts : `int`, required.
        At most as many as there are examples.
    """
    ends = [i * num_examples // num_parts for i in range(num_parts + 1)]
    return list(zip(ends, ends[1:]))


def has_batch_statistics(module: torch.nn.Module) -> bool:
    """Whether what a module makes of an example depends on the others of the batch."""
    norm = torch.nn.modules.batchnorm
    if isinstance(module, norm._BatchNorm):
        return True
    # Instance normalization, which is of each example, unless it keeps statistics.
    return isinstance(module, norm._NormBase) and module.track_running_stats


def _num_rows(value: Any) -> Optional[int]:
    if isinstance(value, torch.Tensor) and value.dim() > 0 or isinstance(value, list):
        return len(value)
    return None


def _leaves(batch: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    """What isn't a dictionary, and of examples, with its name."""
    if not isinstance(batch, dict):
        if not isinstance(batch, _OF_ALL):
            yield path, batch
        return
    for name, value in batch.items():
        yield from _leaves(value, f"{path}.{name}" if path else str(name))
