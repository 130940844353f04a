import logging
import math
from numbers import Real
from typing import Any, Callable, Dict, Set

logger = logging.getLogger(__name__)

_WARNING = (
    "These metrics differ between the workers, and those of worker 0 are written, and used to find "
    "the best epoch: %s. If a class derived from Metric computes them from its worker's instances, "
    "declare `summed_attributes = (...)` there, with the names of the attributes that its calls "
    "add to."
)

# Sums of the same numbers in another order may differ by less.
_TOLERANCE = 1e-5


def warn_of_partial_metrics(
    metrics: Dict[str, Any], known: Set[str], exchange: Callable[..., Dict[str, Any]]
) -> None:
    """
    Warns of metrics that differ between the ranks, because each rank computes them from its own
    instances. AllenNLP writes the metrics of rank 0. Every rank must call it.

    # Parameters

    metrics : `Dict[str, Any]`, required.
        The metrics of an epoch, as callbacks have them.
    known : `Set[str]`, required.
        The metrics that have been warned of, to which others are added.
    exchange : `Exchange`, required.
    """
    own = {
        name: float(value)
        for name, value in metrics.items()
        if name.startswith(("training_", "validation_")) and isinstance(value, Real)
    }
    first, *others = exchange(epoch_metrics=own)["epoch_metrics"]
    partial = sorted(
        name
        for name, value in first.items()
        if any(not _is_same(value, other.get(name, value)) for other in others)
    )
    if not known.issuperset(partial):
        logger.warning(_WARNING, ", ".join(partial))
        known.update(partial)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or (
        math.isnan(one) and math.isnan(other)
    )
