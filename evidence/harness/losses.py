"""
Whether contenders do the same: their losses have to agree.
"""

import statistics
from typing import Sequence

# Relative, of each loss of the first steps, and of all on average. Sums in another order are
# rounded otherwise, and the difference grows with every step: Adam divides by the root of small
# numbers.
FIRST_STEPS, FIRST_TOLERANCE = 10, 1e-4
TOLERANCE = 1e-2


def largest_difference(
    name: str,
    losses: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    reference_name: str,
    accumulation: int = 1,
    tolerance: float = FIRST_TOLERANCE,
) -> float:
    """
    # Parameters

    name : `str`
        As messages call it.
    losses : `Sequence[Sequence[float]]`
        For each rank, that of each micro-batch.
    reference : `Sequence[Sequence[float]]`
        What they have to be. One of them may go on for longer.
    reference_name : `str`
    accumulation : `int`, optional (default = `1`)
        Micro-batches in a step.
    tolerance : `float`, optional (default = `1e-4`)
        Of each loss of the first steps, relative.

    # Returns

    `float`
        The largest difference, on any rank, relative to `reference`.

    # Raises

    `RuntimeError`
        If it is too large.
    """
    by_time = [
        [abs(a - b) / abs(b) for a, b in pairs_of_ranks]
        for pairs_of_ranks in zip(*(zip(*ranks) for ranks in zip(losses, reference)))
    ]
    first = [d for differences in by_time[: FIRST_STEPS * accumulation] for d in differences]
    all_ = [d for differences in by_time for d in differences]
    mean = statistics.fmean(all_)
    # Not a number is not less than anything, and `max` would pass it over.
    if not (all(d <= tolerance for d in first) and mean <= TOLERANCE):
        raise RuntimeError(
            f"The losses of '{name}' differ from those of '{reference_name}' by up to "
            f"{max(first):.1e} in the first {FIRST_STEPS} steps and {mean:.1e} on average, more "
            f"than {tolerance:.0e} and {TOLERANCE:.0e}, or aren't numbers. They don't do the "
            "same."
        )
    return max(all_)
