"""
The data of a case: few examples, the same each time, different ones on each rank.
"""

from random import Random
from typing import Any, Dict, List

from tests.cross.case import BATCH_SIZE, Case
from tests.cross.model import LENGTH, NUM_FEATURES, NUM_TARGETS, NUM_TOKENS

Example = Dict[str, Any]


def batches_of(case: Case, rank: int) -> List[List[Example]]:
    """
    The micro-batches of an epoch on a rank. In each, all tokens of the vocabulary occur, so that
    the workers agree on what is done to an embedding in the forward pass. Lengths are the same in
    some of them.
    """
    random = Random(f"{case.seed}: {rank}")
    batches = []
    for i in range(case.num_batches_of(rank)):
        tokens = list(range(NUM_TOKENS))
        tokens += random.choices(tokens, k=BATCH_SIZE * LENGTH - NUM_TOKENS)
        is_ragged = random.random() < 0.5
        if case.uneven == "smaller" and rank == 1 and i == case.num_batches - 1:
            size = BATCH_SIZE // 2
            tokens = tokens[: size * LENGTH]
        else:
            size = BATCH_SIZE
        random.shuffle(tokens)
        batch = []
        for row in range(size):
            length = random.randint(1, LENGTH) if is_ragged else LENGTH
            batch.append(
                {
                    "rank": rank,
                    "tokens": tokens[row * LENGTH : (row + 1) * LENGTH],
                    "mask": [column < length for column in range(LENGTH)],
                    "features": [random.gauss(0, 1) for _ in range(NUM_FEATURES)],
                    "target": [random.gauss(0, 1) for _ in range(NUM_TARGETS)],
                    "heads": case.heads_of(rank, i),
                }
            )
        batches.append(batch)
    return batches


def validation_batches_of(case: Case, rank: int) -> List[List[Example]]:
    """The same on each rank, and all heads are used."""
    validation = Case(-case.index - 2, 0, num_batches=2)
    batches = batches_of(validation, 0)
    for batch in batches:
        for example in batch:
            example.update(rank=rank, heads=[1] * case.num_heads)
    return batches
