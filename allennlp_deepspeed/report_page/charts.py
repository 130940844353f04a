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
    "Memory per worker": "memory_bytes",
}
# Parts of the names of epoch metrics that aren't metrics of the model.
_SYSTEM_METRIC_SUFFIXES = ("_memory_MB", "_duration", "_epochs")

_WITHIN_EPOCHS, _TRAINING, _VALIDATION = "within epochs", "training", "validation"


class Curve(NamedTuple):
    """
    Curve of a chart.

    # Parameters

    run : `int`
        The index of the run.
    kind : `str`
        "within epochs", or "training" or "validation" with one point per epoch.
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
            number, _WITHIN_EPOCHS, [(line, line.values) for line in run.lines_of_kind("step")], key
        )
        for number, run in enumerate(runs)
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
        from bokeh.layouts import gridplot
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
    for column, title in (("step", "optimizer steps"), ("hours", "hours of training")):
        figures = [_figure(title, curves, names, column) for title, curves in sources.items()]
        grid = gridplot(figures, ncols=2, merge_tools=False, sizing_mode="stretch_width")
        panels.append(TabPanel(child=grid, title=f"over {title}"))
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
    from bokeh.models import NumeralTickFormatter
    from bokeh.plotting import figure

    plot = figure(
        title=title,
        height=320,
        tools="pan,box_zoom,hover,reset,save",
        tooltips=[("", "$name"), ("step", "@step"), ("hours", "@hours{0.000}"), (title, "@y")],
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    if _STEP_VALUES.get(title, "").count("bytes"):
        plot.yaxis.formatter = NumeralTickFormatter(format="0.0b")
    has_epochs = any(curve.kind != _WITHIN_EPOCHS for curve, _ in curves)
    for curve, source in curves:
        # "<" would end or open an element within the script.
        label = f"{names[curve.run].replace('<', '(')}, {curve.kind}"
        style = {
            "color": COLOURS[curve.run % len(COLOURS)],
            "source": source,
            "name": label,
            "legend_label": label,
        }
        is_detail = curve.kind == _WITHIN_EPOCHS and has_epochs
        dash = "dashed" if curve.kind == _TRAINING else "solid"
        width, alpha = (1, 0.45) if is_detail else (2, 1)
        plot.line(column, "y", line_width=width, line_alpha=alpha, line_dash=dash, **style)
        if curve.kind != _WITHIN_EPOCHS or len(curve.values) == 1:
            plot.scatter(column, "y", size=5, **style)
    plot.legend.click_policy = "hide"
    plot.legend.ncols, plot.legend.location = 3, "left"
    plot.add_layout(plot.legend[0], "below")
    return plot
