"""
Trains public projects, of checkouts in a folder, beside AllenNLP's own trainer, and writes what has
become of them to `docs/projects.md`. `--only dygiepp,guide` trains some, and `--table` writes the
page from what earlier commands have left in the output folder.
"""

import argparse
import json
import logging
import multiprocessing
import re
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from benchmarks.harness import report
from tests.model_library import stand_ins
from tests.model_library.table import TOLERANCE, is_equal, is_explained
from tests.upstream_projects.projects import PROJECTS, REMOVED, Project

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
PAGE = report.REPOSITORY / "docs" / "projects.md"


def run(project: Project, checkouts: Path, output: Path) -> None:
    """
    Tries all steps. `output` gets a line of JSON for each, as it ends, and a log of what commands
    print.
    """
    from tests.upstream_projects import trial

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
        f"their format (`make upstream-projects PROJECTS=path`). {len(results)} configs; models "
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream_projects", description=__doc__)
    parser.add_argument(
        "checkouts",
        type=lambda path: Path(path).resolve(),
        help="a folder of checkouts, named OWNER+NAME",
    )
    parser.add_argument("--only", help="projects and configs with one of these, as in a,b")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="the file of the table")
    parser.add_argument(
        "--output",
        type=lambda path: Path(path).resolve(),
        default=report.RESULTS / "raw" / "projects",
        help="a folder of steps and logs",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parts = (arguments.only or "").split(",")
    projects = [project for project in PROJECTS if any(part in project.title for part in parts)]
    if not arguments.table:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with stand_ins.hub():
            for project in projects:
                run(project, arguments.checkouts, arguments.output)
                for step, text in _read(project, arguments.output).items():
                    logger.info("%s %s: %s", project.title, step, text)
    if arguments.table or not arguments.only:
        heading = report.heading(2, "transformers", "allennlp-models")
        results = [(project, _read(project, arguments.output)) for project in PROJECTS]
        arguments.page.write_text(markdown(heading, results))
    sys.exit(any(failures(project, _read(project, arguments.output)) for project in projects))


if __name__ == "__main__":
    main()
