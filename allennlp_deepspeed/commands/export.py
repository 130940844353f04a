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
                    f"--{flag.replace('_', '-')} needs --format huggingface: add it, or remove "
                    f"--{flag.replace('_', '-')}."
                )
        print(export(args.source, args.epoch, args.output, args.merge_adapters))
