"""What the documents name is there: pages, headings, files, and commands."""

import re
from pathlib import Path
from typing import Iterator, List, Set

import pytest

from tests.support.command import REPOSITORY
from tests.support.documents import PAGES

# From where paths are written.
FOLDERS = [
    REPOSITORY / name
    for name in ("", "allennlp_deepspeed", "tests", "training_configs", "evidence", "docs")
]

# What a training leaves, and the reader's own.
NOT_HERE = {"nvme/", "results/raw/", "config.jsonnet"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> Set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _links(page: Path) -> List[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text()))
    return [target for target in targets if not target.startswith("https://")]


def _problem_of(target: str, page: Path) -> str:
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.is_relative_to(REPOSITORY) or not linked.exists():
        return f"{target}: no such file"
    if anchor and anchor not in _anchors(linked):
        return f"{target}: no such heading"
    return ""


def _paths(page: Path) -> Iterator[str]:
    for code in re.findall(r"`([^`\n]+)`", _without_code(page.read_text())):
        path = code.partition("::")[0]
        if re.fullmatch(r"[\w./-]+(\.(py|md|jsonnet|toml|yml|yaml|txt)|/)", path):
            yield path


def _is_here(path: str) -> bool:
    # A test may be named by its file alone.
    is_test = "/" not in path and any((REPOSITORY / "tests").rglob(path))
    return path in NOT_HERE or is_test or any((folder / path).exists() for folder in FOLDERS)


@each_page
def test_links_lead_somewhere(page: Path):
    assert [problem for link in _links(page) if (problem := _problem_of(link, page))] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "projects.md"],  # which names those of projects
    ids=lambda page: page.name,
)
def test_files_that_a_page_names_are_there(page: Path):
    assert [path for path in _paths(page) if not _is_here(path)] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ("projects.md", "workarounds.md")],  # generated
    ids=lambda page: page.name,
)
def test_a_cell_of_a_table_is_short(page: Path) -> None:
    rows = re.findall(r"^\|(.*)\|$", _without_code(page.read_text()), flags=re.MULTILINE)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    words = {cell: len(re.sub(r"\]\(.*?\)", "]", cell).split()) for cell in cells}
    assert [cell for cell, number in words.items() if number > 40] == []


def test_every_page_is_linked_from_the_readme_or_a_page_it_links():
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in _links(page)
    }
    assert set(PAGES) - linked - {REPOSITORY / "README.md"} == set()


def test_the_site_has_all_pages() -> None:
    pages = [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("evidence/results/*.md")]
    names = [page.name for page in pages]
    folders = REPOSITORY.glob("allennlp_deepspeed/*/__init__.py")
    names += [f"api/{path.parent.name}.md" for path in folders]
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [name for name in names if name not in navigation] == []
