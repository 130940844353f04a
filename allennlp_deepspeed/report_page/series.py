"""
The figures of runs, as the curves that are to be drawn of them.
"""

import math
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from allennlp_deepspeed.config.values import is_number
from allennlp_deepspeed.report_page.run import Line, Run

# Of all curves of a page, which keeps it small enough to be sent by mail.
_MAX_POINTS = 20_000

_MEGABYTE = 10**6
_READINGS: List[Tuple[str, str, Callable[[Dict[str, Any]], Optional[float]]]] = [
    ("Learning rate", "lr", lambda v: v.get("lr")),
    ("Gradient norm", "norm", lambda v: v.get("grad_norm")),
    ("Loss scale", "scale", lambda v: v.get("loss_scale")),
    ("Samples a second", "samples / s", lambda v: v.get("samples_per_second")),
    ("Tokens a second", "tokens / s", lambda v: v.get("tokens_per_second")),
    ("Memory of a worker", "MB", lambda v: _scaled(v.get("memory_bytes"), _MEGABYTE)),
    (
        "Sent by a worker each step",
        "MB",
        lambda v: _scaled(v.get("communication_bytes_per_step"), _MEGABYTE),
    ),
]
# What metrics of an epoch have beside those of the model.
_NOT_OF_A_MODEL = ("_memory_MB", "communication", "_profile_", "_duration", "_epochs")


class Curve(NamedTuple):
    """
    # Parameters

    run : `int`
        Its number among the runs.
    kind : `str`
        "steps" for readings within epochs, else "training" or "validation", for a point an epoch.
    steps : `List[int]`
        Optimizer steps completed, by point.
    hours : `List[float]`
        Trained, by point.
    values : `List[float]`
        By point.
    """

    run: int
    kind: str
    steps: List[int]
    hours: List[float]
    values: List[float]


class Chart(NamedTuple):
    """
    # Parameters

    title : `str`
    unit : `str`
        What is written beside the axis.
    curves : `List[Curve]`
    """

    title: str
    unit: str
    curves: List[Curve]


def charts(runs: List[Run]) -> List[Chart]:
    """
    # Parameters

    runs : `List[Run]`, required.

    # Returns

    `List[Chart]`
        Of what any of them has figures of: the loss, each metric of the models, and what readings
        say of steps.
    """
    found = [Chart("Loss", "loss", _loss(runs))]
    for name in dict.fromkeys(name for run in runs for name in _metric_names(run)):
        if name != "loss":
            title = name.replace("_", " ").strip().capitalize()
            found.append(Chart(title, name, _of_epochs(runs, name)))
    for title, unit, value in _READINGS:
        found.append(Chart(title, unit, _of_steps(runs, value)))
    found = [chart for chart in found if chart.curves]
    num_curves = sum(len(chart.curves) for chart in found)
    limit = max(50, _MAX_POINTS // max(1, num_curves))
    return [
        chart._replace(curves=[_thinned(curve, limit) for curve in chart.curves]) for chart in found
    ]


def _loss(runs: List[Run]) -> List[Curve]:
    return [*_of_steps(runs, lambda v: v.get("loss")), *_of_epochs(runs, "loss")]


def _of_steps(runs: List[Run], value: Callable[[Dict[str, Any]], Optional[float]]) -> List[Curve]:
    curves = [
        _curve(number, "steps", run.of_kind("step"), value) for number, run in enumerate(runs)
    ]
    return [curve for curve in curves if curve.values]


def _of_epochs(runs: List[Run], name: str) -> List[Curve]:
    curves = []
    for number, run in enumerate(runs):
        for kind in ("training", "validation"):
            value = partial(_of_metrics, f"{kind}_{name}")
            curve = _curve(number, kind, run.of_kind("epoch"), value)
            if curve.values:
                curves.append(curve)
    return curves


def _of_metrics(key: str, values: Dict[str, Any]) -> Optional[float]:
    return _metrics(values).get(key)


def _metrics(values: Dict[str, Any]) -> Dict[str, Any]:
    return values.get("metrics") or {}


def _curve(
    run: int,
    kind: str,
    lines: List[Line],
    value: Callable[[Dict[str, Any]], Optional[float]],
) -> Curve:
    curve = Curve(run, kind, [], [], [])
    for line in lines:
        found = value(line.values)
        if can_be_drawn(found):
            curve.steps.append(line.values["step"])
            curve.hours.append(line.hours)
            curve.values.append(float(found))  # type: ignore[arg-type]
    return curve


def _metric_names(run: Run) -> List[str]:
    names: Dict[str, None] = {}
    for line in run.of_kind("epoch"):
        for key, value in _metrics(line.values).items():
            kind, _, name = key.partition("_")
            is_of_model = not any(part in key for part in _NOT_OF_A_MODEL)
            if kind in ("training", "validation") and is_of_model and can_be_drawn(value):
                names[name] = None
    return list(names)


def _thinned(curve: Curve, limit: int) -> Curve:
    """With means of neighbouring points instead of more than `limit` of them."""
    size = math.ceil(len(curve.values) / limit)
    if size <= 1:
        return curve
    parts = [slice(start, start + size) for start in range(0, len(curve.values), size)]
    return curve._replace(
        steps=[curve.steps[part][-1] for part in parts],
        hours=[curve.hours[part][-1] for part in parts],
        values=[math.fsum(part) / len(part) for part in (curve.values[p] for p in parts)],
    )


def _scaled(value: Optional[float], unit: int) -> Optional[float]:
    return None if value is None else value / unit


def can_be_drawn(value: Any) -> bool:
    if not is_number(value):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False
