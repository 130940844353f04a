import argparse

from allennlp_deepspeed.checkpoint.offline import gather


class Gather:
    """
    Command `allennlp deepspeed gather`: merges the parts of a checkpoint, from nodes without a
    shared directory, into one.
    """

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Copy the parts of the newest complete checkpoint from the serialization directories "
            "of all nodes into one directory, and verify the checksum of each file. Prints the "
            "directory of the checkpoint."
        )
        subparser = parser.add_parser("gather", description=description, help=description)
        subparser.add_argument(
            "serialization_dirs",
            type=str,
            nargs="+",
            metavar="serialization_dir",
            help="serialization directories of all nodes, in any order",
        )
        subparser.add_argument(
            "--output", type=str, required=True, help="serialization directory to create"
        )
        subparser.add_argument(
            "--epoch",
            type=int,
            help="checkpoint after this number of completed epochs (default = newest)",
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        print(gather(args.serialization_dirs, args.output, args.epoch))
