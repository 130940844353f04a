"""
The programs and changes of `docs/upstream`: each program shows its fault with the installed
packages, and doesn't with the changes applied to copies of them.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Dict, List

import pytest

from tests.support.command import REPOSITORY

TIME_LIMIT = 240  # seconds, for all programs

PROGRAMS = sorted((REPOSITORY / "docs" / "upstream").glob("*.py"))
CHANGES = [path.with_suffix(".diff") for path in PROGRAMS]

# Runs all programs beside one another, in forks of a process that has imported most of what they
# need. The first argument is the folder of their output.
_RUN_ALL = """
import os, runpy, sys, traceback
import deepspeed, deepspeed.runtime.zero.muon.muon_optimizer
deepspeed.ops.__compatible_ops__
_, folder, *programs = sys.argv
processes = []
for path in programs:
    processes.append(os.fork())
    if processes[-1] == 0:
        file = os.open(f"{folder}/{os.path.basename(path)}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = [path]
        code = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as error:
            print(error)
            code = 1
        except BaseException:
            traceback.print_exc()
            code = 2
        sys.stdout.flush()
        os._exit(code)  # because it takes long to take apart what is imported
for path, process in zip(programs, processes):
    _, status = os.waitpid(process, 0)
    with open(f"{folder}/{os.path.basename(path)}", "a") as file:
        print("Exit code", os.waitstatus_to_exitcode(status), file=file)
"""

# Of the packages that the changes are for.
_VERSIONS = {"deepspeed": "0.19.8", "torch": "2.14.1"}

each_change = pytest.mark.parametrize("change", CHANGES, ids=lambda path: path.stem)


def site_packages() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def changed_files(change: Path) -> List[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", change.read_text(), flags=re.MULTILINE)


def run_all(folder: Path, packages: str = "") -> Dict[str, str]:
    """
    Runs all programs.

    # Parameters

    folder : `Path`
        An empty one, for files.
    packages : `str`, optional (default = `""`)
        A folder of packages to use instead of installed ones.

    # Returns

    `Dict[str, str]`
        What each has printed, and its exit code, by its name.
    """
    path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-c", _RUN_ALL, str(folder), *map(str, PROGRAMS)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path},
        timeout=TIME_LIMIT,
        check=True,
    )
    return {path.stem: path.read_text() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, str]:
    return run_all(tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def outputs_of_changed(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, str]:
    """With all changes, in packages of links that have changed files in their places."""
    for package, expected in _VERSIONS.items():
        installed = version(package).partition("+")[0]
        if installed != expected:
            pytest.skip(f"the changes are for {package} {expected}, not {installed}")
    if shutil.which("patch") is None:
        pytest.skip("`patch` isn't installed")
    folder = tmp_path_factory.mktemp("changed")
    for path in {path for change in CHANGES for path in changed_files(change)}:
        for part in [*Path(path).parents][-2::-1]:
            link_entries(site_packages() / part, folder / part)
        (folder / path).unlink()
        shutil.copy(site_packages() / path, folder / path)
    for change in CHANGES:
        subprocess.run(["patch", "-p1", "-i", str(change)], cwd=folder, check=True)
    return run_all(tmp_path_factory.mktemp("outputs"), str(folder))


def link_entries(source: Path, folder: Path) -> None:
    """Makes a folder of links, into which Python may write compiled code."""
    if folder.is_dir() and not folder.is_symlink():
        return
    folder.unlink(missing_ok=True)
    folder.mkdir()
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            link_entries(entry, folder / entry.name)
        else:
            (folder / entry.name).symlink_to(entry)


@pytest.mark.upstream
@each_change
def test_a_program_shows_its_fault(change: Path, outputs: Dict[str, str]) -> None:
    assert re.search(r"^fault: .+\nExit code 1\n\Z", outputs[change.stem], re.MULTILINE), (
        f"If it is fixed upstream, remove it from docs/upstream.md:\n{outputs[change.stem]}"
    )


@pytest.mark.upstream
@each_change
def test_a_program_shows_no_fault_with_the_changes(
    change: Path, outputs_of_changed: Dict[str, str]
) -> None:
    text = outputs_of_changed[change.stem]
    assert text.endswith("Exit code 0\n"), text


def test_each_program_and_each_change_is_in_the_page() -> None:
    page = (REPOSITORY / "docs" / "upstream.md").read_text()
    for path in (*PROGRAMS, *CHANGES):
        assert page.count(f"](upstream/{path.name})") == 1
