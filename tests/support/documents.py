"""Blocks of code in the documents: what language they are in, and what they say."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple

from allennlp.common.params import evaluate_snippet

from tests.support.command import REPOSITORY

PAGES = [
    *(
        REPOSITORY / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "evidence/NOTES.md")
    ),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# What a reader types; any other block without a language is what was printed, or a file.
_PROGRAMS = {
    "allennlp",
    ".venv/bin/allennlp",
    ".venv/bin/pip",
    "accelerate",
    "deepspeed",
    "echo",
    "export",
    "make",
    "mpirun",
    "pip",
    "pytest",
    "python",
    "source",
    "srun",
    "torchrun",
}


class Block(NamedTuple):
    """
    # Parameters

    page : `Path`
    language : `str`
        "console" for commands, "output" for what they print.
    text : `str`
    reason : `str`
        Why it isn't run, if the page says so above it; otherwise empty.
    """

    page: Path
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text.strip().splitlines()[0][:40]}"


def blocks() -> Iterator[Block]:
    """Of all pages."""
    for page in PAGES:
        for found in _BLOCK.finditer(page.read_text()):
            language, text = found["language"], found["text"]
            if language in ("", "bash"):
                first_words = {line.split(" ")[0] for line in text.splitlines() if line.strip()}
                language = "output" if first_words.isdisjoint(_PROGRAMS) else "console"
            yield Block(page, language, text, found["reason"] or "")


def commands(text: str) -> Iterator[List[str]]:
    """The words of each command of a block, of which one may have several lines."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on
            continue
        pending = ""
        command: List[str] = []
        for word in [*words, "&&"]:
            if word == "&&":
                if command:
                    # Without where its output goes.
                    yield command[: command.index(">")] if ">" in command else command
                command = []
            else:
                command.append(word)
    assert not pending, f"a quotation doesn't end: {pending}"


def config_in(text: str) -> Dict[str, Any]:
    """What a part of a config says, in which "..." stands for what is elsewhere."""
    without_gaps = re.sub(r"\.\.\.(?=\s*(?:[}\]]|\Z))", "", text)
    return json.loads(evaluate_snippet("", f"{{{without_gaps}\n}}"))


def apply_diff(diff: str) -> str:
    """What a diff leaves."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
