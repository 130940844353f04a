from typing import Any, Dict, List, NamedTuple, Tuple

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.report_page.series import Chart, Curve

# By run. Told apart with any colour vision, on light and dark ground (Okabe and Ito, "Color
# Universal Design", 2008).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]

_DASHES = {"steps": "solid", "training": "dashed", "validation": "solid"}


class Drawn(NamedTuple):
    """
    # Parameters

    library : `str`
        The JavaScript that draws.
    script : `str`
        The element with what is to be drawn.
    places : `List[Tuple[str, str]]`
        Of each chart its title, and the element in which it appears.
    """

    library: str
    script: str
    places: List[Tuple[str, str]]


def draw(charts: List[Chart], names: List[str]) -> Drawn:
    """
    # Parameters

    charts : `List[Chart]`, required.
    names : `List[str]`, required.
        Of the runs.

    # Returns

    `Drawn`
        What a page needs to draw them, without network: over the column "step" of each source, for
        which "hours" can take its place.

    # Raises

    `ConfigurationError`
        If Bokeh isn't installed.
    """
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError as error:
        raise ConfigurationError(
            "The report's charts need Bokeh: pip install 'allennlp-deepspeed[report]'"
        ) from error
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    if not charts:
        return Drawn(library, "", [])
    script, places = components([_figure(chart, names) for chart in charts])
    return Drawn(library, script, [(c.title, place) for c, place in zip(charts, places)])


def _figure(chart: Chart, names: List[str]):  # type: ignore[no-untyped-def]  # of Bokeh, if there
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    plot = figure(
        height=280,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,reset,save",
        toolbar_location="right",
        y_axis_label=chart.unit,
        x_axis_label="optimizer steps",
        name=chart.title,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    has_epochs = any(curve.kind != "steps" for curve in chart.curves)
    for curve in chart.curves:
        num_points = len(curve.values)
        source = ColumnDataSource(
            {
                "y": [float(f"{value:.6g}") for value in curve.values],
                "step": curve.steps,
                "hours": [float(f"{value:.6g}") for value in curve.hours],
            }
        )
        # The page's script shows and hides runs by it.
        tags = [f"run {curve.run}"]
        style: Dict[str, Any] = {"source": source, "name": _label(curve, names), "tags": tags}
        style["color"] = COLOURS[curve.run % len(COLOURS)]
        is_detail = curve.kind == "steps" and has_epochs
        width, alpha = (1, 0.45) if is_detail else (2, 1)
        dash = _DASHES[curve.kind]
        plot.line("step", "y", line_width=width, line_alpha=alpha, line_dash=dash, **style)
        if curve.kind != "steps" or num_points == 1:
            plot.scatter("step", "y", size=5, **style)
    tooltips = [("", "$name"), ("step", "@step"), ("hours", "@hours{0.000}")]
    plot.add_tools(HoverTool(tooltips=[*tooltips, (chart.unit, "@y{0.[00000]}")]))
    return plot


def _label(curve: Curve, names: List[str]) -> str:
    # Which would end or open an element within the script.
    name = names[curve.run].replace("<", "(")
    return f"{name}, {'within epochs' if curve.kind == 'steps' else curve.kind}"
