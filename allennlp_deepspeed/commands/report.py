import argparse
from pathlib import Path

from allennlp_deepspeed import files


class Report:
    """
    Command `allennlp deepspeed report`: writes an HTML page of one or several runs.
    """

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Write an HTML page (works offline) with the curves, checkpoints, warnings and "
            "configs of one or several runs. Prints its path."
        )
        subparser = parser.add_parser("report", description=description, help=description)
        subparser.add_argument(
            "serialization_dirs",
            nargs="+",
            metavar="serialization_dir",
            help="serialization directory of a run; several are compared",
        )
        subparser.add_argument(
            "--output",
            type=str,
            help="output file (default = report.html in the first directory)",
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        # Imported here, because its dependencies are optional.
        from allennlp_deepspeed.report_page.page import page

        directories = args.serialization_dirs
        html = page(directories)
        path = args.output
        if path is None:
            path = str(Path(directories[0]) / "report.html")
            # If it is a link, writing would change its target.
            Path(path).unlink(missing_ok=True)
        files.write(html, path)
        print(path)
