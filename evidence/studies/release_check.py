"""
What is built installs into a clean environment of each Python that there is, and trains the demo's
config and the project of 2021 there.

An environment is made in two lines, `pip install --no-deps allennlp==2.10.1` and `pip install` of
what was built, with the newest version of everything that the metadata allow. It takes 7 GB and is
removed before the next one is made. No page is written.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

from tests.support.command import REPOSITORY
from tests.support.own_package import TRAIN, write_project
from tests.support.verses import write_sample

TIME = "15 minutes a Python"
ONLY = "versions of Python, such as 3.11"

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")

# Seconds. Installing downloads 3 GB, and DeepSpeed is compiled nowhere here.
INSTALL_LIMIT = 3600
RUN_LIMIT = 900

# What would let a command find the repository, or what it was started with.
OF_THIS_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR")


def pythons() -> Dict[str, str]:
    """The interpreters that are found on the `PATH`, of pyenv and of uv, by their versions."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted((pyenv / "versions").glob("*/bin"))
    folders += sorted((Path.home() / ".local/share/uv/python").glob("*/bin"))
    found: Dict[str, str] = {}
    for version in SUPPORTED:
        for folder in folders:
            path = folder / f"python{version}"
            if version not in found and path.is_file() and _can_make_environments(path):
                found[version] = str(path)
    return found


def _can_make_environments(python: Path) -> bool:
    """Debian's has no `ensurepip` by itself, and a shim of pyenv's may lead nowhere."""
    checked = subprocess.run([python, "-c", "import ensurepip, ssl"], capture_output=True)
    return checked.returncode == 0


def build(directory: Path) -> List[Path]:
    """Returns the wheel and the sdist, of which the wheel is built from the sdist."""
    _run([sys.executable, "-m", "build", "--outdir", directory, REPOSITORY], REPOSITORY)
    return [*directory.glob("*.whl"), *directory.glob("*.tar.gz")]


def _run(
    command: List[Any], folder: Path, time_limit: float = RUN_LIMIT, **environment: str
) -> str:
    """Returns what it printed. What it says otherwise is only shown if it fails."""
    variables = {k: v for k, v in os.environ.items() if k not in OF_THIS_ENVIRONMENT}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**variables, **environment},
        timeout=time_limit,
        capture_output=True,
        text=True,
    )
    if finished.returncode != 0:
        line = " ".join(str(part) for part in command)
        sys.exit(f"$ {line}\n{(finished.stdout + finished.stderr)[-6000:]}")
    return finished.stdout


class Environment:
    """
    # Parameters

    python : `str`
        The interpreter to make it of.
    directory : `Path`
        Where to make it.
    """

    def __init__(self, python: str, directory: Path) -> None:
        self.folder = directory / "outside"
        self.folder.mkdir()
        # So that AllenNLP knows the command before it reads its options.
        (self.folder / ".allennlp_plugins").write_text("allennlp_deepspeed\n")
        self._bin = directory / "environment" / "bin"
        _run([python, "-m", "venv", self._bin.parent], directory)

    def install_allennlp(self) -> None:
        self._pip("--no-deps", "allennlp==2.10.1")

    def install(self, built: Path, *arguments: str) -> None:
        self._pip(*arguments, f"allennlp-deepspeed[report] @ {built.as_uri()}")

    def _pip(self, *arguments: str) -> None:
        pip = [self._bin / "python", "-m", "pip", "install", "--progress-bar", "off"]
        _run([*pip, *arguments], self.folder, INSTALL_LIMIT)

    def run(self, name: str, *arguments: Any) -> str:
        return self._in_environment([self._bin / name, *arguments], self.folder)

    def run_shell(self, command: str, folder: Path) -> str:
        return self._in_environment(["bash", "-c", command], folder)

    def _in_environment(self, command: List[Any], folder: Path) -> str:
        variables = {"PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        variables["OMP_NUM_THREADS"] = "1"
        return _run(command, folder, **variables)


def check(environment: Environment, out: str) -> Iterator[str]:
    """Yields what works, of what is installed."""
    where = environment.run("python", "-c", "import allennlp_deepspeed as a; print(a.__file__)")
    assert "site-packages" in where, where
    # In a Python that doesn't name this package.
    environment.run("python", "-c", "import allennlp.training, transformers")
    yield "imports"
    for folder in ("data", "config"):
        shutil.rmtree(environment.folder / folder, ignore_errors=True)
    config = environment.folder / "verse_classifier.jsonnet"
    shutil.copy(REPOSITORY / "training_configs" / config.name, config)
    verses = environment.folder / "data" / "verses"
    verses.mkdir(parents=True)
    write_sample(verses, every=40)
    packages = ("--include-package", "allennlp_deepspeed")
    environment.run("allennlp", "train", config.name, "-s", out, *packages)
    metrics = json.loads((environment.folder / out / "metrics.json").read_text())
    assert metrics["best_validation_accuracy"] > 0.2, metrics  # near 0.1 by chance
    yield "train"
    project = environment.folder / f"project_{out}"
    project.mkdir()
    write_project(project)
    environment.run_shell(TRAIN, project)
    assert (project / "out" / "model.tar.gz").is_file()
    yield "project from 2021"
    environment.run("allennlp", "evaluate", f"{out}/model.tar.gz", verses / "test.jsonl", *packages)
    yield "evaluate"
    environment.run("allennlp", "deepspeed", "report", out)
    assert (environment.folder / out / "report.html").stat().st_size > 100_000
    yield "report"
    version = environment.run("allennlp", "deepspeed", "--version").split()[1]
    assert f"version: {version}\n" in environment.run("allennlp", "deepspeed", "env")
    yield "env"


def run(arguments: argparse.Namespace) -> None:
    wanted = arguments.only or SUPPORTED
    found = {version: python for version, python in pythons().items() if version in wanted}
    if not found or (arguments.only and set(wanted) - set(found)):
        sys.exit(f"Of {', '.join(wanted)} there is only: {', '.join(found) or 'none'}.")
    with tempfile.TemporaryDirectory() as directory:
        wheel_and_sdist = build(Path(directory))
        print(f"Built {', '.join(path.name for path in wheel_and_sdist)}", flush=True)
        for version, python in found.items():
            with tempfile.TemporaryDirectory() as environment_directory:
                start = time.monotonic()
                environment = Environment(python, Path(environment_directory))
                environment.install_allennlp()
                for built in wheel_and_sdist:
                    again = () if built.suffix == ".whl" else ("--force-reinstall", "--no-deps")
                    environment.install(built, *again)
                    works = check(environment, f"out_{built.suffix[1:]}")
                    print(f"Python {version}, {built.name}: {', '.join(works)}", flush=True)
                print(f"Python {version}: {time.monotonic() - start:.0f} s", flush=True)
    missing = [version for version in SUPPORTED if version not in found]
    print(f"Tried {', '.join(found)}; not tried: {', '.join(missing) or 'none'}.")
