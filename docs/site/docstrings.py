"""
Docstrings as AllenNLP writes them, made into Markdown that is right below any heading.
"""

import re
from typing import Iterator, List

try:
    import griffe
except ImportError:  # it is needed by `make docs` alone
    griffe = None  # type: ignore[assignment]

_HEADING = re.compile(r"# (\w[\w ]*)")
# `name : type, optional (default = 1)`, a type alone as of what is returned or raised, or names.
_ITEM = re.compile(r"(?P<names>\*{0,2}\w+(?:, \w+)*)(?P<type> : .+)?|`[^`]+`(?:, `[^`]+`)*")
_LINK_TO_SOURCE = re.compile(r"\[([^]]+)\]\((?!https?://|#)[^)]+\)")


def as_markdown(docstring: str) -> str:
    """
    # Parameters

    docstring : `str`, required.
        With sections such as this one.

    # Returns

    `str`
        With the headings in bold, which is no heading of the page, what is below them in a list,
        and without links to files of sources.
    """
    lines: List[str] = []
    in_section = False
    for line in _LINK_TO_SOURCE.sub(r"\1", docstring).splitlines():
        heading = _HEADING.fullmatch(line)
        if heading:
            in_section = True
            lines.append(f"**{heading[1]}**")
            continue
        lines.extend(_of_section(line, lines) if in_section else [line])
    return "\n".join(lines).strip()


def _of_section(line: str, before: List[str]) -> Iterator[str]:
    if not line or line.startswith(" "):
        # What is said of an item is a paragraph in it.
        if line and before and before[-1].startswith("- "):
            yield ""
        yield line
        return
    item = _ITEM.fullmatch(line)
    if item is None:
        if before and before[-1].startswith(("    ", "- ")):
            yield ""
        yield line
        return
    if before and before[-1]:
        yield ""
    names = item["names"]
    yield f"- {line}" if names is None else f"- **{names}**{item['type'] or ''}"


if griffe is not None:

    class AllenNLPDocstrings(griffe.Extension):
        """Has mkdocstrings take them so."""

        def on_object(self, *, obj: "griffe.Object", **kwargs: object) -> None:
            if obj.docstring is not None:
                obj.docstring.value = as_markdown(obj.docstring.value)
