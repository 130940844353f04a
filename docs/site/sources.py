"""
Which files of the repository are pages of the site, and where the links between them lead there.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Dict, List, Optional, Tuple

ROOT = Path(__file__).parents[2]
PACKAGE = "allennlp_deepspeed"

# Pages outside of docs/, which are where a repository has them.
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "evidence/NOTES.md": "evidence/notes.md",
}
_RESULTS = "evidence/results"

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")
_MODULE_OF_ROOM = re.compile(rf"{PACKAGE}/(?:(\w+)/(?:\w+/)*)?(\w+)\.py")


def pages() -> Dict[str, str]:
    """Paths in the site by those in the repository, of all pages and pictures."""
    found = {path: page for path, page in _PAGES.items() if (ROOT / path).is_file()}
    for path in sorted((ROOT / _RESULTS).glob("*.*")):
        found[f"{_RESULTS}/{path.name}"] = f"{_RESULTS}/{path.name}"
    for path in sorted((ROOT / "docs").glob("*.*")):
        if path.suffix in (".md", ".png", ".svg"):
            found[f"docs/{path.name}"] = path.name
    return found


def rooms() -> Dict[str, List[str]]:
    """The modules of each page of the API reference, by the name of the page."""
    found = {}
    for path in sorted((ROOT / PACKAGE).glob("*/__init__.py")):
        files = [file for file in path.parent.rglob("*.py") if file.stem != "__init__"]
        found[path.parent.name] = sorted(
            ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files
        )
    top = [path.stem for path in (ROOT / PACKAGE).glob("*.py") if path.stem != "__init__"]
    found["modules"] = [f"{PACKAGE}.{module}" for module in sorted(top)]
    return found


def api_pages() -> Dict[str, str]:
    """The Markdown of each page of the API reference, by its path in the site."""
    return {f"api/{name}.md": _api_page(name, modules) for name, modules in rooms().items()}


def _api_page(name: str, modules: List[str]) -> str:
    if name == "modules":
        lines = [f"# Modules of {PACKAGE}"]
    else:
        source = (ROOT / PACKAGE / name / "__init__.py").read_text()
        lines = [f"# {name}", "", ast.get_docstring(ast.parse(source)) or ""]
    for module in modules:
        lines += ["", f"## {module.rpartition('.')[2]} {{ #{module} }}", "", f"::: {module}"]
    return "\n".join(lines) + "\n"


def with_links_of_the_site(markdown: str, path: str) -> str:
    """
    # Parameters

    markdown : `str`, required.
        Of the file at `path`.
    path : `str`, required.
        From the repository's root.

    # Returns

    `str`
        The same, with links to pages where these are in the site, links to modules of the package
        to their place in the API reference, and the text alone of links to anything else of the
        repository.
    """
    page = pages()[path]

    def rewritten(link: "re.Match[str]") -> str:
        return _rewritten(link, path, page)

    parts = _FENCED.split(markdown)
    return "".join(p if p.startswith("```") else _LINK.sub(rewritten, p) for p in parts)


def _rewritten(link: "re.Match[str]", path: str, page: str) -> str:
    mark, text, target = link.groups()
    # A link around a picture, or around another.
    text = _LINK.sub(lambda inner: _rewritten(inner, path, page), text)
    if target.startswith(("https://", "http://", "#")):
        return f"{mark}[{text}]({target})"
    file, _, anchor = target.partition("#")
    in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
    in_site = pages().get(in_repository)
    if in_site is None:
        in_site, anchor = _in_api(in_repository)
    if in_site is None:
        return text
    if text == target and target.endswith(".md"):
        text = _title(in_repository)  # where the repository has the name of a file
    relative = posixpath.relpath(in_site, posixpath.dirname(page) or ".")
    return f"{mark}[{text}]({relative}{'#' if anchor else ''}{anchor})"


def _title(path: str) -> str:
    """Of a page, without code in it."""
    heading = re.search("^# (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    return path if heading is None else heading[1].replace("`", "")


def _in_api(path: str) -> Tuple[Optional[str], str]:
    module = _MODULE_OF_ROOM.fullmatch(path)
    if module is None or module[2] == "__init__" or not (ROOT / path).is_file():
        return None, ""
    room = module[1] or "modules"
    return f"api/{room}.md", path.removesuffix(".py").replace("/", ".")
