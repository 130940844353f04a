"""Runs `allennlp deepspeed check` on the training configs of a checkout of allennlp-models."""

import argparse
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Dict

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.commands.check import Check

STAGES = (0, 2, 3)


def check_all(folder: Path) -> Dict[str, Dict[str, str]]:
    """Returns, by a config's path and the stage, the message that refuses it, or `""`."""
    parser = argparse.ArgumentParser()
    Check().add_subparser(parser.add_subparsers())
    messages: Dict[str, Dict[str, str]] = {}
    for path in sorted(folder.rglob("*.json*")):
        for variable in re.findall(r"std.extVar\(['\"](.*?)['\"]\)", path.read_text()):
            os.environ.setdefault(variable, f"/nowhere/{variable}")
        messages[str(path.relative_to(folder))] = {
            str(stage): _check(parser, path, stage) for stage in STAGES
        }
    return messages


def _check(parser: argparse.ArgumentParser, path: Path, stage: int) -> str:
    own = Params.from_file(str(path)).as_dict(quiet=True).get("distributed") or {}
    overrides = {
        "trainer.type": "deepspeed",
        "trainer.deepspeed_config": {"zero_optimization": {"stage": stage}},
        "distributed": {**own, "cuda_devices": [-1, -1]},
    }
    args = parser.parse_args(["check", str(path), "-o", json.dumps(overrides)])
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            args.func(args)
    except ConfigurationError as error:
        return " ".join(str(error.message).split())
    return ""
