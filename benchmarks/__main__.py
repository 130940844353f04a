"""
Runs a study. `python -m benchmarks speed --help` says what it measures, and its options.
"""

import argparse
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import studies
from benchmarks.harness.report import RESULTS


def main() -> None:
    names = [module.name for module in pkgutil.iter_modules(studies.__path__)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("study", choices=names)
    name = parser.parse_args(sys.argv[1:2]).study
    study = import_module(f"benchmarks.studies.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=study.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    study.add_arguments(parser)
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="a directory, benchmarks/results if not given"
    )
    study.run(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
