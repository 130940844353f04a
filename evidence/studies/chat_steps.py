"""
Training on conversations has the losses and weights of TRL's `SFTTrainer`, step by step, with some
of TRL's chat templates.

A tiny language model trains for six steps. Needs the package `trl`.
"""

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import List

import torch
from allennlp.data import Vocabulary
from transformers import AutoTokenizer

from allennlp_deepspeed.models.language_modeling import CausalLM
from evidence import report
from evidence.chat_templates import own_training
from evidence.chat_templates.cases import CASES, NUM_STEPS, Case
from evidence.chat_templates.tokenizer import tokenizer_for
from evidence.chat_templates.trl_training import SEED, train_with_trl
from evidence.harness.steps_beside import Comparisons, losses_and_differences
from tests.fixtures.tiny_lm import LLAMA

TIME = "5 minutes"

ONLY = "templates that begin so, such as qwen3"

HEADINGS = (
    "template",
    "data",
    "weights",
    "accumulation",
    "stage",
    "workers",
    "TRL's workers",
    "first loss",
    "last loss",
    "difference of losses",
    "difference of weights",
)


def compare(case: Case, templates: Path, directory: Path, comparisons: Comparisons) -> List[str]:
    """
    Returns a row of the table.

    # Raises

    `RuntimeError`
        If the losses or the weights differ without a footnote, or don't with one.
    """
    path = templates / f"{case.template}.jinja"
    own = Path(own_training.__file__).with_name(path.name)
    template = (path if path.exists() else own).read_text()
    training = path.with_name(f"{case.template}_training.jinja")
    base = tokenizer_for(template, directory / "base", case.adds_bos)
    torch.manual_seed(SEED)
    config = {**LLAMA, "vocab_size": 512, "max_position_embeddings": 2048}
    transformer = CausalLM(Vocabulary(), config=config).transformer
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    transformer.save_pretrained(base)
    initial, expected = train_with_trl(case, base, directory / "trl")
    (directory / "own").mkdir()
    training_template = training.read_text() if case.has_marks else None
    actual = own_training.train(case, base, training_template, initial, directory / "own")
    if case.adds_bos:
        bos_token_id = AutoTokenizer.from_pretrained(base).bos_token_id
        counts = {ids.count(bos_token_id) for ids in [*actual.examples, *expected.examples]}
        if counts != {1}:
            raise RuntimeError(f"Examples have {counts} tokens for the beginning of a text.")
    columns = losses_and_differences(actual, expected, initial, bool(case.footnote))
    return [
        case.template,
        case.data_and_options + comparisons.mark(case.footnote),
        case.kind,
        *map(str, (case.accumulation, case.stage, case.world_size, case.trl_workers)),
        *columns,
    ]


def run(arguments: argparse.Namespace) -> bool:
    import trl
    from trl import SFTTrainer  # noqa: F401  # imported once, for all workers

    logging.disable(logging.WARNING)
    templates = Path(trl.__file__).parent / "chat_templates"
    comparisons = Comparisons()
    for case in sorted(CASES, key=lambda case: case.template):
        if case.template.startswith(tuple(arguments.only or [""])):
            comparisons.add(str(case), partial(compare, case, templates, comparisons=comparisons))
    heading = report.heading(1, "transformers", "peft")
    names = {case.template for case in CASES} - {"smollm2"}
    text = report.document(
        "Steps beside TRL",
        f"A tiny Llama trains {NUM_STEPS} steps of SGD with {len(names)} chat templates of TRL "
        f"{trl.__version__} and SmolLM2's, and with TRL's `SFTTrainer`, from the same weights and "
        "with the same examples, of different lengths, in each step. The loss is on responses, by "
        "TRL's `assistant_only_loss` for messages and its loss of completions for prompts, unless "
        "the data say all tokens. One worker of TRL's has the batches of all workers here. Both "
        "divide the sum of a step's losses by the number of its tokens, of all workers and "
        "micro-batches. The difference of losses is the largest of a step. The difference of "
        "weights is a part of their change in training. "
        f"{sum(not case.footnote for case in CASES)} of {len(CASES)} are the same, and for each "
        "of the others a note has the reason.",
        report.table(HEADINGS, comparisons.rows),
        comparisons.notes(),
        "- **Training template**: the reader's `chat_template` is TRL's training template, which "
        "TRL takes by itself.\n"
        "- **`max_length`**: both cut off the end of the full conversation, prompt included.\n"
        "- **BOS by tokenizer**: the tokenizer begins each text with the token with which the "
        "template begins too. Each example has it once, on both sides.\n"
        "- **Killed**: all workers here are killed and recover from a checkpoint of step 3, beside "
        "a training of TRL's without an interruption.",
        f"{report.describe(heading, with_workers=False)} "
        "`python -m evidence chat_steps` runs it again.",
    )
    return comparisons.finish(arguments.page, heading, text)
