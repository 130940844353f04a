import argparse

from allennlp_deepspeed.export import export


class Export:
    """`allennlp deepspeed export`: makes fp32 weights and an archive out of a checkpoint."""

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Make fp32 weights (weights.th) and an archive (model.tar.gz) out of a checkpoint, on "
            "one CPU. Prints the directory with the two files."
        )
        subparser = parser.add_parser("export", description=description, help=description)
        subparser.add_argument(
            "serialization_dir", type=str, help="the directory that training saves to"
        )
        subparser.add_argument(
            "--epoch",
            type=int,
            help="the checkpoint with this number of completed epochs (default: the newest)",
        )
        subparser.add_argument(
            "--output",
            type=str,
            help="where to write the files (default: export_e*_b* in the serialization directory)",
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        print(export(args.serialization_dir, args.epoch, args.output))
