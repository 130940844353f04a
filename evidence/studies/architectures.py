"""
All types of causal language models that transformers has, shrunken, train to the weights of a plain
loop, or are refused by name.
"""

import argparse
import logging
import time
from typing import Any, Dict, List

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evidence import report
from tests.architectures.trial import TOLERANCE, Outcome, try_type

TIME = "20 minutes"

logger = logging.getLogger(__name__)


ONLY = "types, such as llama gpt2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, nargs="+", default=[3], help="of ZeRO")


def run(arguments: argparse.Namespace) -> bool:
    start = time.time()
    outcomes = []
    for model_type in arguments.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        outcome = try_type(model_type, arguments.stages)
        logger.info("%s: %s", model_type, _said(outcome))
        outcomes.append(outcome)
    heading = report.heading(1, "transformers")
    minutes = (time.time() - start) / 60
    raw = {**heading, "outcomes": [outcome._asdict() for outcome in outcomes]}
    arguments.page.write(raw, markdown(heading, outcomes, arguments.stages, minutes))
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
            rows = [[o.model_type, text.replace("|", "/")] for o, text in group]
            lines += [f"## {title}", report.table(["type", ""], rows)]
    lines.append(
        f"{report.describe(heading, with_workers=False)} {minutes:.0f} minutes. "
        "`python -m evidence architectures` runs it again, without a network, with `--only llama` "
        "one of them."
    )
    return report.document("Architectures", *lines)
