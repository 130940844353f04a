from pathlib import Path
from typing import Any, Dict, List, Tuple

import matplotlib
from matplotlib.figure import Figure

# What is drawn: its heading, the figure of a row, and the divisor to its unit.
_QUANTITIES: Tuple[Tuple[str, str, float], ...] = (
    ("MB per step", "bytes", 1e6),
    ("seconds per step", "seconds_per_step", 1.0),
)


def plot(rows: List[Dict[str, Any]], path: Path) -> None:
    """
    Draws the bytes that cross the network and the time of an optimizer step against the
    accumulation, for each model and ZeRO stage, one line a contender.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    stages = sorted({row["zero_stage"] for row in rows})
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    colors = dict(zip(contenders, matplotlib.color_sequences["tab10"]))
    num_rows = len(models) * len(_QUANTITIES)
    figure = Figure(figsize=(3 * len(stages) + 2, 2.4 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, len(stages), squeeze=False, sharey="row")
    for i_row, (model, (heading, key, divisor)) in enumerate(
        (model, quantity) for model in models for quantity in _QUANTITIES
    ):
        axes[i_row, 0].set_ylabel(f"{model}\n{heading}")
        for axis, stage in zip(axes[i_row], stages):
            axis.set_title(f"stage {stage}")
            for i, contender in enumerate(contenders):
                points = sorted(
                    (row["accumulation"], _figure(row, key) / divisor)
                    for row in rows
                    if (row["model"], row["zero_stage"], row["contender"])
                    == (model, stage, contender)
                )
                if points:
                    axis.plot(
                        *zip(*points),
                        "o-",
                        # The later the thinner, so that lines that coincide all show.
                        linewidth=1.5 * (len(contenders) - i),
                        color=colors[contender],
                        label=contender,
                    )
                    axis.set_xticks([x for x, _ in points])
        # Last, because it ends the scaling, of all that share the axis.
        axes[i_row, 0].set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("accumulation steps")
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels())
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    figure.savefig(path, dpi=110)


def _figure(row: Dict[str, Any], key: str) -> float:
    if key == "bytes":
        return sum(kind["bytes"] for kind in row["traffic_per_step"].values())
    return row[key]
