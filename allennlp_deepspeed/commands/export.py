import argparse

from allennlp_deepspeed.checkpoint.export import export, export_adapters
from allennlp_deepspeed.commands.gather import add_parts


class Export:
    """`allennlp deepspeed export`: makes fp32 weights and an archive out of a checkpoint."""

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Make fp32 weights (weights.th) and an archive (model.tar.gz) out of a checkpoint, on "
            "one CPU. Prints the directory with the files."
        )
        subparser = parser.add_parser("export", description=description, help=description)
        subparser.add_argument(
            "serialization_dir", type=str, help="the directory that training saves to"
        )
        add_parts(subparser)
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
        adapters = subparser.add_mutually_exclusive_group()
        adapters.add_argument(
            "--adapters-only",
            action="store_true",
            help="write LoRA's adapters alone, in the files of peft; then an archive can be given "
            "instead of the serialization directory",
        )
        adapters.add_argument(
            "--merge-adapters",
            action="store_true",
            help="add LoRA's adapters to the weights, for an archive that needs no peft",
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        if args.adapters_only:
            print(export_adapters(args.serialization_dir, args.epoch, args.output, args.parts))
        else:
            merge, parts = args.merge_adapters, args.parts
            print(export(args.serialization_dir, args.epoch, args.output, merge, parts))
