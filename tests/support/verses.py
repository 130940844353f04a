"""Samples of the demo's data."""

import json
from pathlib import Path

from demo.prepare_verses import read_pairs, read_verses, split_of_verse


def write_sample(directory: Path, every: int) -> None:
    """Writes every so manieth verse, from all over the book, to files named as the demo's."""
    for prefix, read in (("", read_verses), ("pairs_", read_pairs)):
        for split in ("train", "validation", "test"):
            of_split = (record for verse_id, record in read() if split_of_verse(verse_id) == split)
            lines = [json.dumps(record) for i, record in enumerate(of_split) if i % every == 0]
            (directory / f"{prefix}{split}.jsonl").write_text("\n".join(lines))
