import argparse
import json
import sys

from allennlp.common.checks import ConfigurationError
from rich import box
from rich.console import Console
from rich.table import Table

from allennlp_deepspeed.commands.estimate import add_config, only_warnings
from allennlp_deepspeed.launch import failures
from allennlp_deepspeed.launch.config_check import check, has_deepspeed_trainer
from allennlp_deepspeed.launch.explained_config import DEEPSPEED, explained
from allennlp_deepspeed.launch.preflight import fill_in

_WIDTH = 130  # characters, where it isn't that of a terminal


class Check:
    """`allennlp deepspeed check`: what `allennlp train` would refuse before it reads data."""

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Check a whole config file as 'allennlp train' does before it reads any data, and "
            "print the DeepSpeed configuration that it would train with, with where each value "
            "comes from. Exits with 1 and a line for each key that is wrong."
        )
        subparser = parser.add_parser("check", description=description, help=description)
        add_config(subparser)
        subparser.add_argument(
            "--all",
            action="store_true",
            help="print also what is DeepSpeed's default because nobody has said anything",
        )
        subparser.add_argument(
            "--json", action="store_true", help="print all values and their sources as JSON"
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        try:
            with only_warnings():
                params = failures.read(args.param_path, args.overrides)
                fill_in(params)
                check(params)
                if not has_deepspeed_trainer(params.as_dict(quiet=True)):
                    raise ConfigurationError(
                        "'trainer.type' isn't \"deepspeed\", and the configs of other trainers "
                        "aren't checked."
                    )
                values = explained(params)
        except ConfigurationError as error:
            print(error.message, file=sys.stderr)
            sys.exit(1)
        if args.json:
            print(json.dumps([value._asdict() for value in values], indent=2, default=repr))
            return
        console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
        console.print(f"{args.param_path} can be trained with this DeepSpeed configuration:")
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("key", "value", "from"):
            table.add_column(heading)
        shown = [value for value in values if args.all or value.source != DEEPSPEED]
        for value in shown:
            table.add_row(value.path, json.dumps(value.value, default=repr), value.source)
        console.print(table)
        if num_others := len(values) - len(shown):
            console.print(f"{num_others} more are DeepSpeed's defaults: --all prints them.")
