import argparse

from allennlp_deepspeed.checkpoint import universal
from allennlp_deepspeed.checkpoint.offline import find


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
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        print(resize(args.serialization_dir))


def resize(serialization_dir: str) -> str:
    """
    Converts the newest committed checkpoint, unless it has been done already, or any number of
    workers can load it as it is, which they can at ZeRO stage 0.

    # Parameters

    serialization_dir : `str`, required.

    # Returns

    `str`
        The directory that any number of workers can continue from.

    # Raises

    `CheckpointError`
        If there is no checkpoint, or it is damaged.
    """
    directory, record = find(serialization_dir)
    if record.zero_stage == 0:
        return directory
    return universal.find(directory) or universal.convert(directory)
