"""The table of what is the same as in 2022, with causes of what isn't."""

import itertools
import re
from typing import Any, Dict, List, Optional

from evidence import report
from evidence.original.rows import IN_2022, TOLERANCE, Row

# By the kind: the heading of its section, and what is compared.
SECTIONS = {
    "architecture": (
        "Architectures",
        "Transformers that AllenNLP 2.10.1 can embed, small and with random weights. A classifier "
        "over each was trained for two epochs with SGD and archived in 2022. Today the archive is "
        "loaded, predicts and is evaluated, and `deepspeed` trains from the same weights: the "
        "largest difference of a weight, a loss or a metric.",
    ),
    "experiment": (
        "Experiments of allennlp-models",
        "The same with the experiments of its fixtures, with SGD, dropout included except between "
        "the layers of a GRU or LSTM, and small stand-ins for the hub's models.",
    ),
    "archive": (
        "Published archives",
        "Those of the fixtures of AllenNLP and allennlp-models, of 2018 to 2022.",
    ),
    "tokenizer": (
        "Tokenizers",
        "Made and saved by transformers 4.20.1: tokens, IDs, types, offsets and indices of seven "
        "texts by AllenNLP's tokenizer and mismatched indexer, and what is decoded.",
    ),
    "registered": (
        "Registered components",
        "What AllenNLP's objects of each registered name compute, gradients included.",
    ),
    "trained": (
        "Optimizers and schedulers in trainings",
        "A small classifier was trained with each in 2022, 24 steps in eight epochs. Today "
        "`deepspeed` trains from the same weights.",
    ),
}
_REFUSED = "stages 2 and 3 refuse {}, and say what to write"
# Why today's are others: a regular expression for kind, name, "differs" if numbers do, and problem.
CAUSES: Dict[str, str] = {
    "architecture yoso YosoModel has texts with padding": "refused, since transformers 5 masks no "
    "padding; transformers 4 masked each text with those of other texts of the batch",
    "architecture prophetnet-encoder differs $": "transformers 4 masked each text with those of "
    "other texts of the batch",
    "architecture nystromformer-landmarks RuntimeError: The size": "transformers 5 fails",
    r"experiment lm/\S+/experiment_unidirectional_transformer\S+ differs stage 2: The embedding .* "
    "sparse": "the gradient of `masked_select` was wrong in PyTorch 1.12 for a transposed tensor; "
    + _REFUSED.format("sparse gradients"),
    r"experiment lm/\S+ stage 2: The embedding .* sparse": _REFUSED.format("sparse gradients"),
    r"experiment vision/nlvr2/\S+ stage 3: The parameter '[^']*' is empty": "stage 3 refuses a "
    "parameter without elements, and says what to write",
    r"experiment \S+/adversarial_experiment\S+ stage 3: 'trainer.callbacks' has": "stage 3 refuses "
    "its callback, and says what to write",
    r"trained optimizer \S+ stage 2: 'trainer.optimizer[^;]* shard": _REFUSED.format("it"),
    "tokenizer MPNetTokenizerFast differs $": "the offset of `<mask>` is without the space before "
    "it",
    "tokenizer RemBertTokenizerFast differs $": "the text of `[MASK]` is in lower case; its ID is "
    "the same",
}


def cause(row: Row) -> Optional[str]:
    text = f"{row.kind} {row.name} {'' if row.is_close else 'differs '}{row.problem}"
    return next((why for pattern, why in CAUSES.items() if re.match(pattern, text)), None)


def is_explained(row: Row) -> bool:
    return row.is_same or row.problem.startswith(IN_2022) or cause(row) is not None


def markdown(heading: Dict[str, Any], rows: List[Row], minutes: float) -> str:
    made = [row for row in rows if not row.problem.startswith(IN_2022)]
    blocks = [
        "AllenNLP 2.10.1 as it was released, on PyTorch 1.12.1 and transformers 4.20.1 with Python "
        f"3.9, beside today's. {_count(made)}.",
    ]
    for kind, (title, text) in SECTIONS.items():
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            blocks += [f"## {title}", text, *_section(of_kind)]
    blocks.append(
        f"{report.describe(heading, with_workers=False)} {minutes:.0f} minutes. "
        "`python -m evidence original PYTHON --allennlp PATH --models PATH` runs it again, without "
        "a network."
    )
    return report.document("The original", *blocks)


def _count(rows: List[Row]) -> str:
    same = sum(row.is_same for row in rows)
    return f"{same} of {len(rows)} are the same to {TOLERANCE:.0e}"


def _section(rows: List[Row]) -> List[str]:
    failed = [row for row in rows if row.problem.startswith(IN_2022)]
    made = [row for row in rows if row not in failed]
    columns = list(dict.fromkeys(itertools.chain(*(row.differences for row in made))))
    blocks = [f"{_count(made)}."]
    shown = made
    if columns == ["results"]:
        same = [row.name.rpartition(" ") for row in made if row.is_same]
        groups = itertools.groupby(same, key=lambda parts: parts[0])
        texts = [f"{kind} {', '.join(each[2] for each in names)}" for kind, names in groups]
        blocks.append(f"The same: {'; '.join(texts)}.".replace("  ", " "))
        shown = [row for row in made if not row.is_same]
    if shown:
        cells = [[row.name, *(_cell(row, each) for each in columns), _note(row)] for row in shown]
        blocks.append(report.table(["", *columns, ""], cells))
    if failed:
        names = [f"{row.name} (`{_short(row)}`)" for row in failed]
        blocks.append(f"Left out, since they fail in 2022: {', '.join(names)}.")
    return blocks


def _short(row: Row) -> str:
    return row.problem[len(IN_2022) :].replace("`", "'")[:100]


def _cell(row: Row, column: str) -> str:
    number = row.differences.get(column)
    return "" if number is None else "other" if number == float("inf") else f"{number:.0e}"


def _note(row: Row) -> str:
    if row.is_same:
        return ""
    return (cause(row) or f"**differs** {row.problem}").replace("|", "/")[:300]
