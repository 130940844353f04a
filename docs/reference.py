"""
Writes `reference.md` from the declarations in `allennlp_deepspeed/config/own_keys.py` and the
docstrings of language models. `make reference` runs it, and a test compares.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List

from pydantic import TypeAdapter

from allennlp_deepspeed.config.keys import Key
from allennlp_deepspeed.config.own_keys import CHECKPOINTER_KEYS, DISTRIBUTED_KEYS, TRAINER_KEYS
from allennlp_deepspeed.language_modeling import CausalLM, CausalLMPredictor, CausalLMReader

Columns = Dict[str, Callable[[str, Key], str]]

PATH = Path(__file__).with_suffix(".md")

_HEAD = """# Keys

Written by `make reference` from `allennlp_deepspeed/config/own_keys.py`, and those of
[language models](#language-models) from the docstrings of their classes. An unknown key of
`trainer`, `checkpointer`, `distributed` or `deepspeed_config` is refused before data are read, with
the nearest known one; one of AllenNLP's other sections when that object is constructed, after the
data are read. [configuration.md](configuration.md) has the presets, and which of DeepSpeed's keys
these fill.

## `trainer`

With `"type": "deepspeed"`. These are new, or mean more than in AllenNLP; every other key of its
[trainer](https://docs.allennlp.org/main/api/training/gradient_descent_trainer/) means the same.
Where it says "yes", or names keys in it, the value may be another with `--recover`; that goes for
`distributed`, `trainer.cuda_device`, `trainer.num_epochs` and the batch size of a data loader, too.
A schedule that is computed from the number of epochs goes on as one of the new number.
"""

_CHECKPOINTER = """
## `trainer.checkpointer`

Its `"type"` is `"deepspeed"`, if nothing else is said. All may be others with `--recover`.
"""


_DISTRIBUTED = """
## `distributed`

With the `deepspeed` trainer. Beside AllenNLP's `cuda_devices`, `num_nodes`, `primary_address`,
`primary_port` and `ddp_accelerator`; any other key is refused. All may be others with `--recover`.
[several_machines.md](several_machines.md) says what each failure prints.
"""


_LANGUAGE_MODELS = """
## Language models

Of the type `"causal_lm"`: the model, the reader, and the predictor, of which `allennlp predict`
takes the keys as `--predictor-args`.
"""

# What AllenNLP passes in.
_PASSED_IN = ("vocab", "model", "dataset_reader")


def reference() -> str:
    """The text of `reference.md`."""
    columns: Columns = {
        "Key": lambda name, key: f"`{name}`",
        "Type": lambda name, key: _type(key.type),
        "Default": lambda name, key: f"`{json.dumps(key.default)}`",
    }
    changes: Columns = {"May change": lambda name, key: _changes(key)}
    meaning: Columns = {"Meaning": lambda name, key: key.doc}
    return (
        _HEAD
        + _table(TRAINER_KEYS, {**columns, **changes, **meaning})
        + _CHECKPOINTER
        + _table(CHECKPOINTER_KEYS, {**columns, **meaning})
        + _DISTRIBUTED
        + _table(DISTRIBUTED_KEYS, {**columns, **meaning})
        + _LANGUAGE_MODELS
        + _documented("model", CausalLM)
        + _documented("dataset_reader", CausalLMReader)
        + _documented("predictor", CausalLMPredictor)
    )


def _documented(name: str, registered: type) -> str:
    """A table of the constructor's parameters that a config file has, from its class docstring."""
    section = inspect.getdoc(registered).split("# Parameters")[1].split("# Raises")[0]  # type: ignore
    entries = re.findall(r"^(\w+) : `(.+?)`, (.+)\n((?:    .*\n?)*)", section, re.MULTILINE)
    rows = [
        [f"`{key}`", f"`{type_}`", *_default(default), " ".join(doc.split())]
        for key, type_, default, doc in entries
        if key not in _PASSED_IN
    ]
    head = [["Key", "Type", "Default", "Meaning"], ["---"] * 4]
    return "\n".join(["", f"### `{name}`", "", *(f"| {' | '.join(r)} |" for r in head + rows), ""])


def _default(text: str) -> List[str]:
    return re.findall(r"\(default = (`.+`)\)", text) or ["required"]


def _table(keys: Dict[str, Key], columns: Columns) -> str:
    rows = [list(columns), ["---"] * len(columns)]
    for name, key in keys.items():
        rows.append([column(name, key) for column in columns.values()])
    return "\n".join(["", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _type(type_: Any) -> str:
    return " or ".join(_types(TypeAdapter(type_).json_schema())) or "object"


def _types(schema: Dict[str, Any]) -> List[str]:
    if "anyOf" in schema:
        return [name for part in schema["anyOf"] for name in _types(part)]
    if "$ref" in schema:
        return ["object"]
    if "enum" in schema or "const" in schema:
        return [f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")])]
    return [_NAMES[schema["type"]]] if "type" in schema else []


_NAMES = {
    "array": "list of strings",
    "boolean": "boolean",
    "integer": "integer",
    "null": "`null`",
    "number": "number",
    "string": "string",
}


def _changes(key: Key) -> str:
    if isinstance(key.may_change, bool):
        return "yes" if key.may_change else "no"
    return ", ".join(f"`{name}`" for name in key.may_change)


if __name__ == "__main__":
    PATH.write_text(reference())
