"""
Trains all types of causal language models that transformers has, shrunken, beside a plain loop, and
writes what has become of them to `benchmarks/results/architectures.md`. `--types llama,gpt2` trains
some and says all of them.
"""

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.harness import report
from tests.architectures.trial import TOLERANCE, Outcome, try_type

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> bool:
    start = time.time()
    types = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if arguments.types is not None:
        types = arguments.types.split(",")
    stages = [int(stage) for stage in arguments.stages.split(",")]
    outcomes = []
    for model_type in types:
        outcome = try_type(model_type, stages)
        logger.info("%s: %s", model_type, _said(outcome))
        outcomes.append(outcome)
    if arguments.types is None:
        heading = report.heading(1, "transformers")
        minutes = (time.time() - start) / 60
        raw = {**heading, "outcomes": [outcome._asdict() for outcome in outcomes]}
        report.write(
            arguments.output, "architectures", raw, markdown(heading, outcomes, stages, minutes)
        )
    return not any(outcome.failure for outcome in outcomes)


def _said(outcome: Outcome) -> str:
    if outcome.failure:
        return f"PROBLEM: {outcome.failure}"
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    if outcome.cause:
        return f"transformers: {outcome.cause}"
    return f"the same ({outcome.difference:.1e}, {outcome.num_parameters} parameters)"


def markdown(
    heading: Dict[str, Any], outcomes: List[Outcome], stages: List[int], minutes: float
) -> str:
    same = [outcome for outcome in outcomes if outcome.difference is not None]
    refused = [outcome for outcome in outcomes if outcome.refusal]
    not_trained = [outcome for outcome in outcomes if outcome.cause]
    problems = [outcome for outcome in outcomes if outcome.failure]
    lines = [
        f"{len(outcomes)} model types have a causal language model in transformers. Each was "
        "shrunken, by the names of the keys of its configuration, and trained with SGD for three "
        f"steps as `causal_lm` at {' and '.join(f'stage {stage}' for stage in stages)}, beside a "
        "plain loop over the loss of transformers, on batches with padding. "
        f"{len(same)} have the same weights and {len(refused)} are refused by name. Of "
        f"{len(not_trained)} the shrunken configuration is one that transformers alone don't "
        f"train. {len(problems)} have problems. The same means: no weight differs by more than "
        f"{TOLERANCE:.0e} of the largest change that training makes to one; the largest "
        f"difference was {max((o.difference or 0.0 for o in same), default=0.0):.0e}.",
        f"**The same**: {', '.join(o.model_type for o in same if not o.own_loss_is_of)}.",
        "**The same as a plain loop over the cross entropy of next tokens**, where the model's own "
        "loss is of something else: "
        + ", ".join(f"{o.model_type} ({o.own_loss_is_of})" for o in same if o.own_loss_is_of)
        + ".",
    ]
    for title, group in (
        ("Problems", [(o, o.failure) for o in problems]),
        ("Refused", [(o, o.refusal) for o in refused]),
        ("Configurations that transformers alone don't train", [(o, o.cause) for o in not_trained]),
    ):
        if group:
            rows = [f"| {o.model_type} | {text.replace('|', '/')} |" for o, text in group]
            lines.append(f"## {title}")
            lines.append("\n".join(["| type | |", "| --- | --- |", *rows]))
    lines.append(
        f"{report.describe(heading, with_workers=False)} {minutes:.0f} minutes. "
        "`make architectures` runs it again, without a network, "
        "`python -m tests.architectures --types llama` one of them."
    )
    return report.document("Architectures", *lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("--types", help="only these, such as llama,gpt2")
    parser.add_argument("--stages", default="3", help="of ZeRO")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="a directory")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for name in ("allennlp", "allennlp_deepspeed", "DeepSpeed", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.exit(0 if run(arguments) else 1)


if __name__ == "__main__":
    main()
