import argparse
import logging

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.announcements import is_full_log_requested
from allennlp_deepspeed.checkpoint.export import export
from allennlp_deepspeed.checkpoint.huggingface import export_huggingface


def run(args: argparse.Namespace) -> None:
    """
    Exports a checkpoint to fp32 weights and an archive, or to files that transformers loads, and
    prints the directory. Unless the user has asked for the log, it shows warnings only.
    """
    disabled = logging.root.manager.disable
    if not is_full_log_requested():
        logging.disable(logging.INFO)
    try:
        print(_export(args))
    finally:
        logging.disable(disabled)


def _export(args: argparse.Namespace) -> str:
    if args.format == "huggingface" or args.adapters_only:
        if args.force:
            raise ConfigurationError(
                "--force is for weights.th and model.tar.gz: remove it, and the directory of an "
                "earlier export for transformers or peft."
            )
        return export_huggingface(
            args.source,
            args.output,
            epoch=args.epoch,
            best=args.best,
            module=args.module,
            adapters_only=args.adapters_only,
            max_shard_size=args.max_shard_size or "5GB",
        )
    for flag in ("best", "module", "max_shard_size"):
        if getattr(args, flag):
            raise ConfigurationError(
                f"--{flag.replace('_', '-')} needs --format huggingface: add it, or remove "
                f"--{flag.replace('_', '-')}."
            )
    return export(args.source, args.epoch, args.output, args.merge_adapters, args.force)
