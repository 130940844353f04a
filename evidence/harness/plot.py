"""
What all plots have in common.
"""

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Tuple

from matplotlib.figure import Figure


@contextmanager
def figure(path: Path, size: Tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """
    Gives axes to draw on, of shape (rows, columns), and saves them with one legend for all.
    """
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row")
    yield axes
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels())
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    figure.savefig(path, dpi=110)
