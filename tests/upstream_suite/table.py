"""The table of AllenNLP's own tests, and the causes of those that fail."""

import re
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional

from benchmarks.harness import report

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


CAUSES: List[Cause] = []


def cause_of(outcome: Outcome) -> Optional[Cause]:
    """Returns why a test has failed, or has been skipped for lack of the network."""
    text = f"{outcome.name}: {outcome.message}"
    causes = CAUSES if outcome.status == "failed" else _CAUSES_OF_SKIPPED
    if outcome.status == "passed":
        return None
    return next((cause for cause in causes if re.search(cause.pattern, text)), None)


def unexplained(outcomes: List[Outcome]) -> List[str]:
    """Returns the names and first lines of the failures that no cause explains."""
    return [
        f"{each.name}: {each.message.strip().partition(chr(10))[0][:200]}"
        for each in outcomes
        if each.status == "failed" and cause_of(each) is None
    ]


_CAUSES_OF_SKIPPED = [Cause("network", "needs the hub|needs spaCy's model", "")]


def markdown(heading: Dict[str, Any], results: Dict[str, List[Outcome]]) -> str:
    """Returns the text of benchmarks/results/upstream.md."""
    rows = [_row(folder, outcomes) for folder, outcomes in results.items()]
    everything = [outcome for outcomes in results.values() for outcome in outcomes]
    columns = ["folder", "tests", "passed", "skipped", *KINDS.values(), "no known cause"]
    causes = Counter(cause_of(each) for each in everything if each.status == "failed")
    return report.document(
        "AllenNLP's own tests",
        "All tests of AllenNLP 2.10.1 (`make upstream-folders ALLENNLP=path`), unchanged, with this "
        "package imported, and with small stand-ins in place of the hub's models. AllenNLP alone "
        "can't be imported on these versions. The trainers' tests with ours instead of AllenNLP's "
        "are `make upstream`.",
        report.table(columns, [*rows, _row("all", everything)]),
        "Those that fail:",
        report.table(
            ["kind", "tests", "cause"],
            [
                [KINDS[cause.kind], str(number), cause.text]
                for cause, number in sorted(
                    ((c, n) for c, n in causes.items() if c is not None),
                    key=lambda item: (list(KINDS).index(item[0].kind), -item[1]),
                )
            ],
        ),
        report.describe(heading, with_workers=False),
    )


def _row(folder: str, outcomes: List[Outcome]) -> List[str]:
    statuses = Counter(
        "unknown" if cause is None and each.status == "failed" else each.status if cause is None else cause.kind
        for each in outcomes
        for cause in [cause_of(each)]
    )
    counts = [statuses[key] for key in ("passed", "skipped", *KINDS, "unknown")]
    return [folder, str(len(outcomes)), *map(str, counts)]
