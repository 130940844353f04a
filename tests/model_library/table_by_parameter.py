"""The table of how far each parameter is off."""

import re
from typing import Any, Dict, List, Tuple

from benchmarks.harness import report
from tests.model_library.table import NOTES, cell, is_explained, marked

# Keys of verdicts: the stage that is asked for, and the one that is trained if it is refused.
EXPERIMENTS = {
    "confidence checks": ("checks",),
    "as its file has it, stage 2": ("file 2", "file 0"),
    "parameters that moved": ("moved",),
    "SGD, stage 2": ("sgd 2", "sgd 0"),
    "SGD, stage 3": ("sgd 3",),
}
CONFIGS = {
    "`check`, stage 2": ("check 2",),
    "`check`, stage 3": ("check 3",),
    "confidence checks": ("checks",),
    "two epochs, stage 2": ("file 2", "file 0"),
    "two epochs, stage 3": ("file 3",),
}


def is_fine(name: str, verdicts: Dict[str, str]) -> bool:
    return all(_is_plain(*item) or is_explained(name, *item) for item in verdicts.items())


def _is_plain(key: str, verdict: str) -> bool:
    """Whether it needs no note."""
    if key in ("checks", "moved"):
        return bool(re.fullmatch(r"\d+ (calls|of \d+, \d+ unmoved)", verdict))
    return key.startswith("check ") and not verdict


def markdown_by_parameter(data: Dict[str, Any]) -> str:
    used: List[int] = []
    experiments, configs = data.get("experiments", {}), data.get("configs", {})
    tables = [
        _table("experiment", EXPERIMENTS, experiments, used),
        _table("training config", CONFIGS, configs, used),
    ]
    notes = "\n".join(f"{i + 1}. {NOTES[n].text}." for i, n in enumerate(used))
    return report.document(
        "Models of allennlp-models, parameter by parameter",
        *_intro(experiments),
        tables[0],
        *_intro_of_configs(configs),
        tables[1],
        notes,
        report.describe(data),
    )


def _intro(results: Dict[str, Dict[str, str]]) -> Tuple[str, ...]:
    counts = [re.findall(r"\d+", verdicts.get("moved", "")) for verdicts in results.values()]
    moved, trainable, unmoved = (sum(int(c[index]) for c in counts if c) for index in range(3))
    return (
        f"The {len(results)} experiments of the fixtures of allennlp-models 2.10.1 (`make "
        "upstream-models-library MODELS=path`) by two workers, beside `gradient_descent` with "
        "AllenNLP's own `DistributedDataParallel`. The hub's models are small stand-ins with "
        "random weights, and what is random in a micro-batch is the same on both sides. Two "
        "trainings are compared, of up to two epochs:",
        "- *As its file has it*, with its optimizer, rate, schedule and patience, and with "
        "AllenNLP's confidence checks, also where the file turns them off. Their column has the "
        "number of calls of layers that they saw in the first step, if both sides called the same "
        "ones in the same order, and if the checks complain of the same on both sides. The number "
        "after it is how far all weights are off, as a part of the update.\n"
        "- *With SGD* at a rate of 0.1 on both sides, without schedule, patience and checks. The "
        "number is that of the worst parameter: how far it is off, as a part of its own update, or "
        "of a millionth of the update of all if its own is less. "
        f"Of {trainable} trainable parameters, {moved} have moved by so many times their rounding "
        "(100 units in the last place) that a gradient wrong by some percent would show, and "
        f"{unmoved} not at all on either side.",
    )


def _intro_of_configs(results: Dict[str, Dict[str, str]]) -> Tuple[str, ...]:
    trained = sum("file 3" in verdicts for verdicts in results.values())
    return (
        f"The library's {len(results)} training configs without images: what `allennlp deepspeed "
        f"check` says with two workers, and two epochs of {trained} of them on the data of the "
        "fixtures, with confidence checks, beside `gradient_descent` in the same way. Models are "
        "as wide as the files have them. Pretrained ones are stand-ins of two layers with random "
        "weights, and the language model samples 10 words for its softmax, without `use_amp`.",
    )


def _table(
    heading: str,
    columns: Dict[str, Tuple[str, ...]],
    results: Dict[str, Dict[str, str]],
    used: List[int],
) -> str:
    rows = [
        [
            name.partition(".json")[0],
            *(_cell(name, keys, verdicts, used) for keys in columns.values()),
        ]
        for name, verdicts in sorted(results.items())
    ]
    return report.table([heading, *columns], rows)


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
            texts.append(number or "valid")
        elif key == "checks":
            texts.append(marked(number, name, key, verdict, used))
        else:
            texts.append(cell(name, key, verdict, used))
    return ", stage 0: ".join(texts)
