"""The site of the documents: pages, links and docstrings. `make docs` builds it."""

import inspect
import posixpath
import re
from typing import Any, List

import pytest
import yaml

from allennlp_deepspeed import DeepSpeedCheckpointer
from docs.site import sources
from docs.site.check import problems_of
from docs.site.docstrings import as_markdown
from tests.support.command import REPOSITORY


class _WithoutTags(yaml.SafeLoader):
    """mkdocs' own has tags for objects of Python's, which nothing here needs."""


_WithoutTags.add_multi_constructor("", lambda *_: None)

MKDOCS: Any = yaml.load((REPOSITORY / "mkdocs.yml").read_text(), _WithoutTags)

MARKDOWN = [path for path in sources.pages() if path.endswith(".md")]


def links(markdown: str) -> List[str]:
    without_code = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", without_code) if ":" not in link]


def test_every_page_is_in_the_navigation() -> None:
    assert list(sources.not_in(MKDOCS["nav"])) == []
    assert list(sources.not_in([{"Start": ["index.md"]}])) != []


@pytest.mark.parametrize("path", MARKDOWN)
def test_links_lead_to_pages_of_the_site(path: str) -> None:
    in_site = {*sources.pages().values(), *sources.api_pages()}
    markdown = sources.with_links_of_the_site((REPOSITORY / path).read_text(), path)
    folder = posixpath.dirname(sources.pages()[path])
    for link in links(markdown):
        page = link.partition("#")[0]
        assert not page or posixpath.normpath(posixpath.join(folder, page)) in in_site, link


@pytest.mark.parametrize(
    "path,markdown,expected",
    [
        ("docs/recovery.md", "[a](install.md#x)", "[a](install.md#x)"),
        ("docs/recovery.md", "[a](../README.md#x)", "[a](index.md#x)"),
        ("README.md", "[a](docs/install.md)", "[a](install.md)"),
        ("README.md", "[docs/install.md](docs/install.md)", "[Installing](install.md)"),
        (
            "docs/benchmarks.md",
            "![a](../benchmarks/results/speed.png)",
            "![a](benchmarks/results/speed.png)",
        ),
        ("benchmarks/results/speed.md", "[a](../NOTES.md#x)", "[a](../notes.md#x)"),
        (
            "docs/architecture.md",
            "[`a`](../allennlp_deepspeed/engine/shards.py)",
            "[`a`](api/engine.md#allennlp_deepspeed.engine.shards)",
        ),
        (
            "docs/architecture.md",
            "[`a`](../allennlp_deepspeed/lora.py)",
            "[`a`](api/modules.md#allennlp_deepspeed.lora)",
        ),
        ("docs/architecture.md", "see [`a`](../tests/upstream/torch_test.py) for", "see `a` for"),
        ("docs/architecture.md", "[#1](https://example.org)", "[#1](https://example.org)"),
        ("docs/architecture.md", "[b](#c)", "[b](#c)"),
        ("docs/recovery.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_between_pages_modules_and_other_files(
    path: str, markdown: str, expected: str
) -> None:
    assert sources.with_links_of_the_site(markdown, path) == expected


def test_every_module_is_in_the_api_reference() -> None:
    modules = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in (REPOSITORY / "allennlp_deepspeed").rglob("*.py")
        if path.stem != "__init__"
    }
    text = "\n".join(sources.api_pages().values())
    assert set(re.findall(r"^::: (\S+)$", text, re.MULTILINE)) == modules


def test_docstrings_are_lists_without_headings() -> None:
    docstring = """
Saves what there is.

# Parameters

path : `str`, required.
queries, keys : `torch.Tensor`, optional (default = `None`)
    Shape `(batch, length)`.

    ```
    # not a heading of the page's
    ```

The others are those of [`Trainer`](./trainer.py).

# Raises

`CheckpointError`
    If it is damaged.
"""
    assert (
        as_markdown(docstring)
        == """
Saves what there is.

**Parameters**

- **path** : `str`, required.

- **queries, keys** : `torch.Tensor`, optional (default = `None`)

    Shape `(batch, length)`.

    ```
    # not a heading of the page's
    ```

The others are those of `Trainer`.

**Raises**

- `CheckpointError`

    If it is damaged.
""".strip()
    )


def test_docstrings_of_the_package_keep_all_that_they_say() -> None:
    docstring = inspect.getdoc(DeepSpeedCheckpointer) or ""
    markdown = as_markdown(docstring)
    assert not re.search("^# ", markdown, re.MULTILINE)
    words = re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", docstring))
    assert re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", markdown)) == words


@pytest.mark.parametrize(
    "loaded",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<img src="http://example.org/badge.svg">',
        '<pre class="mermaid">graph</pre>',
        "<h1>Parameters</h1>",
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(loaded: str) -> None:
    page = '<h1>a</h1><a href="https://example.org">b</a><link rel="next" href="https://a.org/b">'
    assert problems_of(page) == []
    assert len(problems_of(page + loaded)) == 1
