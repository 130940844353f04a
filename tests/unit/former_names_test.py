"""Projects of 2021 import names that transformers has moved or removed since."""

import importlib
import subprocess
import sys
from typing import Callable

import allennlp.data  # noqa: F401
import pytest
import torch
import transformers

from tests.support.command import REPOSITORY

MOVED = [
    (
        "allennlp.training.trainer",
        "GradientDescentTrainer",
        "allennlp.training",
        "GradientDescentTrainer",
    ),
    ("allennlp.data.tokenizers.token", "Token", "allennlp.data", "Token"),
    (
        "allennlp.common.util",
        "import_submodules",
        "allennlp.common.util",
        "import_module_and_submodules",
    ),
    ("transformers", "MT5Tokenizer", "transformers", "T5Tokenizer"),
    ("transformers.modeling_bert", "BertModel", "transformers", "BertModel"),
    ("transformers.modeling_roberta", "RobertaModel", "transformers", "RobertaModel"),
    ("transformers.tokenization_bert", "BertTokenizer", "transformers", "BertTokenizer"),
    ("transformers.configuration_auto", "AutoConfig", "transformers", "AutoConfig"),
    (
        "transformers.models.roberta.tokenization_roberta_fast",
        "RobertaTokenizerFast",
        "transformers",
        "RobertaTokenizerFast",
    ),
    ("transformers.generation_utils", "GenerationMixin", "transformers", "GenerationMixin"),
    (
        "transformers.generation_logits_process",
        "LogitsProcessorList",
        "transformers",
        "LogitsProcessorList",
    ),
    (
        "transformers.modeling_utils",
        "prune_linear_layer",
        "transformers.pytorch_utils",
        "prune_linear_layer",
    ),
    ("transformers.modeling_utils", "Conv1D", "transformers", "Conv1D"),
    *(
        ("transformers.tokenization_utils", name, "transformers.tokenization_python", name)
        for name in ("_is_control", "_is_punctuation", "_is_whitespace", "BatchEncoding")
    ),
]


@pytest.mark.parametrize("module, name, module_of_today, name_of_today", MOVED)
def test_what_has_moved_is_found_where_it_was(
    module: str, name: str, module_of_today: str, name_of_today: str
) -> None:
    found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(module_of_today), name_of_today)


def test_former_classes_of_models() -> None:
    bert = importlib.import_module("transformers.modeling_bert")
    assert bert.BertLayerNorm is torch.nn.LayerNorm
    # transformers replaces its own module when a model is imported.
    optimizer = sys.modules["transformers"].AdamW
    assert optimizer([torch.nn.Parameter(torch.ones(1))], correct_bias=False)


@pytest.mark.parametrize(
    "line",
    [
        "from transformers import glue_compute_metrics",
        "from transformers import AutoModelWithLMHead",
        "from transformers.file_utils import cached_path",
        "from transformers.modeling_utils import SequenceSummary",
        "from transformers.modeling_utils import find_pruneable_heads_and_indices",
    ],
)
def test_what_is_gone_is_named_with_what_to_write(
    line: str, expect_message: Callable[[str], None]
) -> None:
    with pytest.raises(ImportError) as error:
        exec(line)
    expect_message(str(error.value))


def test_what_never_was_there_is_not() -> None:
    assert not hasattr(transformers, "nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformers.modeling_nothing")


def test_programs_without_allennlp_have_the_names_of_today() -> None:
    code = """
import allennlp_deepspeed_import_hook
try:
    import transformers.modeling_bert
except ModuleNotFoundError:
    print("not there")
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    ).stdout
    assert shown.split() == ["not", "there"]
