import argparse
import sys
from pathlib import Path

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import files


class Report:
    """
    `allennlp deepspeed report`: writes one HTML page of one or several runs.
    """

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Write an HTML page that needs no network: curves, checkpoints, warnings, configs and "
            "their differences, of one or several runs. Prints its path."
        )
        subparser = parser.add_parser("report", description=description, help=description)
        subparser.add_argument(
            "serialization_dirs",
            nargs="+",
            metavar="serialization_dir",
            help="the directory that a training saves to; several are compared",
        )
        subparser.add_argument(
            "--output",
            type=str,
            help="the file to write (default: report.html in the first directory)",
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        try:
            self._run(args)
        except ConfigurationError as error:
            sys.exit(error.message)

    def _run(self, args: argparse.Namespace) -> None:
        # Optional, unlike this command.
        from allennlp_deepspeed.report_page.page import page

        directories = args.serialization_dirs
        path = args.output or str(Path(directories[0]) / "report.html")
        files.write(page(directories), path)
        print(path)
