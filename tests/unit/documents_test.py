"""What the documents name is there: pages, headings, files, and commands."""

import argparse
import re
from pathlib import Path
from typing import Iterator, List, Set

import pytest
import yaml

from allennlp_deepspeed.commands import DeepSpeed
from tests.support.command import REPOSITORY
from tests.support.documents import PAGES

# From where paths are written.
FOLDERS = [
    REPOSITORY / name
    for name in ("", "allennlp_deepspeed", "tests", "training_configs", "benchmarks", "docs")
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


def _named_after(command: str) -> Set[str]:
    """What the pages have after a command, at the beginning of a line or of inline code."""
    pattern = re.compile(rf"(?:^|`|\.venv/bin/){command} ([a-z_]+(?:-[a-z]+)*)", re.MULTILINE)
    return {name for page in PAGES for name in pattern.findall(page.read_text())}


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 200


@each_page
def test_links_lead_somewhere(page: Path):
    assert [problem for link in _links(page) if (problem := _problem_of(link, page))] == []


@each_page
def test_files_that_a_page_names_are_there(page: Path):
    assert [path for path in _paths(page) if not _is_here(path)] == []


def test_every_page_is_linked_from_the_readme_or_a_page_it_links():
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in _links(page)
    }
    assert set(PAGES) - linked - {REPOSITORY / "README.md"} == set()


def test_what_make_is_told_is_in_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "venv", "test"} <= _named_after("make") <= set(targets)


def test_studies_that_are_named_are_there():
    studies = {path.stem for path in (REPOSITORY / "benchmarks" / "studies").glob("*.py")}
    assert {"speed", "saving"} <= _named_after("python -m benchmarks") <= studies


def test_commands_of_the_package_that_are_named_are_there():
    parser = DeepSpeed().add_subparser(argparse.ArgumentParser().add_subparsers())
    assert {"estimate", "export", "gather"} <= _named_after("allennlp deepspeed")
    for name in _named_after("allennlp deepspeed"):
        with pytest.raises(SystemExit) as exit_of_help:
            parser.parse_args([name, "--help"])
        assert exit_of_help.value.code == 0


def test_methods_that_the_architecture_names_are_there():
    sources = [path.read_text() for path in (REPOSITORY / "allennlp_deepspeed").rglob("*.py")]
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", page))
    assert ("DeepSpeedTrainer", "_train_step") in named
    missing = [
        f"{class_name}.{method}"
        for class_name, method in named
        if not any(
            re.search(
                rf"^class {class_name}\b.*^    def {method}\(", source, re.MULTILINE | re.DOTALL
            )
            for source in sources
        )
    ]
    assert missing == []


def test_the_table_of_rooms_has_every_folder_of_the_package():
    package = REPOSITORY / "allennlp_deepspeed"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| \d \| (.+?) \|", page, flags=re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`(\w+)/`", row)} == folders


def test_issue_templates_are_forms_that_ask_for_the_environment():
    folder = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert set(forms) == {"bug", "feature", "config"}
    for form in (forms["bug"], forms["feature"]):
        assert form["name"] and form["description"]
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) and ids
        assert all(field["attributes"] for field in form["body"])
    assert "allennlp deepspeed env" in str(forms["bug"])
