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
import os, runpy, signal, sys, traceback
import deepspeed, deepspeed.runtime.zero.muon.muon_optimizer
deepspeed.ops.__compatible_ops__
_, folder, *programs = sys.argv
processes = []
for path in programs:
    processes.append(os.fork())
    if processes[-1] == 0:
        signal.alarm(180)
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
VERSIONS = {"deepspeed": "0.19.8", "torch": "2.14.1"}


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


def change_packages(folder: Path) -> None:
    """Makes packages of links that have changed files instead of some."""
    for path in {path for change in CHANGES for path in changed_files(change)}:
        for part in [*Path(path).parents][-2::-1]:
            link_entries(site_packages() / part, folder / part)
        (folder / path).unlink()
        shutil.copy(site_packages() / path, folder / path)
    for change in CHANGES:
        subprocess.run(["patch", "-p1", "-i", str(change)], cwd=folder, check=True)


# All in one test, because they share a process that imports for long.
@pytest.mark.upstream
def test_each_program_shows_its_fault(tmp_path: Path) -> None:
    outputs = run_all(tmp_path)
    assert outputs.keys() == {path.stem for path in PROGRAMS}
    ends = re.compile(r"^fault: .+\nExit code 1\n\Z", re.MULTILINE)
    fixed = {name: text for name, text in outputs.items() if not ends.search(text)}
    assert fixed == {}, "remove what is fixed upstream from docs/upstream.md"


@pytest.mark.upstream
@pytest.mark.skipif(shutil.which("patch") is None, reason="needs `patch`")
@pytest.mark.skipif(
    any(version(name).partition("+")[0] != number for name, number in VERSIONS.items()),
    reason=f"the changes are for {VERSIONS}",
)
def test_no_program_shows_its_fault_with_the_changes(tmp_path: Path) -> None:
    packages, files = tmp_path / "packages", tmp_path / "files"
    packages.mkdir()
    files.mkdir()
    change_packages(packages)
    outputs = run_all(files, str(packages))
    assert outputs.keys() == {path.stem for path in PROGRAMS}
    shown = {name: t for name, t in outputs.items() if not t.endswith("Exit code 0\n")}
    assert shown == {}


def test_each_program_and_each_change_is_in_the_page() -> None:
    page = (REPOSITORY / "docs" / "upstream.md").read_text()
    for path in (*PROGRAMS, *CHANGES):
        assert page.count(f"](upstream/{path.name})") == 1
