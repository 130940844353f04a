"""
Data of the demo in the order in which each tool deals them out to its workers.
"""

import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence

from evidence.real.recorder import Cell

_IN_TURN, _BY_BATCH = "in_turn.jsonl", "by_batch.jsonl"


def write(cell: Cell, examples: Sequence[Dict[str, Any]]) -> None:
    """Writes as many examples as the cell trains, beginning again where they aren't enough."""
    size = cell.batch_size * cell.world_size
    num_batches = cell.total * cell.accumulation
    lines = [json.dumps(examples[i % len(examples)]) + "\n" for i in range(size * num_batches)]
    _path(cell, _BY_BATCH).write_text("".join(lines))
    # The first example of each worker's batch, then the second ones.
    in_turn = [
        lines[start + rank * cell.batch_size + i]
        for start in range(0, len(lines), size)
        for i in range(cell.batch_size)
        for rank in range(cell.world_size)
    ]
    _path(cell, _IN_TURN).write_text("".join(in_turn))


def in_turn(cell: Cell) -> str:
    """The file whose examples go to the workers one by one, as AllenNLP deals them out."""
    return str(_path(cell, _IN_TURN))


def by_batch(cell: Cell) -> List[Dict[str, Any]]:
    """The examples whose batches go to the workers in turn, as Accelerate deals them out."""
    return [json.loads(line) for line in _path(cell, _BY_BATCH).open()]


def batches_of(cell: Cell, rank: int) -> Iterable[List[Dict[str, Any]]]:
    """Yields the batches of a rank."""
    examples = by_batch(cell)
    size = cell.batch_size
    for start in range(rank * size, len(examples), size * cell.world_size):
        yield examples[start : start + size]


def _path(cell: Cell, name: str) -> Path:
    return Path(cell.data) / name
