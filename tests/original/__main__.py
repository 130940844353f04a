"""
Compares with AllenNLP 2.10.1 as it was released: what it makes is loaded, predicts and trains
today, and the differences are written to `benchmarks/results/original.md`.

`python -m tests.original PYTHON` takes the Python of that environment. `--only roberta,gpt2` does
what has one of these in its kind or name. `--keep` adds to the rows of an earlier invocation at the
same commit, so that the table can be made in parts, `--table` only writes it, with causes as they
are said today.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

from allennlp.common.util import import_module_and_submodules

from benchmarks.harness import report
from tests.model_library import experiments
from tests.original import jobs, rows
from tests.original.table import is_explained, markdown

logger = logging.getLogger(__name__)


def kinds(arguments: argparse.Namespace, directory: Path) -> Dict[str, rows.Kind]:
    stages = [int(stage) for stage in arguments.stages.split(",") if stage]
    data = directory / "data.jsonl"
    jobs.write_data(data)
    found = {
        "architecture": rows.architectures(data, stages),
        "tokenizer": rows.tokenizers(),
        "registered": rows.registered(),
    }
    checkouts = [path for path in (arguments.allennlp, arguments.models) if path is not None]
    if checkouts:
        found["archive"] = rows.archives(checkouts)
    if arguments.models is not None:
        found["experiment"] = rows.library(arguments.models, stages)
    return found


def run(
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
        wanted = arguments.only.split(",") if arguments.only else [""]
        names = [n for n in each.names if any(part in f"{kind} {n}" for part in wanted)]
        names = [name for name in names if (kind, name) not in done]
        folders = {name: directory / kind / name.replace("/", ".") for name in names}
        missing = [name for name in names if not folders[name].exists()]
        made = [job for name in missing for job in each.jobs(name, folders[name])]
        jobs.run(arguments.python, made, directory, packages, arguments.models)
        for name in names:
            results.append(rows.row(kind, name, folders[name], each.compare))
            logger.info("%s", results[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.original", description=__doc__)
    parser.add_argument("python", help="that of the environment of 2022")
    path: Dict[str, Any] = {"type": lambda text: Path(text).absolute()}
    parser.add_argument("--allennlp", **path, help="a checkout of AllenNLP 2.10.1, with archives")
    parser.add_argument("--models", **path, help="a checkout of allennlp-models 2.10.1")
    parser.add_argument("--only", help="what has one of these in its kind or name")
    parser.add_argument("--keep", action="store_true", help="add to earlier rows")
    parser.add_argument("--table", action="store_true", help="write that of earlier rows")
    parser.add_argument("--stages", default="0,2,3", help="of ZeRO; empty for no training")
    parser.add_argument("--directory", **path, help="keeps what 2022 makes, or has it already")
    parser.add_argument("--output", **path, default=report.RESULTS, help="a directory")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("allennlp", "allennlp_deepspeed", "allennlp_models", "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.table:
        raw = report.read(arguments.output, "original")
        sys.exit(write(arguments.output, raw, rows_of(raw), raw["minutes"]))
    start = time.time()
    heading = report.heading(1, "transformers", "allennlp-models")
    results: List[rows.Row] = []
    kept = report.keep(arguments.output, "original", heading) if arguments.keep else {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.directory or Path(scratch)
        directory.mkdir(exist_ok=True)
        run(arguments, directory, rows_of(kept), results)
    # Another may have been added to at the same time.
    kept = report.keep(arguments.output, "original", heading) if arguments.keep else {}
    minutes = kept.get("minutes", 0) + (time.time() - start) / 60
    sys.exit(write(arguments.output, heading, [*rows_of(kept), *results], minutes))


def rows_of(data: Dict[str, Any]) -> List[rows.Row]:
    return [rows.Row(**each) for each in data.get("rows", [])]


def write(output: Path, heading: Dict[str, Any], results: List[rows.Row], minutes: float) -> int:
    """Returns the exit code. A row that two invocations have made is written once."""
    results = list({(each.kind, each.name): each for each in results}.values())
    raw = {**heading, "minutes": minutes, "rows": [each._asdict() for each in results]}
    report.write(output, "original", raw, markdown(heading, results, minutes))
    return 0 if all(map(is_explained, results)) else 1


if __name__ == "__main__":
    main()
