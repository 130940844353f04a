import re
from typing import Any, Dict, List, Optional

from rich.console import Group
from rich.table import Table
from rich.text import Text

from allennlp_deepspeed.config.values import is_number

# Of no interest after each epoch; they are in the metrics files.
_LEFT_OUT = re.compile(r"(gpu|worker)_\d+_memory_MB$|communication_|profile_")


class EpochTable:
    """
    The metrics of an epoch, beside those of the best epoch before it.

    # Parameters

    metrics : `Dict[str, Any]`, required.
        As AllenNLP has them after an epoch.
    best_before : `Dict[str, Any]`, required.
        Validation metrics of the best epoch before it; empty for the first.
    """

    def __init__(self, metrics: Dict[str, Any], best_before: Dict[str, Any]) -> None:
        names = [
            match[2]
            for match in map(re.compile("(training|validation)_(.*)").fullmatch, metrics)
            if match and is_number(metrics[match[0]]) and not _LEFT_OUT.match(match[2])
        ]
        self._rows: List[List[str]] = []
        validates = any(f"validation_{name}" in metrics for name in names)
        self._header = ["", "training", *(["validation"] if validates else [])]
        if best_before and validates:
            self._header += ["best before", "change"]
        for name in sorted(set(names)):
            now = metrics.get(f"validation_{name}")
            row = [name, _number(metrics.get(f"training_{name}")), _number(now)]
            before = best_before.get(name)
            row += [_number(before), _change(now, before)]
            self._rows.append(row[: len(self._header)])

    def as_text(self, title: str) -> str:
        rows = [self._header, *self._rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])

    def as_table(self, title: str) -> Group:
        """The same for a terminal."""
        table = Table(box=None, padding=(0, 1), header_style="dim")
        table.add_column()
        for name in self._header[1:]:
            table.add_column(name, justify="right")
        for name, *numbers in self._rows:
            table.add_row(Text(name, style="cyan"), *numbers)
        return Group(Text(title, style="bold"), table)


def _number(value: Optional[float]) -> str:
    return "" if not is_number(value) else f"{value:.4g}"


def _change(now: Optional[float], before: Optional[float]) -> str:
    if not is_number(now) or not is_number(before):
        return ""
    return f"{now - before:+.3g}"  # type: ignore[operator]
