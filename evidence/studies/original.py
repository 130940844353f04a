"""
What AllenNLP 2.10.1 made in 2022, as it was released, loads, predicts and trains the same today:
architectures, experiments, archives, tokenizers and registered components.

`evidence/original/environment.sh` makes an environment of 2022, whose Python is the argument.
`--keep` adds to the rows of an earlier invocation at the same commit, so that the page can be made
in parts, `--table` only writes it, with causes as they are said today. A row that differs without a
cause in `evidence/original/table.py` is an error.
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

from allennlp.common.util import import_module_and_submodules

from evidence import report
from evidence.model_library import experiments
from evidence.original import jobs, rows
from evidence.original.table import is_explained, markdown

TIME = "an hour"

ONLY = "what has one of these in its kind or name, such as roberta gpt2"

logger = logging.getLogger(__name__)


def kinds(arguments: argparse.Namespace, directory: Path) -> Dict[str, rows.Kind]:
    data = directory / "data.jsonl"
    jobs.write_data(data)
    found = {
        "architecture": rows.architectures(data, arguments.stages),
        "tokenizer": rows.tokenizers(),
        "registered": rows.registered(),
        "trained": rows.trained(data, arguments.stages),
    }
    checkouts = [path for path in (arguments.allennlp, arguments.models) if path is not None]
    if checkouts:
        found["archive"] = rows.archives(checkouts)
    if arguments.models is not None:
        found["experiment"] = rows.library(arguments.models, arguments.stages)
    return found


def add_rows(
    arguments: argparse.Namespace,
    directory: Path,
    kept: List[rows.Row],
    results: List[rows.Row],
) -> None:
    """Adds to the results what isn't kept."""
    done = {(each.kind, each.name) for each in kept}
    packages = ["allennlp.fairness"]
    if arguments.models is not None:
        packages.append("allennlp_models")
        os.chdir(arguments.models)
    for package in packages:
        import_module_and_submodules(package)
    experiments.install()
    for kind, each in kinds(arguments, directory).items():
        wanted = arguments.only or [""]
        names = [n for n in each.names if any(part in f"{kind} {n}" for part in wanted)]
        names = [name for name in names if (kind, name) not in done]
        folders = {name: directory / kind / name.replace("/", ".") for name in names}
        missing = [name for name in names if not folders[name].exists()]
        made = [job for name in missing for job in each.jobs(name, folders[name])]
        jobs.run(arguments.python, made, directory, packages, arguments.models)
        for name in names:
            results.append(rows.row(kind, name, folders[name], each.compare))
            logger.info("%s", results[-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("python", help="that of the environment of 2022")
    path: Dict[str, Any] = {"type": lambda text: Path(text).absolute()}
    parser.add_argument("--allennlp", **path, help="a checkout of AllenNLP 2.10.1, with archives")
    parser.add_argument("--models", **path, help="a checkout of allennlp-models 2.10.1")
    parser.add_argument("--keep", action="store_true", help="add to earlier rows")
    parser.add_argument("--table", action="store_true", help="write that of earlier rows")
    parser.add_argument(
        "--stages", type=int, nargs="*", default=[0, 2, 3], help="of ZeRO; none for no training"
    )
    parser.add_argument("--directory", **path, help="keeps what 2022 makes, or has it already")


def run(arguments: argparse.Namespace) -> bool:
    page = arguments.page
    if arguments.table:
        raw = page.read()
        return write(page, raw, rows_of(raw), raw["minutes"])
    start = time.time()
    heading = report.heading(1, "transformers", "allennlp-models")
    results: List[rows.Row] = []
    kept = page.keep(heading) if arguments.keep else {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.directory or Path(scratch)
        directory.mkdir(exist_ok=True)
        add_rows(arguments, directory, rows_of(kept), results)
    # Another may have been added to at the same time.
    kept = page.keep(heading) if arguments.keep else {}
    minutes = kept.get("minutes", 0) + (time.time() - start) / 60
    return write(page, heading, [*rows_of(kept), *results], minutes)


def rows_of(data: Dict[str, Any]) -> List[rows.Row]:
    return [rows.Row(**each) for each in data.get("rows", [])]


def write(
    page: report.Page, heading: Dict[str, Any], results: List[rows.Row], minutes: float
) -> bool:
    """Returns whether all are explained. A row that two invocations have made is written once."""
    results = list({(each.kind, each.name): each for each in results}.values())
    raw = {**heading, "minutes": minutes, "rows": [each._asdict() for each in results]}
    page.write(raw, markdown(heading, results, minutes))
    return all(map(is_explained, results))
