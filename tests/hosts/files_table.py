"""Compares what is on disk with the table in docs/several_machines.md."""

import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Set

from tests.support.command import REPOSITORY

_PAGE = REPOSITORY / "docs" / "several_machines.md"
_ROW = re.compile(r"\| (?P<files>`.*?) \| (?P<once>rank|node|directory|training) \|")


class Row(NamedTuple):
    pattern: str
    once: str

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None

    def number(self, name: str) -> int:
        """The rank or the node in the name of a file."""
        match = re.fullmatch(self.pattern, name)
        assert match is not None
        return int(match.group(self.once))


def rows() -> List[Row]:
    found = []
    for match in _ROW.finditer(_PAGE.read_text()):
        for name in re.findall("`(.*?)`", match.group("files")):
            pattern = re.escape(name)
            for placeholder in ("rank", "node"):
                pattern = pattern.replace(rf"\{{{placeholder}\}}", rf"(?P<{placeholder}>\d+)")
            pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", pattern).replace(r"\*", "[^/]*")
            found.append(Row(pattern, match.group("once")))
    return found


def check(directories: Dict[Path, Sequence[int]], workers_per_node: int = 2) -> None:
    """
    # Parameters

    directories : `Dict[Path, Sequence[int]]`
        The ranks that share each serialization directory.
    """
    files = {directory: _names(directory) for directory in directories}
    of_all: Set[str] = set().union(*files.values())
    for name in sorted(of_all):
        matching = [row for row in rows() if row.matches(name)]
        assert len(matching) == 1, f"{name} is in {len(matching)} rows"
    for row in rows():
        there = {
            directory: [name for name in names if row.matches(name)]
            for directory, names in files.items()
        }
        if row.once == "directory":
            assert len({tuple(names) for names in there.values()}) == 1, there
        for (directory, names), ranks in zip(there.items(), directories.values()):
            if row.once == "training":
                assert not names or 0 in ranks, (directory, names)
            elif row.once == "rank" and names:
                assert {row.number(name) for name in names} == set(ranks), (directory, names)
            elif row.once == "node":
                others = {rank // workers_per_node for rank in ranks[workers_per_node:]}
                assert {row.number(name) for name in names} == others, (directory, names)


def _names(directory: Path) -> List[str]:
    """All but what the callback of `load_config` writes, and the lock of AllenNLP's vocabulary."""
    names = [str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()]
    return sorted(name for name in names if name not in ("steps.json", "vocabulary/.lock"))
