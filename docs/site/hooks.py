"""
Adds the pages outside of docs/ and the API reference to the site, changes the links of pages, which
are written for the repository, to those of the site, and prepares pages for search and for phones.
"""

import itertools
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# mkdocs imports this by its path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.site import sources

# Search ranks guides above the reference of keys, and both above pages in these parts of the
# navigation. It ranks a title 1,000 times as high as text.
_LAST_IN_SEARCH = {"Results", "For maintainers", "API"}
_GUIDE, _REFERENCE = 10_000, 100

# A block of output that has lines drawn in it.
_DRAWING = re.compile("^```(?=\n[^`]*[━─┃│])", re.MULTILINE)
_TABLE = re.compile("<table>.*?</table>", re.DOTALL)
_HEADING = re.compile("<th[^>]*>(.*?)</th>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in sources.pages().items():
        if not path.startswith("docs/"):
            file = File.generated(config, page, abs_src_path=str(sources.ROOT / path))
            files.append(file)
    for page, markdown in sources.api_pages().items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    sections = [section.title for section in page.ancestors]
    if sections and _LAST_IN_SEARCH.isdisjoint(sections):  # the changelog has none
        is_reference = page.file.src_uri == "reference.md"
        page.meta["search"] = {"boost": _REFERENCE if is_reference else _GUIDE}
    for path, in_site in sources.pages().items():
        if in_site == page.file.src_uri:
            return _DRAWING.sub(
                "``` {.text .drawing}", sources.with_links_of_the_site(markdown, path)
            )
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _TABLE.sub(_with_headings_in_cells, html)


def _with_headings_in_cells(table: "re.Match[str]") -> str:
    """Labels each cell with the heading of its column, which site.css shows on narrow screens."""
    headings = [re.sub('<.*?>|"', "", heading) for heading in _HEADING.findall(table[0])]
    column = itertools.cycle(headings)
    return re.sub("<td", lambda _: f'<td data-heading="{next(column)}"', table[0])
