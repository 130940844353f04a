"""The table of how far each parameter is off."""

import re
from typing import Any, Dict, List, Tuple

from evidence import report
from evidence.model_library.table import NOTES, cell, is_explained, marked, message_of

# Keys of verdicts: the stage that is asked for, and the one that is trained if it is refused.
EXPERIMENTS = {
    "confidence checks": ("checks",),
    "as its file has it, stage 2": ("file 2", "file 0"),
    "parameters that moved": ("moved",),
    "SGD, stage 2": ("sgd 2", "sgd 0"),
    "SGD, stage 3": ("sgd 3",),
}
CONFIGS = {
    "confidence checks": ("checks",),
    "two epochs, stage 2": ("file 2", "file 0"),
    "two epochs, stage 3": ("file 3",),
}


def is_fine(name: str, verdicts: Dict[str, str]) -> bool:
    return all(_is_plain(*item) or is_explained(name, *item) for item in verdicts.items())


def _is_plain(key: str, verdict: str) -> bool:
    """Whether it needs no note."""
    form = r"\d+ (calls|of \d+, \d+ unmoved)|none"
    return key in ("checks", "moved") and bool(re.fullmatch(form, verdict))


def markdown_by_parameter(data: Dict[str, Any]) -> str:
    used: List[int] = []
    experiments, configs = data.get("experiments", {}), data.get("configs", {})
    checks = data.get("checks", {})
    tables = [
        report.table(
            ["experiment", *EXPERIMENTS],
            [
                [_short(name), *_cells(name, EXPERIMENTS, verdicts, used)]
                for name, verdicts in sorted(experiments.items())
            ],
        ),
        report.table(
            ["training config", "`check` at stages 2 and 3", *CONFIGS],
            [
                [
                    _short(name),
                    message_of(messages) or "valid",
                    *_cells(name, CONFIGS, configs.get(name, {}), used),
                ]
                for name, messages in sorted(checks.items())
            ],
        ),
    ]
    notes = "\n".join(f"{i + 1}. {NOTES[n].text}." for i, n in enumerate(used))
    return report.document(
        "Models of allennlp-models, parameter by parameter",
        *_intro(experiments),
        tables[0],
        _intro_of_configs(checks, configs),
        tables[1],
        notes,
        report.describe(data),
    )


def _intro(results: Dict[str, Dict[str, str]]) -> Tuple[str, ...]:
    counts = [re.findall(r"\d+", verdicts.get("moved", "")) for verdicts in results.values()]
    moved, trainable, unmoved = (sum(int(c[index]) for c in counts if c) for index in range(3))
    return (
        f"The {len(results)} experiments of the fixtures of allennlp-models 2.10.1 (`python "
        "-m evidence model_library_by_parameter PATH`) by two workers, beside `gradient_descent` "
        "with AllenNLP's own `DistributedDataParallel`. The hub's models are small stand-ins with "
        "random weights, and what is random in a micro-batch is the same on both sides. Two "
        "trainings are compared, of up to two epochs:",
        "- *As its file has it*, with its optimizer, rate, schedule and patience, and with "
        "AllenNLP's confidence checks, also where the file turns them off. Their column has the "
        "number of calls of layers that they saw in the first step, if both sides called the same "
        "ones in the same order, and if the checks complain of the same on both sides. The number "
        "after it is how far all weights are off, as a part of the update. The Adadelta of 11 "
        "files moves weights by less than they are rounded, and says little.\n"
        "- *With SGD* at a rate of 0.1 on both sides, without schedule, patience and checks. The "
        "number is that of the worst parameter: how far it is off, as a part of its own update, or "
        "of a millionth of the update of all if its own is less. "
        f"Of {trainable} trainable parameters, {moved} have moved by so many times their rounding "
        "(100 units in the last place) that a gradient wrong by some percent would show, and "
        f"{unmoved} not at all on either side.",
    )


def _intro_of_configs(checks: Dict[str, Any], results: Dict[str, Dict[str, str]]) -> str:
    trained = sum(any(map(_is_number, verdicts.values())) for verdicts in results.values())
    return (
        f"The library's {len(checks)} training configs without images: what refuses them in "
        f"`allennlp deepspeed check` with two workers, and two epochs of {trained} of them, "
        "with confidence checks, beside `gradient_descent` in the same way. Data are the "
        "fixtures', and models as wide as the files have them. Pretrained ones are stand-ins of "
        "two layers with random weights, and the language model samples 10 words for its softmax, "
        "without `use_amp`."
    )


def _is_number(verdict: str) -> bool:
    return bool(re.match(r"(DIFFERS[,:] )?[\d.]+e", verdict))


def _short(name: str) -> str:
    return name.partition(".json")[0]


def _cells(
    name: str, columns: Dict[str, Tuple[str, ...]], verdicts: Dict[str, str], used: List[int]
) -> List[str]:
    return [_cell(name, keys, verdicts, used) for keys in columns.values()]


def _cell(name: str, keys: Tuple[str, ...], verdicts: Dict[str, str], used: List[int]) -> str:
    texts = []
    for key in keys:
        verdict = verdicts.get(key)
        if verdict is None:
            if not texts and "reference" in verdicts:
                return cell(name, key, verdicts["reference"], used)
            continue
        number = re.split(" calls|,", verdict)[0]
        if _is_plain(key, verdict):
            texts.append(number)
        elif key == "checks":
            texts.append(marked(number, name, key, verdict, used))
        else:
            texts.append(cell(name, key, verdict, used))
    return ", stage 0: ".join(texts)
