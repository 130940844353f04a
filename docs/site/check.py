"""
Looks at the pages that `make docs` has built: `python -m docs.site.check site`. Prints what is
wrong, and exits with 1 if anything is.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

# Tags that a browser loads something for by itself, and where they say what.
_LOADING = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
_REMOTE = ("http://", "https://", "//")
# Links that name a page and load nothing.
_NAMING = {"canonical", "next", "prev", "alternate"}


class _Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.problems: List[str] = []
        self.num_titles = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        attributes: Dict[str, str] = {name: value or "" for name, value in attrs}
        self.num_titles += tag == "h1"
        target = attributes.get(_LOADING.get(tag, ""), "")
        names_only = tag == "link" and attributes.get("rel") in _NAMING
        if target.startswith(_REMOTE) and not names_only:
            self.problems.append(f"<{tag}> is loaded from {target}")
        if "mermaid" in attributes.get("class", "").split():
            self.problems.append("a diagram of mermaid's, whose script is loaded from another host")


def problems_of(html: str) -> List[str]:
    """
    # Parameters

    html : `str`, required.
        Of a page.

    # Returns

    `List[str]`
        What is loaded from another host; and that a docstring's heading is one of the page, if
        there are several titles.
    """
    page = _Page(html)
    if page.num_titles != 1:
        page.problems.append(f"{page.num_titles} titles")
    return page.problems


def problems(site: Path) -> Iterator[str]:
    """Of all pages and style sheets under a directory."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        yield f"{site}: no pages"
    for page in pages:
        for problem in problems_of(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)}: {problem}"
    for sheet in sorted(site.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        if any(f"{start}{remote}" in text for start in ("url(", "@import ") for remote in _REMOTE):
            yield f"{sheet.relative_to(site)}: loads from another host"


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or 0)
