"""
Training a bi-encoder has the losses and weights of sentence-transformers' trainer, step by step.

A tiny BERT trains for six steps. Needs the package `sentence-transformers`.
"""

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import List

import torch
from transformers import AutoModel, AutoTokenizer

from evidence import report
from evidence.harness.steps_beside import Comparisons, losses_and_differences
from evidence.retrieval_steps.cases import CASES, NUM_STEPS, Case
from evidence.retrieval_steps.trainings import train, train_with_sentence_transformers
from tests.fixtures.tiny_bert import tiny_bert

TIME = "3 minutes"

ONLY = "numbers of cases"

SEED = 3

HEADINGS = (
    "loss",
    "pooling",
    "normalized",
    "data and options",
    "accumulation",
    "stage",
    "workers",
    "first loss",
    "last loss",
    "difference of losses",
    "difference of weights",
)


def compare(case: Case, directory: Path, comparisons: Comparisons) -> List[str]:
    """
    Returns a row of the table.

    # Raises

    `RuntimeError`
        If the losses or the weights differ without a footnote, or don't with one.
    """
    pretrained = tiny_bert(directory / "pretrained")
    base = str(directory / "model")
    dropout = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
    model = AutoModel.from_pretrained(pretrained, **dropout)
    torch.manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Larger than usual, so that texts are different from the beginning.
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.constant_(parameter, float(name.endswith("LayerNorm.weight")))
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(base)
    initial, expected = train_with_sentence_transformers(case, base, directory / "others")
    (directory / "own").mkdir()
    actual = train(case, base, directory / "own")
    columns = losses_and_differences(actual, expected, initial, bool(case.footnote))
    return [
        f"`{case.loss}`",
        case.pooling,
        "yes" if case.normalize else "no",
        case.options + comparisons.mark(case.footnote),
        *map(str, (case.accumulation, case.stage, case.world_size)),
        *columns,
    ]


def run(arguments: argparse.Namespace) -> bool:
    import sentence_transformers

    logging.disable(logging.WARNING)
    comparisons = Comparisons()
    for number, case in enumerate(CASES):
        if not arguments.only or str(number) in arguments.only:
            comparisons.add(f"{number}: {case}", partial(compare, case, comparisons=comparisons))
    heading = report.heading(1, "transformers")
    text = report.document(
        "Steps beside sentence-transformers",
        f"A tiny BERT trains {NUM_STEPS} steps of SGD as a `bi_encoder`, and with the "
        "`SentenceTransformerTrainer` and losses of sentence-transformers "
        f"{sentence_transformers.__version__}, from the same weights, with the same texts in each "
        "step and with the same number of workers. The difference of losses is the largest of a "
        "step. The difference of weights is a part of their change in training. "
        f"{sum(not case.footnote for case in CASES)} of {len(CASES)} are the same, and for each "
        "of the others a note has the reason.",
        report.table(HEADINGS, comparisons.rows),
        comparisons.notes(),
        "- **Losses** whose name begins with `Cached` have gradient caching, here with "
        "`grad_cache`. With dropout both begin each step with the same random state and encode "
        "chunks in the same order, and all texts have the same number of tokens. Without caching, "
        "sentence-transformers may encode queries and documents together, so that dropout can't "
        "be compared.\n"
        "- **False hard negatives**: every second hard negative is the document of its own pair. "
        "It is left out here by the ids, and in `GISTEmbedLoss` by a guide, whose similarity is "
        "that of the words in the texts.\n"
        "- **Equal documents** and **equal queries**: two queries of a batch have the same "
        "document, and two documents have the same query.\n"
        "- **Gathered negatives** are `gather_across_devices=True`, here "
        '`"negatives": "global"`.\n'
        "- **Pooling** is `bag_of_embeddings` with `averaged`, `cls_pooler`, or `cls_pooler` with "
        "`cls_is_last_token`.",
        f"{report.describe(heading, with_workers=False)} "
        "`python -m evidence retrieval_steps` runs it again.",
    )
    return comparisons.finish(arguments.page, heading, text)
