"""
The figures of `benchmarks.contrastive` as JSON and as tables.
"""

import json
import statistics
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from rich.console import Console
from rich.table import Table

from benchmarks.figures import describe, heading, markdown_table, megabytes, quartiles
from benchmarks.process_tree import Outcome

_PACKAGES = ("torch", "deepspeed", "allennlp", "transformers", "sentence-transformers")
_RATIO_HEADINGS = ("stage", "contender", "against", "time per example", "quartiles")
_HEADINGS = ("stage", "contender", "ms/step", "peak MB", "losses differ by")


class Report:
    """
    Collects rows, and writes them to `directory` as they come: `contrastive.json` and
    `contrastive.md`.

    # Parameters

    directory : `Path`
    world_size : `int`
    settings : `int`
        What the batches are like.
    """

    def __init__(self, directory: Path, world_size: int, **settings: int) -> None:
        self._directory = directory
        self._heading = heading(world_size, _PACKAGES)
        self._settings = settings
        self._ratios: List[Dict[str, Any]] = []
        self._contenders: List[Dict[str, Any]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        stage: int,
        steps: int,
        outcomes: Dict[str, List[Outcome]],
        differences: Dict[str, float],
        seconds: Dict[Tuple[str, str], List[Tuple[float, float]]],
        skipped: Dict[str, str],
    ) -> None:
        """
        # Parameters

        stage : `int`
        steps : `int`
            In a segment.
        outcomes : `Dict[str, List[Outcome]]`
            For each contender that of each rank.
        differences : `Dict[str, float]`
            The largest of a contender's losses, relative.
        seconds : `Dict[Tuple[str, str], List[Tuple[float, float]]]`
            What two contenders took for their segments.
        skipped : `Dict[str, str]`
            Why a contender didn't take part.
        """
        for (contender, against), pairs in seconds.items():
            ratios = [one / other for one, other in pairs]
            self._ratios.append(
                {
                    "zero_stage": stage,
                    "contender": contender,
                    "against": against,
                    "time_per_example": statistics.median(ratios),
                    "quartiles": quartiles(ratios),
                    "seconds_of_pairs": [list(pair) for pair in pairs],
                    "steps_in_segment": steps,
                }
            )
        for name, ranks in outcomes.items():
            segments = [
                taken
                for names, pairs in seconds.items()
                for pair in pairs
                for contender, taken in zip(names, pair)
                if contender == name
            ]
            self._contenders.append(
                {
                    "zero_stage": stage,
                    "contender": name,
                    "seconds_per_step": statistics.median(segments) / steps,
                    "peak_memory_bytes": [outcome.peak_memory for outcome in ranks],
                    "first_loss": _mean_over_ranks(ranks, 0),
                    "final_loss": _mean_over_ranks(ranks, -1),
                    "loss_difference": differences[name],
                }
            )
        for name, reason in skipped.items():
            self._contenders.append({"zero_stage": stage, "contender": name, "skipped": reason})
        self._write()

    def print(self) -> None:
        """Prints the tables."""
        console = Console(width=None if Console().is_terminal else 160)
        for headings, rows in self._tables():
            table = Table(*headings)
            for cells in rows:
                table.add_row(*cells)
            console.print(table)

    def _write(self) -> None:
        data = {
            **self._heading,
            **self._settings,
            "ratios": self._ratios,
            "contenders": self._contenders,
        }
        (self._directory / "contrastive.json").write_text(json.dumps(data, indent=1) + "\n")
        lines = [
            "# Gradient caching",
            "",
            describe(self._heading),
            "{batch_size} pairs of texts of {num_tokens} tokens on a worker, in chunks of "
            "{chunk_size}.".format(**self._settings),
            "How the figures are made: [NOTES.md](../NOTES.md#gradient-caching).",
        ]
        for headings, rows in self._tables():
            lines += ["", *markdown_table(headings, rows)]
        (self._directory / "contrastive.md").write_text("\n".join(lines) + "\n")

    def _tables(self) -> List[Tuple[Sequence[str], List[List[str]]]]:
        return [
            (_RATIO_HEADINGS, [_ratio_cells(row) for row in self._ratios]),
            (_HEADINGS, [_cells(row) for row in self._contenders]),
        ]


def _mean_over_ranks(ranks: Sequence[Outcome], step: int) -> float:
    return statistics.mean(outcome.losses[step] for outcome in ranks)


def _ratio_cells(row: Dict[str, Any]) -> List[str]:
    low, high = row["quartiles"]
    return [
        str(row["zero_stage"]),
        row["contender"],
        row["against"],
        f"{row['time_per_example']:.2f}",
        f"{low:.2f} to {high:.2f}",
    ]


def _cells(row: Dict[str, Any]) -> List[str]:
    key = [str(row["zero_stage"]), row["contender"]]
    if "skipped" in row:
        return [*key, row["skipped"], "", ""]
    return [
        *key,
        f"{1000 * row['seconds_per_step']:.1f}",
        megabytes(max(row["peak_memory_bytes"])),
        f"{row['loss_difference']:.0e}",
    ]
