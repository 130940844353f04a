"""What is built to be installed has all that the package needs, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Set

import pytest

from tests.support.command import REPOSITORY

PACKAGES = ("allennlp_deepspeed", "allennlp_deepspeed_import_hook")
STARTUP = ("allennlp_deepspeed.pth", "allennlp_deepspeed.start")


# What git ignores, and what is in no package.
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "data", "output", "site", "raw")


def build(kind: str, source: Path, directory: Path) -> Path:
    """As pip does it, with the setuptools that is installed."""
    code = f"from setuptools.build_meta import build_{kind} as build; build({str(directory)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, timeout=120)
    (built,) = directory.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # setuptools leaves files where it builds, and tests may run beside one another.
    source = tmp_path_factory.mktemp("source") / "repository"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Of the sdist, so that it has to have all that is needed."""
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        # Not in Python 3.11.0 to 3.11.3, nor in some of 3.10, and asked for by 3.12.
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(directory, **safely)
    (source,) = directory.iterdir()
    return zipfile.ZipFile(build("wheel", source, directory))


def sources() -> Set[str]:
    return {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names - sources() == set(STARTUP)
    assert sources() - names == set()
    for data in ("py.typed", "report_page/page.css", "report_page/page.html.jinja"):
        assert f"allennlp_deepspeed/{data}" in names


@pytest.mark.parametrize("name", STARTUP)
def test_the_wheel_has_what_python_reads_when_it_starts(wheel: zipfile.ZipFile, name: str) -> None:
    assert wheel.read(name) == (REPOSITORY / name).read_bytes()
