import argparse

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint.export import export
from allennlp_deepspeed.checkpoint.huggingface import export_huggingface


class Export:
    """
    Command `allennlp deepspeed export`: exports a checkpoint to fp32 weights and an archive, or to
    files that transformers loads.
    """

    def add_subparser(self, parser: argparse._SubParsersAction) -> argparse.ArgumentParser:
        description = (
            "Make fp32 weights (weights.th) and an archive (model.tar.gz) out of a checkpoint, or "
            "a directory that transformers load, on one CPU. Prints the directory with the files."
        )
        subparser = parser.add_parser("export", description=description, help=description)
        subparser.add_argument(
            "source",
            type=str,
            metavar="serialization_dir",
            help="the directory that training saves to, a checkpoint in it, or an archive for "
            "--format huggingface and --adapters-only",
        )
        checkpoint = subparser.add_mutually_exclusive_group()
        checkpoint.add_argument(
            "--epoch",
            type=int,
            help="the checkpoint with this number of completed epochs (default: the newest)",
        )
        checkpoint.add_argument(
            "--best",
            action="store_true",
            help="with --format huggingface: the weights of the best epoch, not of a checkpoint",
        )
        subparser.add_argument(
            "--format",
            choices=["allennlp", "huggingface"],
            default="allennlp",
            help="allennlp for weights.th and model.tar.gz (the default), huggingface for a "
            "transformer and its tokenizer as from_pretrained reads them, adapters merged",
        )
        subparser.add_argument(
            "--output",
            type=str,
            help="where to write the files (default: a directory in the serialization directory "
            "whose name begins with export_)",
        )
        subparser.add_argument(
            "--module",
            type=str,
            help="with --format huggingface: the transformer's name, if the model has several",
        )
        subparser.add_argument(
            "--max-shard-size",
            type=str,
            help="with --format huggingface: of a file of weights, such as 500MB (default: 5GB)",
        )
        adapters = subparser.add_mutually_exclusive_group()
        adapters.add_argument(
            "--adapters-only",
            "--adapters",
            action="store_true",
            help="write LoRA's adapters alone, in the files of peft, and the tokenizer",
        )
        adapters.add_argument(
            "--merge-adapters",
            action="store_true",
            help="add LoRA's adapters to the weights, for an archive that needs no peft",
        )
        subparser.set_defaults(func=self.run)
        return subparser

    def run(self, args: argparse.Namespace) -> None:
        if args.format == "huggingface" or args.adapters_only:
            output = export_huggingface(
                args.source,
                args.output,
                epoch=args.epoch,
                best=args.best,
                module=args.module,
                adapters_only=args.adapters_only,
                max_shard_size=args.max_shard_size or "5GB",
            )
            print(output)
            return
        for flag in ("best", "module", "max_shard_size"):
            if getattr(args, flag):
                raise ConfigurationError(
                    f"--{flag.replace('_', '-')} is for --format huggingface: write that too, or "
                    "leave it out."
                )
        print(export(args.source, args.epoch, args.output, args.merge_adapters))
