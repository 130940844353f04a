import argparse
from typing import Sequence

from allennlp_deepspeed.checkpoint import universal
from allennlp_deepspeed.checkpoint.in_several_directories import find, together
from allennlp_deepspeed.commands.gather import add_parts
from allennlp_deepspeed.storage.checkpoint_directory import CheckpointDirectory


class Resize:
    """
    `allennlp deepspeed resize`: converts a checkpoint so that any number of workers can continue
    from it. `allennlp train --recover` does the same by itself where it is needed.
    """

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Convert the newest checkpoint so that 'allennlp train --recover' can continue from it "
            "with any number of workers. The checkpoint stays as it is. Prints the directory to "
            "continue from."
        )
        subparser = parser.add_parser("resize", description=description, help=description)
        subparser.add_argument(
            "serialization_dir", type=str, help="the directory that training saves to"
        )
        add_parts(subparser)
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        print(resize(args.serialization_dir, args.parts))


def resize(serialization_dir: str, parts: Sequence[str] = ()) -> str:
    """
    Converts the newest committed checkpoint, unless it has been done already, or any number of
    workers can load it as it is, which they can at ZeRO stage 0.

    # Parameters

    serialization_dir : `str`, required.
    parts : `Sequence[str]`, optional (default = `()`)
        The serialization directories of other nodes, where each has a part of the checkpoint. Then
        the conversion is put into each of them.

    # Returns

    `str`
        The directory that any number of workers can continue from, in the first of them.

    # Raises

    `CheckpointError`
        If there is no checkpoint, or it is damaged.
    """
    found = find([serialization_dir, *parts])
    if found.record.zero_stage == 0:
        return found.directory
    conversion = universal.find(found.directory)
    if conversion is None:
        with together(found) as directory:
            conversion = universal.convert(directory, target=found.directory)
    for part in parts:
        universal.copy(conversion, CheckpointDirectory(part).path(found.point))
    return conversion
