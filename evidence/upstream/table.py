"""The table of AllenNLP's own tests, and the causes of those that fail."""

import re
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional

from evidence import report

KINDS = {
    "network": "needs the network",
    "libraries": "AllenNLP or its test on today's libraries",
    "environment": "needs a program or package that isn't there",
    "intention": "ours by intention",
    "ours": "ours",
}
"""Columns of the table, by kind of cause."""


class Outcome(NamedTuple):
    """
    # Parameters

    name : `str`
        The module, class and function of the test.
    status : `str`
        "passed", "skipped" or "failed".
    message : `str`
    """

    name: str
    status: str
    message: str


class Cause(NamedTuple):
    """
    # Parameters

    kind : `str`
        A key of `KINDS`.
    pattern : `str`
        A regular expression that is searched in a test's name and message.
    text : `str`
    """

    kind: str
    pattern: str
    text: str


CAUSES = [
    Cause(
        "network",
        "needs the hub|needs spaCy's model|NameResolutionError|LocalEntryNotFoundError",
        "loads something that isn't a model with a stand-in, or a larger model of spaCy",
    ),
    Cause(
        "libraries",
        "reads `encoder` of a tokenizer|gives an attention queries|tuple, which transformers 5",
        "the test uses something that transformers 5 has removed",
    ),
    Cause(
        "libraries",
        "cannot import name 'Repository' from 'huggingface_hub'",
        "the test uses `Repository`, which huggingface_hub 1 has removed",
    ),
    Cause(
        "libraries",
        "TestTensorCache.*Weights only load failed",
        "`TensorCache` pickles with a protocol that PyTorch's `weights_only=True` doesn't read",
    ),
    Cause(
        "libraries",
        "test_cached_path_http_err_handling.*IncompleteRead",
        "the test's answer of a server is one that urllib3 2 refuses",
    ),
    Cause(
        "libraries",
        "FeedForward::test_textual_representation_contains_activations: AssertionError",
        "PyTorch prints modules that are the same one after the other in one line",
    ),
    Cause(
        "intention",
        "test_distributed_(auc|spearman)_unequal_batches: Failed: DID NOT RAISE",
        "expects that a metric fails where workers have different numbers of instances, which is "
        "right with this package",
    ),
    Cause(
        "intention",
        "refused by name",
        "logs histograms of parameters and gradients, which are sharded",
    ),
    Cause(
        "environment",
        "No module named 'checklist'|test_add_checklist_subparser",
        "needs the package `checklist`, which can't be built with today's `notebook`",
    ),
    Cause(
        "environment",
        "test_locking: Failed: DID NOT RAISE .*PermissionError",
        "expects that a file without permissions can't be written, which root can",
    ),
]
"""Those of tests that fail, or that are skipped for one of them."""


def cause_of(outcome: Outcome) -> Optional[Cause]:
    """Returns why a test hasn't passed, if it is known."""
    if outcome.status == "passed":
        return None
    text = f"{outcome.name}: {outcome.message}"
    return next((cause for cause in CAUSES if re.search(cause.pattern, text, re.DOTALL)), None)


def unexplained(outcomes: List[Outcome]) -> List[str]:
    """Returns the names and first lines of the failures that no cause explains."""
    return [
        f"{each.name}: {' '.join(each.message.split())[:300]}"
        for each in outcomes
        if each.status == "failed" and cause_of(each) is None
    ]


def markdown(heading: Dict[str, Any], results: Dict[str, List[Outcome]]) -> str:
    """Returns the text of evidence/results/upstream.md."""
    rows = [_row(folder, outcomes) for folder, outcomes in results.items()]
    everything = [outcome for outcomes in results.values() for outcome in outcomes]
    columns = ["folder", "tests", "passed", "skipped", *KINDS.values(), "no known cause"]
    causes = Counter(cause for each in everything if (cause := cause_of(each)) is not None)
    by_kind = sorted(causes, key=lambda cause: (list(KINDS).index(cause.kind), -causes[cause]))
    return report.document(
        "AllenNLP's own tests",
        "All tests of AllenNLP 2.10.1, unchanged, with this package imported, and with small "
        "stand-ins in place of the hub's models. Without this package AllenNLP can't be imported "
        "on these versions. The tests of trainers are also run with this package's trainer, at "
        "three stages. Folders that aren't listed haven't been run. Tests that are skipped without "
        "one of the causes below need a GPU, or AllenNLP has disabled them. "
        "`python -m evidence upstream PATH` runs them again.",
        report.table(columns, [*rows, _row("all", everything)]),
        "Why tests don't pass:",
        report.table(
            ["kind", "tests", "cause"],
            [[KINDS[cause.kind], str(causes[cause]), cause.text] for cause in by_kind],
        ),
        report.describe(heading, with_workers=False),
    )


def _row(folder: str, outcomes: List[Outcome]) -> List[str]:
    counts = Counter(
        cause.kind if (cause := cause_of(each)) is not None else each.status for each in outcomes
    )
    columns = ["passed", "skipped", *KINDS, "failed"]
    return [folder, str(len(outcomes)), *(str(counts[column]) for column in columns)]
