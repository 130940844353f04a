"""
Command `allennlp deepspeed ...`: the parsers of its commands, whose modules are imported when they
run.
"""

import argparse
import functools
import sys
from importlib import import_module

from allennlp.commands.subcommand import Subcommand
from pydantic import ByteSize, TypeAdapter, ValidationError
from typing_extensions import override

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
        for name, add_parser in _COMMANDS.items():
            command_parser = add_parser(subparsers)
            command_parser.set_defaults(func=functools.partial(_run, name))
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


def _run(name: str, args: argparse.Namespace) -> None:
    """
    Runs a command, and exits with a message if it raises an error about the config or an `OSError`.
    """
    try:
        import_module(f"allennlp_deepspeed.commands.{name}").run(args)
    except Exception as error:
        message = error_messages.config_error_message(error)
        if message is None and isinstance(error, OSError):
            message = str(error)
        if message is None:
            raise
        sys.exit(message)


def _check(parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
    description = (
        "Check a config as 'allennlp train' does, construct what it describes from a few "
        "instances and without weights, and print the resolved DeepSpeed configuration, with "
        "the sources of values that the config leaves unset. If keys are wrong, print one line "
        "for each and exit with code 1."
    )
    subparser = parser.add_parser("check", description=description, help=description)
    _add_config(subparser)
    subparser.add_argument(
        "--try",
        dest="tries",
        action="store_true",
        help="also train two steps with the first instances, in a temporary directory",
    )
    subparser.add_argument(
        "--overfit",
        action="store_true",
        help="instead, train --steps times with the first batch, whose loss should go to 0",
    )
    subparser.add_argument(
        "--compare",
        action="store_true",
        help="also train some steps with 'gradient_descent', and compare losses, gradient "
        "norms and weights. Exits with code 1 if they differ by more than rounding",
    )
    subparser.add_argument(
        "--steps",
        type=_number_of_steps,
        help="number of steps to compare (default = 10) or try (default = 2)",
    )
    return subparser


def _env(parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
    description = (
        "Print the environment for a bug report: versions, plugin files, relevant environment "
        "variables (without secrets), and the output of torch.utils.collect_env and ds_report."
    )
    return parser.add_parser("env", description=description, help=description)


def _estimate(parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
    description = (
        "Print the bytes of weights, gradients and optimizer states of a config's model per "
        "rank, for each ZeRO stage and offload option, which of these fit, and the "
        "'deepspeed_config' of the fastest one that fits. Needs no GPU and no compiler, and "
        "loads no pretrained weights."
    )
    subparser = parser.add_parser("estimate", description=description, help=description)
    _add_config(subparser)
    subparser.add_argument(
        "--workers",
        type=_number_of_workers,
        help="number of workers (default = that of the config)",
    )
    subparser.add_argument(
        "--gpu-memory",
        type=_bytes,
        help="memory of each GPU, such as 80GB or 40GiB (default = that of this machine's GPU)",
    )
    subparser.add_argument(
        "--cpu-memory",
        type=_bytes,
        help="CPU memory of each node (default = that of this machine)",
    )
    subparser.add_argument(
        "--nvme-memory",
        type=_bytes,
        help="free space on the NVMe device of each node (default = the free space at the "
        "config's 'nvme_path', or else in the current directory)",
    )
    subparser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    return subparser


def _export(parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
    description = (
        "Export a checkpoint on one CPU: fp32 weights (weights.th) and an archive "
        "(model.tar.gz), or a directory for transformers' from_pretrained. Prints the "
        "directory of the files."
    )
    subparser = parser.add_parser("export", description=description, help=description)
    subparser.add_argument(
        "source",
        type=str,
        metavar="serialization_dir",
        help="serialization directory of the run, a checkpoint in it, or (with --format "
        "huggingface or --adapters-only) an archive",
    )
    checkpoint = subparser.add_mutually_exclusive_group()
    checkpoint.add_argument(
        "--epoch",
        type=int,
        help="checkpoint after this number of completed epochs (default = newest)",
    )
    checkpoint.add_argument(
        "--best",
        action="store_true",
        help="with --format huggingface: weights of the best epoch instead of a checkpoint",
    )
    subparser.add_argument(
        "--format",
        choices=["allennlp", "huggingface"],
        default="allennlp",
        help="allennlp: weights.th and model.tar.gz; huggingface: a transformer and "
        "its tokenizer for from_pretrained, adapters merged",
    )
    subparser.add_argument(
        "--output",
        type=str,
        help="output directory (default = export_... in the serialization directory)",
    )
    subparser.add_argument(
        "--force",
        action="store_true",
        help="replace weights.th and model.tar.gz of an earlier export",
    )
    subparser.add_argument(
        "--module",
        type=str,
        help="with --format huggingface: name of the transformer's module, if the model has "
        "several",
    )
    subparser.add_argument(
        "--max-shard-size",
        type=str,
        help="with --format huggingface: maximum size of a weights file, such as 500MB "
        "(default = 5GB)",
    )
    adapters = subparser.add_mutually_exclusive_group()
    adapters.add_argument(
        "--adapters-only",
        "--adapters",
        action="store_true",
        help="export the LoRA adapters only, in peft's format, and the tokenizer",
    )
    adapters.add_argument(
        "--merge-adapters",
        action="store_true",
        help="merge the LoRA adapters into the weights, for an archive that doesn't need peft",
    )
    return subparser


def _report(parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
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
    return subparser


_COMMANDS = {
    "check": _check,
    "env": _env,
    "estimate": _estimate,
    "export": _export,
    "report": _report,
}


def _add_config(subparser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that reads a config as 'allennlp train' does."""
    subparser.add_argument("param_path", type=str, help="path of the config file")
    subparser.add_argument(
        "-o",
        "--overrides",
        type=str,
        default="",
        help="JSON with changes to the config, as for 'allennlp train'",
    )


def _number_of_steps(text: str) -> int:
    return _positive(text, "steps")


def _number_of_workers(text: str) -> int:
    return _positive(text, "workers")


def _positive(text: str, of: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of {of}: write 1 or more")
    return int(text)


def _bytes(text: str) -> int:
    try:
        # A number without a unit would be bytes, which is never intended.
        num_bytes = TypeAdapter(ByteSize).validate_python("" if text.isdigit() else text)
    except ValidationError:
        num_bytes = ByteSize(0)
    if num_bytes <= 0:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a size: write 80GB, 40GiB or 40960MB, for example"
        )
    return int(num_bytes)
