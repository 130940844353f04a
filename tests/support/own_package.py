"""The project in docs/your_own_package.md."""

import json
import re
from pathlib import Path
from typing import List

from tests.support.command import REPOSITORY

_PAGE = (REPOSITORY / "docs" / "your_own_package.md").read_text()


def _blocks(language: str) -> List[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", _PAGE, flags=re.MULTILINE | re.DOTALL)


TRAIN, PREDICT = _blocks("bash")


def write_project(directory: Path) -> None:
    """Writes it as the page has it, with data of its format."""
    (directory / "my_project").mkdir()
    (directory / "my_project" / "__init__.py").touch()
    for code in _blocks("python"):
        (directory / code.splitlines()[0].removeprefix("# ")).write_text(code)
    (directory / "config.jsonnet").write_text(json.dumps(json.loads(_blocks("json")[0])))
    (directory / "train.tsv").write_text("good\ta fine day\nbad\tno day\n" * 4)
