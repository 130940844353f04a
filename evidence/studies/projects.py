"""
Public projects with AllenNLP train, recover, evaluate and predict as with AllenNLP's own trainer,
their code unchanged, or can't for a known reason.

The argument is a folder of checkouts. `evidence/projects/environment.sh` makes an environment with
what projects import. The page is docs/projects.md. `--only dygiepp guide` trains some. `--table`
writes the page from what earlier commands have left in `raw/projects` of the output.
"""

import argparse
import json
import logging
import multiprocessing
import re
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from evidence import REPOSITORY, report
from evidence.model_library import stand_ins
from evidence.model_library.table import TOLERANCE, is_equal, is_explained
from evidence.projects.projects import PROJECTS, REMOVED, Project

TIME = "an hour"

ONLY = "projects and configs with one of these in their title"

logger = logging.getLogger(__name__)

TIME_LIMIT = 3600  # seconds, of a project
STEPS = {
    "import": "import",
    "check": "`check`",
    "1x0": "one process, stage 0",
    "1x2": "2",
    "1x3": "3",
    "2x0": "two workers, stage 0",
    "2x2": "2",
    "2x3": "3",
    "recover": "`--recover`",
    "evaluate": "`evaluate`",
    "predict": "`predict`",
}
PAGE = REPOSITORY / "docs" / "projects.md"


def train(project: Project, checkouts: Path, output: Path) -> None:
    """
    Tries all steps. `output` gets a line of JSON for each, as it ends, and a log of what commands
    print.
    """
    from evidence.projects import trial

    results = _results(project, output)
    results.unlink(missing_ok=True)
    ending = ""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that nothing is imported again: packages of projects have the same names.
        process = multiprocessing.get_context("fork").Process(
            target=trial.main, args=(project, checkouts, Path(folder), results)
        )
        process.start()
        process.join(TIME_LIMIT)
        if process.is_alive():
            ending = f"FAILS: not done after {TIME_LIMIT} s"
            process.kill()
            process.join()
        elif process.exitcode:
            ending = f"FAILS: ends with {process.exitcode}"
    if ending:
        with results.open("a") as file:
            file.write(json.dumps({"step": "end", "text": ending}) + "\n")


def _results(project: Project, output: Path) -> Path:
    return output / (re.sub(r"\W+", "-", project.title) + ".jsonl")


def _read(project: Project, output: Path) -> Dict[str, str]:
    """Returns what has become of each step, by its name; nothing if it wasn't tried."""
    path = _results(project, output)
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["step"]: line["text"] for line in map(json.loads, lines)}


def failures(project: Project, verdicts: Dict[str, str]) -> List[str]:
    """Returns the steps that have failed, or that differ for a reason which isn't known."""
    return [
        f"{step}: {text}"
        for step, text in verdicts.items()
        if not project.limit
        if text != "ok" and not is_explained(project.config, step, text)
    ]


def markdown(heading: Dict[str, object], results: List[Tuple[Project, Dict[str, str]]]) -> str:
    rows = [
        [
            f"[{project.repository}](https://github.com/{project.repository}/tree/{project.commit}"
            f"/{project.folder}): {project.config}",
            *(_cell(verdicts.get(step, "–")) for step in STEPS),
            _needs(project, verdicts),
        ]
        for project, verdicts in results
    ]
    intro = (
        "Does my project train, if others' do? Public projects with AllenNLP, at a commit, their "
        "code unchanged, their own configs on their own fixtures or on a few lines of data in "
        f"their format (`python -m evidence projects PATH`). {len(results)} configs; models "
        "of a hub are small stand-ins with random weights, and files of pretrained embeddings are "
        "left out. A number is how far weights are, after two epochs, from those of AllenNLP's "
        "`gradient_descent`, as a part of the update; for `--recover`, after a kill in the second "
        "epoch, from those of an uninterrupted run, as a part of the largest weight. `check`, "
        "`--recover`, `evaluate` and `predict` are the `allennlp` command, at stage 3 with two "
        f"workers. Differences up to {TOLERANCE:.0e} are rounding; a reason in brackets is one of "
        "[those](model_library.md) of the library's models. What a project needs besides is a key "
        "of its config, or what its owner has to do."
    )
    table = report.table(["project and config", *STEPS.values(), "beyond the trainer's type"], rows)
    smaller = report.table(
        ["config", "what the runner writes"],
        [[project.title, _fixtures(project)] for project, _ in results if _fixtures(project)],
    )
    return report.document(
        "Projects of others",
        intro,
        table,
        "So that a training takes seconds, without a network, and updates aren't lost in rounding, "
        "the runner itself writes these keys and files:",
        smaller,
        report.describe(heading, False),
    )


def _fixtures(project: Project) -> str:
    lines = [
        f"without `{key}`" if value is REMOVED else f"`{key}`: `{json.dumps(value)}`"
        for key, value in project.fixtures.items()
    ]
    if files := [f"`{path}`" for path in project.files]:
        lines.append(f"the file{'s' if files[1:] else ''} {', '.join(files)}")
    lines += [f"`export {name}={value}`" for name, value in project.variables.items()]
    return "; ".join(lines)


def _cell(verdict: str) -> str:
    if verdict in ("ok", "–") or is_equal(verdict):
        return verdict
    if explained := re.match(r"DIFFERS, (\S+ [\w ]+): (\S+),", verdict):
        return f"{explained[2]} ({explained[1]})"
    number = re.search(r"DIFFERS: (\S+),", verdict)
    return number[1] if number else "refused" if verdict.startswith("refused") else "fails"


def _needs(project: Project, verdicts: Dict[str, str]) -> str:
    lines = [
        f"remove `{key}`" if value is REMOVED else f"`{key}`: `{json.dumps(value)}`"
        for key, value in project.changes.items()
    ]
    if project.note:
        lines.append(project.note)
    if project.lines:
        code = "; ".join(project.lines.splitlines())
        lines.append(f"in a module that is included before: `{code}`")
    if project.limit:
        lines.append(f"can't be trained: {project.limit}")
    elif failed := failures(project, verdicts):
        lines.append(f"**{failed[0][:160]}**".replace("|", "/"))
    elif set(STEPS) - set(verdicts):
        lines.append("**not tried to the end**")
    return "; ".join(lines) or "nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkouts",
        type=lambda path: Path(path).absolute(),
        help="a folder of checkouts, named OWNER+NAME",
    )
    parser.add_argument("--table", action="store_true", help="train nothing")


def run(arguments: argparse.Namespace) -> bool:
    # Steps and logs.
    output = arguments.output / "raw" / "projects"
    parts = arguments.only or [""]
    projects = [project for project in PROJECTS if any(part in project.title for part in parts)]
    if not arguments.table:
        output.mkdir(parents=True, exist_ok=True)
        with stand_ins.hub():
            for project in projects:
                train(project, arguments.checkouts, output)
                for step, text in _read(project, output).items():
                    logger.info("%s %s: %s", project.title, step, text)
    if not arguments.only:
        heading = report.heading(2, "transformers", "allennlp-models")
        results = [(project, _read(project, output)) for project in PROJECTS]
        PAGE.write_text(markdown(heading, results))
    return not any(failures(project, _read(project, output)) for project in projects)
