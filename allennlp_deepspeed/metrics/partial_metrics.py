import logging
import math
from numbers import Real
from typing import Any, Dict

from allennlp_deepspeed.engine.process import collectives

logger = logging.getLogger(__name__)

_WARNING = (
    "These metrics are those of worker 0's instances only, because nothing sums them over the "
    "workers: %s. If a class derived from Metric computes them, declare `summed_attributes = "
    "(...)` there, with the names of the attributes that its calls add to."
)

# Values that are equal up to the order of a sum aren't those of a part of the instances.
_TOLERANCE = 1e-5


def warn_of_partial_metrics(metrics: Dict[str, Any]) -> bool:
    """
    Warns of metrics that differ between the ranks: of a rank's own instances, of which AllenNLP
    writes those of rank 0. One all-gather of objects with several workers. Every rank must call it.

    # Parameters

    metrics : `Dict[str, Any]`, required.
        The metrics of an epoch, as callbacks have them.

    # Returns

    `bool`
        Whether there are any, the same on every rank.
    """
    if collectives.world_size() == 1:
        return False
    own = {
        name: float(value)
        for name, value in metrics.items()
        if name.startswith(("training_", "validation_")) and isinstance(value, Real)
    }
    first, *others = collectives.all_gather_object(own)
    partial = sorted(
        name
        for name, value in first.items()
        if any(not _is_same(value, other.get(name, value)) for other in others)
    )
    if partial:
        logger.warning(_WARNING, ", ".join(partial))
    return bool(partial)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or (
        math.isnan(one) and math.isnan(other)
    )
