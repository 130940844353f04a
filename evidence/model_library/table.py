"""The table of what has become of each experiment, and notes that explain it."""

import re
from typing import Any, Dict, List, NamedTuple, Optional

from evidence import report

TOLERANCE = 1e-5

COLUMNS = {
    "1x0": "one process, stage 0",
    "2x0": "two workers, stage 0",
    "2x2": "stage 2",
    "2x3": "stage 3",
}


class Note(NamedTuple):
    """
    # Parameters

    cell : `str`
        A regular expression for what is in the cell, and the name of the experiment before it.
    text : `str`
    """

    cell: str
    text: str


NOTES = [
    Note(
        "from gradients of 0",
        "momentum and weight decay move parameters that no worker has used in a step, at stages 1 "
        "to 3: from `gradient_descent` with gradients of 0 in place of none, and on both sides, "
        'for less rounding, `"eps": 1e-3` or `"lr": 1e-2` too, the difference is less than '
        f"{TOLERANCE:.0e}",
    ),
    Note(
        "from states of the validation",
        "ELMo goes on with the states of the batch before, in the next epoch with those of the "
        "validation, whose batches are others in each worker than in one process: with those of "
        'the last batch of the training, and for less rounding `"eps": 1e-3` or `"lr": 1e-2` too, '
        f"the difference is less than {TOLERANCE:.0e}",
    ),
    Note(
        "with a large eps",
        'rounding, of which Adam makes steps where a gradient is near 0: with `"eps": 1e-3` in the '
        f"optimizer, on both sides, the difference is less than {TOLERANCE:.0e}",
    ),
    Note(
        "with a large rate",
        "rounding, which is more of a small update than of a large one: with "
        '`"eps": 1e-3, "lr": 1e-2` in the optimizer, on both sides, the difference is less than '
        f"{TOLERANCE:.0e}",
    ),
    Note(
        "of the mean",
        "its callback projects gradients, with several workers their mean; `gradient_descent` "
        "projects those of each micro-batch: from `gradient_descent` with a callback that projects "
        f"the mean the difference is less than {TOLERANCE:.0e}",
    ),
    Note(
        # Rounding differently is no measure of it: the projection isn't linear in the gradients.
        r"adversarial_experiment\S* sgd 2: DIFFERS: [12]\.\de-05",
        "rounding, which grows where its callback projects gradients on each other: at most 2e-5 "
        "of the update of a bias",
    ),
    Note(
        "between two roundings",
        "rounding: `gradient_descent` differs as much from itself if the loss is multiplied by 3 "
        "and each gradient divided by 3",
    ),
    Note(
        "between two orders",
        "rounding: `gradient_descent` differs as much from itself if its sparse gradients are "
        "added to zeros, in another order",
    ),
    Note(
        "in the last digit",
        "rounding: less than a unit in the last place of the parameter, all its elements together, "
        "and less than a thousandth of its update if that is more than 100 units",
    ),
    Note(
        r": DIFFERS, \S+ in \S+$",
        "rounding: in each parameter that is off, `gradient_descent` differs at least a fourth as "
        "much from itself if the loss is multiplied by 3 and each gradient divided by 3",
    ),
    Note(
        r" checks: \d+ calls, \d+ pairs$",
        "the check ends both trainings, since it finds the same pairs of a layer with a bias and a "
        "normalization: the numbers are those without it",
    ),
    Note(
        " checks: .* alone$",
        "AllenNLP's `DistributedDataParallel` fails, with sparse gradients, activation "
        "checkpointing, groups of parameters or metrics that workers call a different number of "
        "times, or a callback's gradients aren't averaged there: compared with `gradient_descent` "
        "in one process, which accumulates over the batches of both workers",
    ),
    Note(
        "REFERENCE: IndexError",
        "the file's embedding of characters has the size of the vocabulary of words, and the "
        "fixtures have more characters than words: `gradient_descent` ends with an IndexError",
    ),
    Note(
        "both: refused: .* is not a metric of the validation",
        "the file's `validation_metric` isn't a metric of its model, and AllenNLP's trainer ends "
        "with an error too",
    ),
    Note(
        "adversarial_bias_mitigator_backward",
        "refused: the callback `adversarial_bias_mitigator_backward`, at stage 3",
    ),
    Note(
        "adafactor",
        "refused: the optimizer `huggingface_adafactor`, at stages 1 to 3",
    ),
    Note(
        r"ddp_accelerator",
        "refused: another `ddp_accelerator`",
    ),
    Note(
        "BIDIRECTIONAL_LM_ARCHIVE_PATH",
        "it begins with an archive of the library's language model, for which there is no stand-in",
    ),
    Note(r"refused: .* is empty", "refused: a parameter without elements, at stage 3"),
    Note(r"refused: .*[\"']multi[\"']", "refused: the optimizer `multi`, at stages 1 to 3"),
    Note(
        r"refused: 'model\.[\w.]*sparse\w*' is true",
        "refused: sparse gradients, at stages 1 to 3",
    ),
    Note(
        r"ERROR: .*pos_tag not in acceptable choices",
        "AllenNLP 2 has no token indexer `pos_tag`, which the file asks for",
    ),
]


# What the training configs may be refused for. An embedding of characters that has the size of the
# vocabulary of words is too small for the fixtures alone, which have more characters than words.
REFUSALS = (
    r"sparse\w*' is true|[\"']multi[\"']|adafactor|ddp_accelerator|'evaluate_on_test'|"
    "adversarial_bias_mitigator_backward|BIDIRECTIONAL_LM_ARCHIVE_PATH|"
    r"token_characters\.embedding' fails in the first forward pass: IndexError"
)


def wrongly_refused(messages: Dict[str, str]) -> List[str]:
    """Returns a training config's messages, by stage, that no known limit explains."""
    return [text for text in messages.values() if text and not re.search(REFUSALS, text)]


def is_equal(verdict: str) -> bool:
    return bool(re.match(r"[\d.]+e", verdict))


def note_of(name: str, key: str, verdict: str) -> Optional[int]:
    text = f"{name} {key}: {verdict}"
    return next((i for i, note in enumerate(NOTES) if re.search(note.cell, text)), None)


def is_explained(name: str, key: str, verdict: str) -> bool:
    return is_equal(verdict) or note_of(name, key, verdict) is not None


def markdown(
    heading: Dict[str, Any],
    results: Dict[str, Dict[str, str]],
    configs: Dict[str, Dict[str, str]],
) -> str:
    used: List[int] = []
    rows = [_row(name, verdicts, used) for name, verdicts in sorted(results.items())]
    cells = [
        (name, key, verdicts.get(key, verdicts.get("reference", "missing")))
        for name, verdicts in results.items()
        for key in COLUMNS
    ]
    same = sum(is_equal(verdict) for _, _, verdict in cells)
    refused = sum(verdict.startswith("refused") for _, _, verdict in cells)
    others = [cell for cell in cells if not is_explained(*cell)]
    archived = [verdicts["archive"] for verdicts in results.values() if "archive" in verdicts]
    usable = sum(not verdict.startswith("FAILS") for verdict in archived)
    intro = (
        f"The {len(results)} experiments of the fixtures of allennlp-models 2.10.1 (`python "
        "-m evidence model_library PATH`), with the trainer's type changed. On both sides the "
        "runner also trains two epochs at most, without `patience` (in 27 files) and without "
        "confidence checks, which look for what stand-ins lack (on in 57), and Adadelta has a rate "
        "of 1 (11 files), since that of the files moves weights by less than they are rounded. "
        "Each number is how far the weights are, after up to two epochs, from those of AllenNLP's "
        "`gradient_descent` in one process, as a part of the update from the first weights on, all "
        "weights taken together; `gradient_descent` accumulates over the "
        "batches that two workers have. What is random in a micro-batch, dropout for example, is "
        "the same on both sides, and the hub's models are small stand-ins with random weights. "
        f"Of {len(cells)} cells {same} are the same within {TOLERANCE:.0e}, {refused} are refused "
        f"by name, and {len(cells) - same - refused - len(others)} have a note; {len(others)} have "
        f"none. Of {len(archived)} archives of stage 3 {usable} are evaluated, predicted with and "
        "loaded by `from_archive`."
    )
    table = report.table(["experiment", *COLUMNS.values()], rows)
    notes = "\n".join(f"{i + 1}. {NOTES[n].text}." for i, n in enumerate(used))
    return report.document(
        "Models of allennlp-models",
        intro,
        table,
        notes,
        f"`allennlp deepspeed check` on the library's {len(configs)} training configs, with the "
        "trainer's type changed and two workers, at stages 0, 2 and 3, refuses:",
        report.table(["training config", "stages", "message"], _refused(configs)),
        report.describe(heading, with_workers=False),
    )


def _refused(configs: Dict[str, Dict[str, str]]) -> List[List[str]]:
    """Returns a row for each training config that is refused at a stage."""
    rows = []
    for name, messages in configs.items():
        stages = [stage for stage, text in messages.items() if text]
        if stages:
            rows.append([name.partition(".json")[0], ", ".join(stages), message_of(messages)])
    return rows


def message_of(messages: Dict[str, str]) -> str:
    """Returns the beginning of the first message that refuses a training config, or `""`."""
    first = next(filter(None, messages.values()), "")
    mark = " (**unexpected**)" if wrongly_refused(messages) else ""
    return re.split(", but |, whose |, which |: add|: write|; write| Warning:", first)[0] + mark


def _row(name: str, verdicts: Dict[str, str], used: List[int]) -> List[str]:
    return [
        name.partition(".json")[0],
        *(
            cell(name, key, verdicts.get(key) or verdicts.get("reference", ""), used)
            for key in COLUMNS
        ),
    ]


def cell(name: str, key: str, verdict: str, used: List[int]) -> str:
    # The last is that of the config as it is.
    number = re.match(r".*?([\d.]+e[-+]\d+)(?!.*[\d.]e[-+]\d)", verdict)
    if verdict.startswith(("refused", "both: refused")):
        text = "refused"
    elif number and not verdict.startswith(("FAILS", "REFERENCE", "ERROR")):
        text = number[1] if float(number[1]) > 0 else "0"
    else:
        text = "can't be trained" if verdict.startswith(("REFERENCE", "ERROR")) else "fails"
    return text if is_equal(verdict) else marked(text, name, key, verdict, used)


def marked(text: str, name: str, key: str, verdict: str, used: List[int]) -> str:
    """Returns the text with the number of the verdict's note, or with the verdict."""
    note = note_of(name, key, verdict)
    if note is None:
        return f"{text} (**{verdict[:80]}**)".replace("|", "/")
    if note not in used:
        used.append(note)
    return f"{text} <sup>{used.index(note) + 1}</sup>"
