"""The project in docs/project_from_2021.md trains as it is written there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.command import REPOSITORY


def test_the_package_of_the_page_trains(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "project_from_2021.md").read_text()
    code, config, command = (
        re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)[0]
        for language in ("python", "json", "bash")
    )
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (tmp_path / "config.jsonnet").write_text(config)
    (tmp_path / "train.tsv").write_text("good\ta fine day\nbad\tno day\n" * 4)
    name, *arguments = shlex.split(command)
    assert name == "allennlp"
    run = [sys.executable, "-m", "allennlp", *arguments]
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "out" / "model.tar.gz").exists()
