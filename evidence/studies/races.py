"""
On a device with streams all accesses to memory are ordered, and each wait of this package is needed
for that. Trains on the CPU with streams that are only names, and by DeepSpeed alone.
"""

import argparse
from typing import Any, Dict, List

from evidence import report
from tests.races.cases import BUCKETS, CASES, DEFAULT, PREFETCH, find_races, find_races_of_deepspeed

TIME = "5 minutes"

ONLY = "names of cases"

_ZERO_3 = {"stage": 3, **BUCKETS, **PREFETCH}

_ALONE: Dict[str, Dict[str, Any]] = {
    "1, overlap_comm": {"stage": 1, "overlap_comm": True, **BUCKETS},
    "2, overlap_comm": {"stage": 2, "overlap_comm": True, **BUCKETS},
    "3, threshold 0": {**_ZERO_3, "stage3_param_persistence_threshold": 0},
    "3, default threshold": {**_ZERO_3, **DEFAULT},
}


def _row(name: str, ranks: List[Any]) -> Dict[str, Any]:
    races: Dict[str, int] = {}
    for each in ranks:
        for race, count in each.races.items():
            races[str(race)] = races.get(str(race), 0) + count
    print(name, sum(races.values()), *races, sep="\n  ", flush=True)
    return {
        "name": name,
        "operations": sum(each.num_operations for each in ranks),
        "races": races,
        "calls": ranks[0].own_calls,
    }


def _mutations(rows: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Returns, for each wait, the first case in which it is missed if it is left out."""
    needed: Dict[str, Any] = {}
    for row in rows:
        for call in row["calls"]:
            if needed.get(call) is None:
                without = _row(
                    f"{row['name']} without {call}", find_races(CASES[row["name"]], call)
                )
                needed[call] = {**without, "name": row["name"]} if without["races"] else None
    return needed


def _accesses(row: Dict[str, Any]) -> str:
    return f"{sum(row['races'].values()):,}"


def _text(data: Dict[str, Any]) -> str:
    cases = [(row["name"], f"{row['operations']:,}", _accesses(row)) for row in data["cases"]]
    waits = [
        (f"`{call}`", row["name"] if row else "not needed", _accesses(row) if row else "0")
        for call, row in data["waits"].items()
    ]
    alone = [(row["name"], _accesses(row), _accesses(other)) for row, other in data["alone"]]
    found = {race for pair in data["alone"] for row in pair for race in row["races"]}
    listed = "\n".join(f"- {race}" for race in sorted(" / ".join(r.split("\n    ")) for r in found))
    return report.document(
        "Accesses that no stream orders",
        "Two ranks train on the CPU with streams that are only names (`tests/races/detector.py`): "
        "each operation accesses its tensors in the current stream, and two accesses to the same "
        "memory, one of which writes, must be ordered by waits. Printed by "
        f"`python -m evidence races`. {report.describe(data, with_workers=False)}",
        report.table(("stage and options", "operations", "unordered accesses"), cases)
        + "\n\n## Without one of the waits of this package\n\n"
        + report.table(("wait that is left out", "case", "unordered accesses"), waits)
        + "\n\n## DeepSpeed alone\n\nThis package disables the throughput timer, which "
        "synchronizes the host in each pass.\n\n"
        + report.table(("", "with its throughput timer", "without"), alone)
        + ("\n\nWhat they are:\n\n" + listed if found else ""),
    )


def run(arguments: argparse.Namespace) -> bool:
    rows = [_row(name, find_races(CASES[name])) for name in arguments.only or CASES]
    waits = _mutations(rows)
    alone = [
        [
            _row(f"{name}, DeepSpeed alone", find_races_of_deepspeed(zero, has_timer))
            for has_timer in (True, False)
        ]
        for name, zero in (() if arguments.only else _ALONE.items())
    ]
    data = {**report.heading(2), "cases": rows, "waits": waits, "alone": alone}
    arguments.page.write(data, _text(data))
    # Other cases may need a wait that these don't.
    all_are_needed = bool(arguments.only) or all(waits.values())
    return not any(row["races"] for row in rows) and all_are_needed
