"""
Draws charts of the values in metrics files with Bokeh.
"""

import math
from typing import Any, Dict, List, NamedTuple, Tuple

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.report_page.run import Line, Run, is_finite, mapping

# The colours of runs, distinct with any colour vision (Okabe and Ito, "Color Universal Design",
# 2008).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]

_MAX_POINTS = 20_000  # per page, so that it is small enough for mail

# Keys of `step` lines, by title of the chart.
_STEP_VALUES = {
    "Learning rate": "lr",
    "Gradient norm": "grad_norm",
    "Loss scale": "loss_scale",
    "Samples per second": "samples_per_second",
    "Tokens per second": "tokens_per_second",
    "Memory per worker (GB)": "memory_bytes",
}
_BYTES_PER_GB = 1e9
# Parts of the names of epoch metrics that aren't metrics of the model.
_SYSTEM_METRIC_SUFFIXES = ("_memory_MB", "_duration", "_epochs")

_TRAINING_STEPS, _TRAINING, _VALIDATION = "training steps", "training", "validation"

# The horizontal axis of the charts on each tab, by column of their data.
_AXES = {"step": "optimizer steps", "hours": "hours of training"}

# Of the area of a chart, and of each line of its legend, in pixels.
_HEIGHT, _LEGEND_HEIGHT, _LEGEND_LINE_HEIGHT = 270, 30, 24

# Of the row of charts, and of each chart, which bokeh would shrink to fit all of them into a row.
_ROW_STYLE = ":host { flex-wrap: wrap; }"
_CHART_STYLE = """
:host { flex: none !important; width: 50% !important; }
@media (max-width: 700px) { :host { width: 100% !important; } }
"""
# Lines of a legend that are longer than the chart is wide are wrapped, within words if need be.
_LEGEND_STYLE = """
:host { max-width: calc(100% - 80px); }
.bk-grid { grid-template-columns: minmax(0, auto); width: auto; }
.bk-glyph { flex: none; }
.bk-label { display: block; overflow-wrap: anywhere; white-space: normal; }
"""


class Curve(NamedTuple):
    """
    Curve of a chart.

    # Parameters

    run : `int`
        The index of the run.
    kind : `str`
        "training steps", or "training" or "validation" with one point per epoch.
    steps : `List[int]`
        The optimizer steps completed at each point.
    hours : `List[float]`
        The hours trained at each point.
    values : `List[float]`
        The value at each point.
    """

    run: int
    kind: str
    steps: List[int]
    hours: List[float]
    values: List[float]


def charts(runs: List[Run]) -> Dict[str, List[Curve]]:
    """
    Returns the curves by title of their chart: the loss, each metric of the models, and the values
    of `step` lines. Charts without values are left out.
    """
    found = {"Loss": [*_step_curves(runs, "loss"), *_epoch_curves(runs, "loss")]}
    for name in dict.fromkeys(name for run in runs for name in _metric_names(run)):
        if name != "loss":
            found[name.replace("_", " ").strip().capitalize()] = _epoch_curves(runs, name)
    found.update({title: _step_curves(runs, key) for title, key in _STEP_VALUES.items()})
    limit = max(50, _MAX_POINTS // max(1, sum(map(len, found.values()))))
    return {
        title: [_thinned(curve, limit) for curve in curves]
        for title, curves in found.items()
        if curves
    }


def _step_curves(runs: List[Run], key: str) -> List[Curve]:
    curves = [
        _curve(
            number,
            _TRAINING_STEPS,
            [(line, line.values) for line in run.lines_of_kind("step")],
            key,
        )
        for number, run in enumerate(runs)
    ]
    if key == "memory_bytes":
        curves = [
            curve._replace(values=[value / _BYTES_PER_GB for value in curve.values])
            for curve in curves
        ]
    return [curve for curve in curves if curve.values]


def _epoch_curves(runs: List[Run], name: str) -> List[Curve]:
    curves = [
        _curve(number, kind, _epochs(run), f"{kind}_{name}")
        for number, run in enumerate(runs)
        for kind in (_TRAINING, _VALIDATION)
    ]
    return [curve for curve in curves if curve.values]


def _epochs(run: Run) -> List[Tuple[Line, Dict[str, Any]]]:
    return [(line, mapping(line.values.get("metrics"))) for line in run.lines_of_kind("epoch")]


def _curve(run: int, kind: str, lines: List[Tuple[Line, Dict[str, Any]]], key: str) -> Curve:
    points = [(line, float(values[key])) for line, values in lines if is_finite(values.get(key))]
    return Curve(
        run,
        kind,
        [line.values["step"] for line, _ in points],
        [line.hours for line, _ in points],
        [value for _, value in points],
    )


def _metric_names(run: Run) -> List[str]:
    names: Dict[str, None] = {}
    for _, metrics in _epochs(run):
        for key, value in metrics.items():
            kind, _, name = key.partition("_")
            is_of_model = not any(part in key for part in _SYSTEM_METRIC_SUFFIXES)
            if kind in (_TRAINING, _VALIDATION) and is_of_model and is_finite(value):
                names[name] = None
    return list(names)


def _thinned(curve: Curve, limit: int) -> Curve:
    """Returns at most `limit` points, which are means of neighbouring ones."""
    size = math.ceil(len(curve.values) / limit)
    if size <= 1:
        return curve
    parts = [slice(start, start + size) for start in range(0, len(curve.values), size)]
    return curve._replace(
        steps=[curve.steps[part][-1] for part in parts],
        hours=[curve.hours[part][-1] for part in parts],
        values=[math.fsum(part) / len(part) for part in (curve.values[p] for p in parts)],
    )


class Drawing(NamedTuple):
    """
    Elements of an HTML page with charts.

    # Parameters

    library : `str`
        The JavaScript of Bokeh.
    script : `str`
        The element with the charts' data.
    place : `str`
        The element in which the charts appear.
    """

    library: str
    script: str
    place: str


def draw(runs: List[Run]) -> Drawing:
    """
    Draws the charts of these runs, for a page without network: over optimizer steps, and on a
    second tab over hours of training.

    # Raises

    `ConfigurationError`
        If Bokeh isn't installed.
    """
    try:
        from bokeh.embed import components
        from bokeh.layouts import row
        from bokeh.models import ColumnDataSource, TabPanel, Tabs
        from bokeh.resources import Resources
    except ImportError as error:
        raise ConfigurationError(
            "The report needs Bokeh: pip install 'allennlp-deepspeed[report]'"
        ) from error
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    # Both tabs share one source.
    sources = {
        title: [
            (curve, ColumnDataSource({"y": c.values, "step": c.steps, "hours": c.hours}))
            for curve, c in ((curve, _rounded(curve)) for curve in curves)
        ]
        for title, curves in charts(runs).items()
    }
    if not sources:
        return Drawing(library, "", "")
    names = [run.name for run in runs]
    panels = []
    for column, axis in _AXES.items():
        figures = [_figure(title, curves, names, column) for title, curves in sources.items()]
        child = row(figures, sizing_mode="stretch_width", stylesheets=[_ROW_STYLE])
        panels.append(TabPanel(child=child, title=f"over {axis}"))
    script, place = components(Tabs(tabs=panels, sizing_mode="stretch_width"))
    return Drawing(library, script, place)


def _rounded(curve: Curve) -> Curve:
    return curve._replace(
        hours=[float(f"{value:.6g}") for value in curve.hours],
        values=[float(f"{value:.6g}") for value in curve.values],
    )


def _figure(  # type: ignore[no-untyped-def]  # of Bokeh, if it is installed
    title: str, curves: List[Tuple[Curve, Any]], names: List[str], column: str
):
    from bokeh.models import DataRange1d
    from bokeh.plotting import figure

    # The height of the axis if all values are the same, for which the default is 2.
    span = max(abs(curve.values[0]) for curve, _ in curves) or 1
    labels = _labels([curve for curve, _ in curves], names)
    num_labels = len(set(labels) - {""})
    plot = figure(
        title=title,
        height=_HEIGHT + bool(num_labels) * _LEGEND_HEIGHT + num_labels * _LEGEND_LINE_HEIGHT,
        sizing_mode="stretch_width",
        stylesheets=[_CHART_STYLE],
        y_range=DataRange1d(default_span=span),
        x_axis_label=_AXES[column],
        y_axis_label=title,
        frame_align=False,  # as high as the chart's own legend permits
        tools="pan,box_zoom,hover,reset,save",
        tooltips=[("", "$name"), ("step", "@step"), ("hours", "@hours{0.000}"), (title, "@y")],
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    has_epochs = any(curve.kind != _TRAINING_STEPS for curve, _ in curves)
    for (curve, source), label in zip(curves, labels):
        style = {
            "color": COLOURS[curve.run % len(COLOURS)],
            "source": source,
            "name": label,
            **({"legend_label": label} if label else {}),
        }
        is_detail = curve.kind == _TRAINING_STEPS and has_epochs
        dash = "dashed" if curve.kind == _TRAINING else "solid"
        width, alpha = (1, 0.45) if is_detail else (2, 1)
        plot.line(column, "y", line_width=width, line_alpha=alpha, line_dash=dash, **style)
        if curve.kind != _TRAINING_STEPS or len(curve.values) == 1:
            plot.scatter(column, "y", size=5, **style)
    if num_labels:
        plot.legend.click_policy = "hide"
        plot.legend.location = "left"
        plot.legend.glyph_width = 40  # in which dashes can be seen
        plot.legend.stylesheets = [_LEGEND_STYLE]
        plot.add_layout(plot.legend[0], "below")
    return plot


def _labels(curves: List[Curve], names: List[str]) -> List[str]:
    """Returns what tells the curves of a chart apart: their runs, their kinds, or both."""
    has_kinds = any(curve.kind != _TRAINING_STEPS for curve in curves)
    return [
        ", ".join(
            [
                # "<" would end or open an element within the script.
                *([names[curve.run].replace("<", "(")] if len(names) > 1 else []),
                *([curve.kind] if has_kinds else []),
            ]
        )
        for curve in curves
    ]
