"""
Writes the list of workarounds in `workarounds.md` from the docstrings of the packages and from
`tests/upstream`. `make reference` runs it, and a test compares.
"""

import ast
import re
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple

_ROOT = Path(__file__).parents[1]
_PACKAGES = (_ROOT / "allennlp_deepspeed", _ROOT / "allennlp_deepspeed_import_hook")
_TESTS = _ROOT / "tests" / "upstream"

PATH = Path(__file__).with_suffix(".md")

_START, _END = "<!-- Written by `make reference`. -->\n", "<!-- Until here. -->\n"
_HEAD = """| in | what is wrong | workaround | shown by | public thread |
|---|---|---|---|---|
"""
_LABEL = re.compile(
    r"Works around (?P<versions>[^:]+): (?P<fault>.+?)\. Gone when .+?\.(?: (?P<issues>\[#.+))?"
)


class Workaround(NamedTuple):
    """
    # Parameters

    name : `str`
        Of a module, class or function, within its package.
    path : `str`
        Of the module's file, from the repository.
    versions : `str`
        What has the fault, with its version.
    fault : `str`
    issues : `str`
        Links to where it has been reported, if it has.
    """

    name: str
    path: str
    versions: str
    fault: str
    issues: str


def workarounds() -> List[Workaround]:
    """
    All that a docstring has a paragraph about that begins with "Works around".

    # Raises

    `ValueError`
        If a paragraph says something else than what is wrong in which version, and when it is gone.
    """
    found = []
    for path in [path for package in _PACKAGES for path in sorted(package.rglob("*.py"))]:
        relative = str(path.relative_to(_ROOT))
        for name, docstring in _docstrings(ast.parse(path.read_text()), _module_name(relative)):
            for paragraph in docstring.split("\n\n"):
                if not paragraph.startswith("Works around "):
                    continue
                label = _LABEL.fullmatch(" ".join(paragraph.split()))
                if label is None:
                    raise ValueError(
                        f"{name} has to say 'Works around NAME VERSION: what is wrong. Gone when "
                        "....', "
                        f"and links if there are any, but it says: {paragraph}"
                    )
                versions, fault, issues = label.groups(default="")
                found.append(Workaround(name, relative, versions, fault, issues))
    return found


def tests() -> Dict[str, List[Tuple[str, str]]]:
    """
    By the name of a workaround, what fails when it isn't needed any more: file and function.
    """
    found: Dict[str, List[Tuple[str, str]]] = {}
    for path in sorted(_TESTS.glob("*_test.py")):
        for node in ast.parse(path.read_text()).body:
            for decorator in getattr(node, "decorator_list", []):
                if not isinstance(decorator, ast.Call):
                    continue
                if ast.unparse(decorator.func) == "worked_around_by":
                    (name,) = decorator.args
                    shows = (path.name, node.name)  # type: ignore[attr-defined]
                    found.setdefault(ast.literal_eval(name), []).append(shows)
    return found


def with_list(text: str) -> str:
    """The text of `workarounds.md` with the list as it should be."""
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    tests_by_workaround = tests()
    rows = [_row(each, tests_by_workaround.get(each.name, [])) for each in workarounds()]
    return before + start + _HEAD + "".join(rows) + end + after


def _row(workaround: Workaround, shown_by: List[Tuple[str, str]]) -> str:
    own_name = workaround.name.removeprefix(_module_name(workaround.path)).lstrip(".")
    where = f"[`{workaround.path.removeprefix('allennlp_deepspeed/')}`](../{workaround.path})" + (
        f" `{own_name}`" if own_name else ""
    )
    if not shown_by:
        raise ValueError(f"No test in tests/upstream shows {workaround.name}")
    links = [f"[`{name}`](../tests/upstream/{file})" for file, name in shown_by]
    cells = (workaround.versions, workaround.fault, where, ", ".join(links), workaround.issues)
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def _module_name(path: str) -> str:
    """Within its package."""
    return ".".join(Path(path).with_suffix("").parts[1:])


def _docstrings(node: ast.AST, name: str) -> Iterator[Tuple[str, str]]:
    docstring = ast.get_docstring(node)  # type: ignore[arg-type]
    if docstring is not None:
        yield name, docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")


if __name__ == "__main__":
    PATH.write_text(with_list(PATH.read_text()))
