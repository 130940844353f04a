import argparse
from pathlib import Path

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import files


def run(args: argparse.Namespace) -> None:
    """Writes an HTML page of one or several runs."""
    # Imported here, because its dependencies are optional.
    from allennlp_deepspeed.report_page.page import page

    path = Path(args.output or Path(args.serialization_dirs[0]) / "report.html")
    if args.output is not None:
        _check_output(path)
    html = page(args.serialization_dirs)
    files.write(html, str(path))
    print(path)


def _check_output(path: Path) -> None:
    """
    Checks that a report can replace what is there.

    # Raises

    `ConfigurationError`
        If it isn't a file, or its directory is missing.
    """
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"--output is {path}, but {path.parent} is not a directory: create it, or write "
            "another path."
        )
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigurationError(f"--output is {path}, which is not a file: write another path.")
