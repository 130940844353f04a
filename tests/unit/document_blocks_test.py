"""
The blocks of code in the documents: configs are checked as `allennlp train` does, commands are
parsed as their programs do, and what can't be has the reason above it, as a comment.

`tests/end_to_end/recipes_test.py` and `language_recipes_test.py` run commands of the pages.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp import commands as allennlp_commands
from allennlp.common import Params
from allennlp.training import GradientDescentTrainer

from allennlp_deepspeed.config.declared_keys import NEW_TRAINER_KEYS
from allennlp_deepspeed.launch.config_check import check
from tests.support.command import REPOSITORY
from tests.support.documents import Block, apply_diff, blocks, commands, config_in
from tests.support.experiment import FIXTURES

BLOCKS = [block for block in blocks() if not block.reason]


def each(*languages: str) -> Any:
    return pytest.mark.parametrize(
        "block", [block for block in BLOCKS if block.language in languages], ids=str
    )


# configs

# Where the keys of a part are that doesn't begin at the top.
SECTIONS: Dict[str, List[str]] = {
    "token_embedders": ["model", "text_field_embedder"],
    "seq2seq_encoder": ["model"],
}


def merged(config: Any, changes: Any) -> Any:
    """As a section is read that names only some keys, or another type."""
    if not isinstance(config, dict) or not isinstance(changes, dict):
        return changes
    if changes.get("type", config.get("type")) != config.get("type"):
        return changes
    return {**config, **{key: merged(config.get(key), value) for key, value in changes.items()}}


def base_of(text: str) -> Dict[str, Any]:
    """The recipe of the same kind, for what a part of a config leaves out."""
    if "causal_lm" in text:
        recipe = "finetune_llm"
    else:
        recipe = "verse_retrieval" if "bi_encoder" in text else "verse_classifier"
    path = REPOSITORY / "training_configs" / f"{recipe}.jsonnet"
    config = Params.from_file(path, ext_vars={"MODEL": "a-model"}).as_dict(quiet=True)
    if "transformer_model" in text:
        embedder = {"type": "pretrained_transformer", "model_name": "a-model"}
        config["model"]["text_field_embedder"]["token_embedders"]["tokens"] = embedder
    if "seq2seq_encoder" in text:
        config["model"]["seq2vec_encoder"]["embedding_dim"] = 16
        embedder = config["model"]["text_field_embedder"]["token_embedders"]["tokens"]
        embedder["embedding_dim"] = 16
    return config


def on_this_machine(config: Dict[str, Any]) -> Dict[str, Any]:
    """With CPUs for GPUs, and data that are there."""
    distributed = config.get("distributed") or {}
    if "cuda_devices" in distributed:
        distributed["cuda_devices"] = [-1] * len(distributed["cuda_devices"])
    for key in config:
        if key.endswith("_data_path"):
            config[key] = str(FIXTURES / "data" / "classification_train.jsonl")
    return config


def whole(text: str) -> Dict[str, Any]:
    """A config that has what the block says."""
    config, changes = base_of(text), config_in(text)
    for key, value in changes.items():
        if key in SECTIONS:
            path = SECTIONS[key]
        elif key in TRAINER_KEYS and key not in config:
            path = ["trainer"]
        else:
            path = []
        for section in reversed([*path, key]):
            value = {section: value}
        (top, section), *_ = value.items()
        config[top] = merged(config.get(top), section)
    return on_this_machine(config)


TRAINER_KEYS = {
    *NEW_TRAINER_KEYS,
    *GradientDescentTrainer.__init__.__annotations__,
    "deepspeed_config",
}


@each("jsonnet", "json")
def test_a_config_is_accepted(block: Block) -> None:
    check(Params(whole(block.text)))


@each("diff")
def test_a_config_is_accepted_after_its_change(block: Block) -> None:
    check(Params(whole(apply_diff(block.text))))


# commands


def parse(program: str, words: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the program wouldn't take these arguments."""
    if program == "allennlp":
        parse_allennlp(words, monkeypatch)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert [word for word in words if "=" not in word and word not in targets] == []
    elif program in ("torchrun", "accelerate", "deepspeed", "srun", "mpirun"):
        # What they start. Their own options `tests/end_to_end/launchers_test.py` runs.
        parse_allennlp(words[words.index("allennlp") + 1 :], monkeypatch)
    else:
        known = ("source", "export", "echo", "pre-commit", "pip", "pytest", "python")
        assert program in known, program


def parse_allennlp(words: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["allennlp", *words])
    # Which has been done, and takes seconds.
    monkeypatch.setattr(allennlp_commands, "import_plugins", lambda: None)
    _, arguments = allennlp_commands.parse_args("allennlp")
    path = getattr(arguments, "param_path", None)
    if path is not None and (REPOSITORY / path).is_file():
        check_recipe(arguments)
    elif path is not None:
        assert path == "config.jsonnet", f"there is no {path}"


def check_recipe(arguments: argparse.Namespace) -> None:
    path = REPOSITORY / arguments.param_path
    overrides = getattr(arguments, "overrides", "") or ""
    params = Params.from_file(path, overrides, ext_vars={"MODEL": "a-model", "MINILM": "b"})
    check(Params(on_this_machine(params.as_dict(quiet=True))))


@each("console")
def test_commands_are_taken(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, *words in commands(block.text):
        parse(Path(program).name, words, monkeypatch)
