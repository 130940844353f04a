"""
Writes `reference.md` from the declarations in `allennlp_deepspeed/config/declared_keys.py` and the
docstrings of language models. `make reference` runs it, and a test compares.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any, Dict, List

from pydantic import TypeAdapter

from allennlp_deepspeed.config.declared_keys import (
    CHECKPOINTER_KEYS,
    DISTRIBUTED_KEYS,
    TRAINER_KEYS,
)
from allennlp_deepspeed.config.key_validation import Key
from allennlp_deepspeed.models.language_modeling import (
    CausalLM,
    CausalLMPredictor,
    CausalLMReader,
    LogCompletionsCallback,
)

PATH = Path(__file__).with_suffix(".md")

_HEAD = """# Reference

Keys that are new, or accept more values than in AllenNLP. Presets, and how AllenNLP's and
DeepSpeed's keys are combined: [configuration](configuration.md).

## `trainer`

Keys of AllenNLP's [trainer](https://docs.allennlp.org/main/api/training/gradient_descent_trainer/)
that aren't listed here keep their meaning. If a key *may change with `--recover`*, a run may resume
with another value. AllenNLP's `distributed`, `trainer.cuda_device`, `trainer.num_epochs` (its own
schedules follow it) and the batch sizes of data loaders may change too. All other keys must stay
the same.
"""

_CHECKPOINTER = """
## `trainer.checkpointer`

The checkpointer's `"type"` is `"deepspeed"` unless set. All values may change with `--recover`.
"""


_DISTRIBUTED = """
## `distributed`

Keys in addition to AllenNLP's `cuda_devices`, `num_nodes`, `primary_address`, `primary_port` and
`ddp_accelerator`. All values may change with `--recover`. What happens, and what is printed, when a
node or worker fails: [several machines](several_machines.md#when-something-goes-wrong).
"""


_LANGUAGE_MODELS = """
## Language models

Keys of the model, the reader and the predictor `"causal_lm"`, and of the callback
`"log_completions"`. Pass the predictor's keys to `allennlp predict` as `--predictor-args`.
"""

# What AllenNLP passes in.
_PASSED_IN = ("vocab", "model", "dataset_reader", "serialization_dir")


def reference() -> str:
    """The text of `reference.md`."""
    return (
        _HEAD
        + "".join(_section(name, key) for name, key in TRAINER_KEYS.items())
        + _CHECKPOINTER
        + "".join(_section(name, key) for name, key in CHECKPOINTER_KEYS.items())
        + _DISTRIBUTED
        + "".join(_section(name, key) for name, key in DISTRIBUTED_KEYS.items() if key.doc)
        + _LANGUAGE_MODELS
        + _documented("model", CausalLM)
        + _documented("dataset_reader", CausalLMReader)
        + _documented("predictor", CausalLMPredictor)
        + _documented("log_completions", LogCompletionsCallback)
    )


def _section(name: str, key: Key) -> str:
    """A heading and a paragraph."""
    facts = [_type(key), f"default `{json.dumps(key.default)}`", *_changes(key)]
    return f"\n### `{name}`\n({'; '.join(facts)}) {key.doc}\n"


def _documented(name: str, registered: type) -> str:
    """A list of the constructor's parameters that a config file has, from its class docstring."""
    section = inspect.getdoc(registered).split("# Parameters")[1].split("# Raises")[0]  # type: ignore
    entries = re.findall(r"^(\w+) : `(.+?)`, (.+)\n((?:    .*\n?)*)", section, re.MULTILINE)
    lines = [
        f"- **`{key}`** (`{type_}`; {_default(default)}) {' '.join(doc.split())}\n"
        for key, type_, default, doc in entries
        if key not in _PASSED_IN
    ]
    return "".join([f"\n### `{name}`\n\n", *lines])


def _default(text: str) -> str:
    found = re.search(r"\(default = (`.+`)\)", text)
    return f"default {found[1]}" if found else "required"


def _type(key: Key) -> str:
    names = _types(TypeAdapter(key.type).json_schema())
    objects = ["string", "object"] if isinstance(key.default, str) else ["object"]
    return " or ".join(names or objects)


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


def _changes(key: Key) -> List[str]:
    if key.may_change is False:
        return []
    if key.may_change is True:
        return ["may change with `--recover`"]
    names = ", ".join(f"`{name}`" for name in key.may_change)
    return [f"with `--recover` only {names} may change"]


if __name__ == "__main__":
    PATH.write_text(reference())
