"""
Conversations have the tokens and the loss of transformers' and TRL's, for each chat template that
TRL ships.

The argument is the directory of the installed package `trl`: its templates are read, its code isn't
run.
"""

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from allennlp.common.checks import ConfigurationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from allennlp_deepspeed.models.language_modeling import CausalLMReader
from evidence import report
from evidence.chat_templates.conversations import (
    CONVERSATIONS,
    Record,
    prompt_and_response,
    with_parts,
)
from evidence.chat_templates.tokenizer import tokenizer_for

TIME = "5 minutes"

ONLY = "templates that begin so, such as qwen3"

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

NOT_TAKEN, REFUSED = "not taken by the template", "refused"
SAME, WITHOUT_PROMPT, ENDED = "same", "same without the generation prompt", "same and an ending"
OTHER_TEXT, OTHER_LOSS = "other text", "other loss"


class Tokens(NamedTuple):
    """Token ids, and for each whether it has a loss; or the error that there is instead."""

    ids: List[int] = []
    mask: List[bool] = []
    error: Optional[str] = None


def ours(reader: CausalLMReader, record: Record) -> Tokens:
    try:
        fields: Any = reader.text_to_instance(**record).fields
    except ConfigurationError as error:
        return Tokens(error=error.message)
    ids, labels = (fields[name].tensor.tolist() for name in ("input_ids", "labels"))
    return Tokens(ids, [label != -100 for label in labels])


def marked(tokenizer: PreTrainedTokenizerBase, record: Record, template: str) -> Tokens:
    """Returns transformers' tokens, with a loss between the template's marks."""
    try:
        encoded: Any = tokenizer.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:  # of any type that a template raises
        return Tokens(error=str(error))
    # Of nothing is the first token predicted.
    return Tokens(encoded["input_ids"], [False, *map(bool, encoded["assistant_masks"][1:])])


def completed(tokenizer: PreTrainedTokenizerBase, record: Record) -> Tokens:
    """Returns the tokens of a prompt and a response, with a loss where TRL has it."""
    tools: Any = {"tools": record.get("tools"), "return_dict": False}
    try:
        ids: Any = tokenizer.apply_chat_template([*record["prompt"], *record["response"]], **tools)
        prompt: Any = tokenizer.apply_chat_template(
            record["prompt"], add_generation_prompt=True, **tools
        )
    except Exception as error:  # of any type that a template raises
        return Tokens(error=str(error))
    pairs = enumerate(zip(prompt, ids))
    shared = next((i for i, (first, second) in pairs if first != second), len(prompt))
    return Tokens(ids, [i >= shared for i in range(len(ids))])


def verdict(actual: Tokens, expected: Tokens) -> str:
    if expected.error is not None:
        return NOT_TAKEN
    if actual.error is not None:
        return REFUSED
    if actual.ids != expected.ids:
        length = len(expected.ids)
        is_ended = (actual.ids[:length], actual.mask[:length]) == (expected.ids, expected.mask)
        return ENDED if is_ended and len(actual.ids) == length + 1 else OTHER_TEXT
    if actual.mask == expected.mask:
        return SAME
    # A response of ours begins later, and otherwise they are the same.
    begun, is_same = False, True
    for has_loss, is_expected in zip(actual.mask, expected.mask):
        begun = is_expected and (begun or has_loss)
        is_same = is_same and has_loss == begun
    return WITHOUT_PROMPT if is_same else OTHER_LOSS


class Comparison:
    """
    Comparisons of a template.

    # Parameters

    template : `str`
        The text of the template.
    training : `str`
        The text of TRL's training template for it, which has marks, or `None`.
    """

    def __init__(self, template: str, training: Optional[str]) -> None:
        self.with_marks: Counter = Counter()
        self.without_marks: Counter = Counter()
        self.completions: Counter = Counter()
        self.refusals: List[str] = []
        has_marks = MARK.search(template) is not None
        with tempfile.TemporaryDirectory() as directory:
            name = tokenizer_for(template, Path(directory))
            tokenizer = AutoTokenizer.from_pretrained(name)
            reader = CausalLMReader(name, loss_on="responses")
            marked_template = template if has_marks else training
            marked_reader = CausalLMReader(name, loss_on="responses", chat_template=marked_template)
        one_turn = CONVERSATIONS["one turn"]
        takes_texts = marked(tokenizer, one_turn, template).error is None
        for kind, record in CONVERSATIONS.items():
            record = record if takes_texts else with_parts(record)
            actual = ours(reader, record)
            if actual.error is not None and marked(tokenizer, record, template).error is None:
                self.refusals.append(f"{kind}: {actual.error}")
            if marked_template is not None:
                expected = marked(tokenizer, record, marked_template)
                self.with_marks[verdict(ours(marked_reader, record), expected)] += 1
            if training is not None:
                taken = marked(tokenizer, record, template).error is None
                self.without_marks[verdict(actual, expected) if taken else NOT_TAKEN] += 1
            completion = prompt_and_response(record)
            if not has_marks and completion["response"][0]["role"] == "assistant":
                expected = completed(tokenizer, completion)
                self.completions[verdict(ours(reader, completion), expected)] += 1


def markdown(heading: Dict[str, Any], comparisons: Dict[str, Comparison]) -> str:
    marks: Counter = sum((each.with_marks for each in comparisons.values()), Counter())
    without: Counter = sum((each.without_marks for each in comparisons.values()), Counter())
    completions: Counter = sum((each.completions for each in comparisons.values()), Counter())
    num_refused = sum(len(each.refusals) for each in comparisons.values())
    headings = (
        "template",
        "marks",
        "without marks",
        "except the prompt",
        "other text",
        "other loss",
        "prompt and response",
        "and an ending",
        "except the prompt",
        "refused",
    )
    rows = [
        [
            name,
            of(each.with_marks, SAME),
            of(each.without_marks, SAME),
            *(str(each.without_marks[k] or "") for k in (WITHOUT_PROMPT, OTHER_TEXT, OTHER_LOSS)),
            of(each.completions, SAME),
            *(str(each.completions[kind] or "") for kind in (ENDED, WITHOUT_PROMPT)),
            str(len(each.refusals) or ""),
        ]
        for name, each in comparisons.items()
    ]
    return report.document(
        "Chat templates",
        f"The {len(comparisons)} chat templates that TRL {heading['versions']['trl']} ships, and "
        f"{len(CONVERSATIONS)} conversations, with several turns, system messages, reasoning and "
        'calls of tools, are read with `"loss_on": "responses"`. A cell has the number of '
        "conversations with the same token ids and the same tokens with a loss, of those that the "
        f"template takes. {num_refused} of these are refused.",
        "- **Marks**: the template, or TRL's training template for it, has `{% generation %}` "
        f"marks, and transformers compute the loss's tokens: {of(marks, SAME)} are the same.\n"
        "- **Without marks**: the model's own template, beside TRL's training template. "
        f"{of(without, SAME)} are the same, and {without[WITHOUT_PROMPT]} are except the end of "
        "the generation prompt, such as `<|start|>assistant` or `<think>`, which TRL's marks "
        "include and which isn't a response here. "
        f"{without[OTHER_TEXT]} have other text, because TRL's template keeps reasoning that the "
        "model's template removes, which is logged. "
        f"{without[OTHER_LOSS]} have another loss: the space after `</s>` has one in llava_next, "
        "and the text between a tool's result and the next response in diffusion_gemma.\n"
        "- **Prompt and response**: the last message is the response, beside TRL's loss for "
        f"completions. {of(completions, SAME)} are the same, and {completions[ENDED]} are with the "
        "marker of the next turn, which ends a response, in addition. "
        f"{completions[WITHOUT_PROMPT]} have a loss on the response alone: where the template "
        "renders a prompt differently before its response, TRL's loss begins at the difference.",
        report.table(headings, rows),
        f"{report.describe(heading, with_workers=False)} "
        "`python -m evidence chat_templates`, with the directory of the package, runs it again.",
    )


def of(counts: Counter, kind: str) -> str:
    total = sum(counts.values()) - counts[NOT_TAKEN]
    return f"{counts[kind]} of {total}" if total else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trl", type=Path, help="the directory of the installed package trl")


def run(arguments: argparse.Namespace) -> bool:
    comparisons = {}
    for path in sorted((arguments.trl / "chat_templates").glob("*.jinja")):
        if not path.stem.endswith("_training") and path.stem.startswith(
            tuple(arguments.only or [""])
        ):
            training = path.with_name(f"{path.stem}_training.jinja")
            of_training = training.read_text() if training.exists() else None
            comparisons[path.stem] = Comparison(path.read_text(), of_training)
    heading = report.heading(1, "transformers")
    (information,) = arguments.trl.parent.glob("trl-*.dist-info")
    heading["versions"]["trl"] = information.stem.partition("-")[2]
    refusals = {name: each.refusals for name, each in comparisons.items() if each.refusals}
    arguments.page.write({**heading, "refusals": refusals}, markdown(heading, comparisons))
    for name, found in refusals.items():
        print(name, *found, sep="\n  ")
    return not refusals
