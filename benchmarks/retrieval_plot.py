from pathlib import Path
from typing import Any, Dict

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

_TICKS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def plot(results: Dict[str, Any], path: Path) -> None:
    """Draws recall@1 on the test verses against the global batch, before training and after."""
    scratch = results["verse_retrieval"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    rows = [row for row in scratch["rows"] if "test" in row]
    largest = max(rows, key=lambda row: row["batch_size"])
    for equal, style, offset in (("epochs", "o-", 6), ("steps", "s--", -13)):
        points = sorted(
            (row["batch_size"], row["test"]["recall@1"])
            for row in rows
            if row["equal"] == equal or row is largest
        )
        axis.plot(*zip(*points), style, label=f"after, equal {equal}")
        for x, y in points:
            if equal == "epochs" or x < largest["batch_size"]:
                axis.annotate(
                    f"{y:.1%}", (x, y), (0, offset), textcoords="offset points", ha="center"
                )
    batch_sizes = sorted({row["batch_size"] for row in rows})
    before = scratch["before"]["recall@1"]
    axis.plot(
        batch_sizes, [before] * len(batch_sizes), "^:", color="gray", label=f"before, {before:.1%}"
    )
    if "verse_retrieval_minilm" in results:
        for name, style in (("before", ":"), ("after", "-")):
            recall = results["verse_retrieval_minilm"][name]["recall@1"]
            axis.axhline(
                recall, linestyle=style, color="tab:green", label=f"MiniLM {name}, {recall:.1%}"
            )
    axis.set_xscale("log", base=2)
    axis.margins(x=0.1)
    axis.set_xticks(batch_sizes, [f"{size:,}" for size in batch_sizes])
    # Which shows halved errors as far apart wherever they are.
    axis.set_yscale("logit")
    axis.set_yticks(_TICKS)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("global batch")
    axis.set_ylabel("recall@1 on the test verses")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=110)
