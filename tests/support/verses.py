"""Samples of the demo's data."""

import json
from pathlib import Path
from typing import Dict, List

from demo.prepare_verses import read_pairs, read_verses, split_of_verse


def write_sample(directory: Path, every: int) -> None:
    """Writes every so manieth verse, from all over the book, to files named as the demo's."""
    for prefix, read in (("", read_verses), ("pairs_", read_pairs)):
        of_splits: Dict[str, List[Dict[str, str]]] = {"train": [], "validation": [], "test": []}
        for verse_id, record in read():
            of_splits[split_of_verse(verse_id)].append(record)
        for split, records in of_splits.items():
            lines = [json.dumps(record) for record in records[::every]]
            (directory / f"{prefix}{split}.jsonl").write_text("\n".join(lines))
