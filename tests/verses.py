"""Samples of the demo's data."""

import json
from pathlib import Path

from demo.prepare_verses import read_verses, split_of_verse


def write_sample(directory: Path, every: int) -> None:
    """Writes every so manieth verse, from all over the book, to files named as the demo's."""
    for split in ("train", "validation", "test"):
        of_split = (verse for verse_id, verse in read_verses() if split_of_verse(verse_id) == split)
        lines = [json.dumps(verse) for i, verse in enumerate(of_split) if i % every == 0]
        (directory / f"{split}.jsonl").write_text("\n".join(lines))
