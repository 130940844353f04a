import argparse
import functools
import sys
from typing import Any, Callable

from allennlp.commands.subcommand import Subcommand
from typing_extensions import override

from allennlp_deepspeed.commands.check import Check
from allennlp_deepspeed.commands.env import Env
from allennlp_deepspeed.commands.estimate import EstimateMemory
from allennlp_deepspeed.commands.export import Export
from allennlp_deepspeed.commands.report import Report
from allennlp_deepspeed.launch import error_messages
from allennlp_deepspeed.versions import own_version


@Subcommand.register("deepspeed")
class DeepSpeed(Subcommand):
    """
    Command `allennlp deepspeed ...`: prepares trainings, and works with their checkpoints and
    metrics.

    The import hook makes AllenNLP find it. Without the hook, a file `.allennlp_plugins` in the
    working directory or `~/.allennlp/plugins` must name `allennlp_deepspeed`: `--include-package`
    is too late for a command, because AllenNLP imports these packages after it has parsed the
    arguments.
    """

    @override
    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Check a config, estimate memory, and export or report what the 'deepspeed' "
            "trainer saved."
        )
        subparser = parser.add_parser(self.name, description=description, help=description)
        version = f"allennlp-deepspeed {own_version()}"
        subparser.add_argument("--version", action="version", version=version)
        subparsers = subparser.add_subparsers(title="Commands", metavar="", required=True)
        commands = (Check(), Env(), EstimateMemory(), Export(), Report())
        for command in commands:
            command_parser = command.add_subparser(subparsers)
            run: Callable[[Any], None] = command_parser.get_default("func")
            command_parser.set_defaults(func=functools.partial(_run, run))
            # AllenNLP adds it to the parser of `deepspeed` only, before the name of the command.
            # Its `add_argument` would add "(default = ==SUPPRESS==)" to the help.
            argparse.ArgumentParser.add_argument(
                command_parser,
                "--include-package",
                type=str,
                action="append",
                default=argparse.SUPPRESS,
                help="additional packages to include",
            )
        return subparser


def _run(run: Callable[[Any], None], args: argparse.Namespace) -> None:
    """
    Runs a command, and exits with a message if it raises an error about the config or an `OSError`.
    """
    try:
        run(args)
    except Exception as error:
        message = error_messages.config_error_message(error)
        if message is None and isinstance(error, OSError):
            message = str(error)
        if message is None:
            raise
        sys.exit(message)
