"""
Runs a study, which shows something about this package and writes what it finds to a page. Without
a name it lists them. `python -m evidence cross --help` says more about one, and its options.
"""

import argparse
import ast
import logging
import os
import sys
from importlib import import_module
from pathlib import Path

from evidence import REPOSITORY, RESULTS

STUDIES = Path(__file__).with_name("studies")
NAMES = sorted(path.stem for path in STUDIES.glob("[!_]*.py"))


def list_studies() -> None:
    """Prints the first paragraph of each docstring, and `TIME`. Imports none of them."""
    from rich.console import Console
    from rich.table import Table

    table = Table("study", "shows", "takes", box=None)
    for name in NAMES:
        tree = ast.parse((STUDIES / f"{name}.py").read_text())
        shows = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        (time,) = (
            node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and ast.unparse(node.targets[0]) == "TIME"
        )
        table.add_row(name, " ".join(shows.split()), str(time))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def set_environment() -> None:
    """For all processes of a study, before PyTorch is imported."""
    # Commands of this Python's environment are found first.
    folder = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])
    # Each worker is a process; more threads in each would only fight for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nothing here needs a model or a data set from a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    operators = REPOSITORY / ".venv" / "torch_extensions"  # of `make ops`
    if operators.is_dir():
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(operators))


def set_logging() -> None:
    """Shows what studies log, and of libraries errors alone."""
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(message)s")
    logging.getLogger("evidence").setLevel(logging.INFO)
    for name in ("allennlp", "allennlp_deepspeed", "allennlp_models", "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__)
    parser.add_argument("study", nargs="?", choices=["list", *NAMES], default="list")
    name = parser.parse_args(sys.argv[1:2]).study
    if name == "list":
        list_studies()
        return
    set_environment()
    study = import_module(f"evidence.studies.{name}")
    from evidence.report import Page

    parser = argparse.ArgumentParser(
        prog=f"python -m evidence {name}",
        description=study.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if hasattr(study, "add_arguments"):
        study.add_arguments(parser)
    if hasattr(study, "ONLY"):
        parser.add_argument(
            "--only", nargs="+", default=[], help=f"{study.ONLY}; the page isn't written"
        )
    parser.add_argument(
        "--output",
        type=lambda path: Path(path).absolute(),
        default=RESULTS,
        help="a directory, evidence/results if not given",
    )
    arguments = parser.parse_args(sys.argv[2:])
    is_part = bool(getattr(arguments, "only", False)) and not getattr(arguments, "keep", False)
    arguments.page = Page(name, None if is_part else arguments.output)
    set_logging()
    is_good = study.run(arguments)
    arguments.page.show()
    # `None` if there is nothing that could be wrong.
    sys.exit(is_good is False)


if __name__ == "__main__":
    main()
