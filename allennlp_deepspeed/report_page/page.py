import json
import time
from typing import Any, Dict, List

from allennlp.common.checks import ConfigurationError
from rich.filesize import decimal

from allennlp_deepspeed.report_page.charts import draw
from allennlp_deepspeed.report_page.run import Run, differences, is_finite, load_runs, mapping


def page(directories: List[str]) -> str:
    """
    Builds the HTML page of some runs.

    # Parameters

    directories : `List[str]`, required.
        Serialization directories.

    # Returns

    `str`
        HTML that needs no other file and no network.

    # Raises

    `ConfigurationError`
        If one of the directories has no metrics, or if Bokeh isn't installed.
    """
    try:
        text = _render(load_runs(directories))
    except RecursionError as error:
        raise ConfigurationError(
            f"A line or the config in {' or '.join(directories)} is nested too deeply to be shown."
        ) from error
    # A JSON string can contain a lone surrogate.
    return text.encode(errors="replace").decode()


def _render(runs: List[Run]) -> str:
    drawing = draw(runs)
    from jinja2 import Environment, PackageLoader, StrictUndefined  # which Bokeh needs

    environment = Environment(
        loader=PackageLoader("allennlp_deepspeed", "report_page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=decimal, age=age, json=_to_json)
    return environment.get_template("page.html.jinja").render(
        title=", ".join(run.name for run in runs),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        runs=runs,
        summaries=_table([{**_summary(run), **_best(run)} for run in runs]),
        drawing=drawing,
        differences=differences([run.config for run in runs]),
        environments=_table([_environment(run) for run in runs]),
    )


def age(seconds_since_1970: float) -> str:
    """Formats the time until now, such as "3 h 20 min"."""
    return duration(time.time() - seconds_since_1970)


def duration(seconds: float) -> str:
    """Formats a duration, such as "45 s", "3 h 20 min" or "3 days"."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def _summary(run: Run) -> Dict[str, str]:
    last = run.lines[-1]
    environment = run.environment
    num_epochs = environment.get("num_epochs")
    summary = {
        "state": run.state,
        "steps": str(run.num_steps),
        "epochs": str(len(run.lines_of_kind("epoch")))
        + (f" of {num_epochs}" if num_epochs else ""),
        "time trained": duration(last.hours * 3600),
        "recoveries": str(len(run.lines_of_kind("recover"))),
    }
    for name, key in (("workers", "world_size"), ("ZeRO", "zero_stage"), ("precision",) * 2):
        if key in environment:
            summary[name] = str(environment[key])
    return summary


def _best(run: Run) -> Dict[str, str]:
    """
    Returns the metrics of the best epoch, or of the last one if there is no validation, and of the
    test set.
    """
    metrics = {k: v for k, v in run.final_metrics.items() if is_finite(v)}
    best = {key: value for key, value in metrics.items() if key.startswith("best_")}
    if "best_epoch" in best:
        best["best_epoch"] += 1  # AllenNLP counts from 0, unlike the console
    shown = best or {key: v for key, v in metrics.items() if key.startswith("training_")}
    shown.update({key: v for key, v in run.test_metrics.items() if is_finite(v)})
    return {key: f"{value:.6g}" for key, value in shown.items()}


def _environment(run: Run) -> Dict[str, str]:
    environment = run.environment
    versions = {f"{name} version": v for name, v in mapping(environment.get("versions")).items()}
    hosts = environment.get("hosts")
    hosts = ", ".join(dict.fromkeys(map(str, hosts if isinstance(hosts, list) else [])))
    return {"device": str(environment.get("device", "")), "hosts": hosts, **versions}


def _table(columns: List[Dict[str, str]]) -> Dict[str, List[str]]:
    """Returns the rows by name, with a value for each column."""
    rows = dict.fromkeys(name for column in columns for name in column)
    return {row: [column.get(row, "") for column in columns] for row in rows}


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2)
