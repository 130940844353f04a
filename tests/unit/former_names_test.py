"""Projects of 2021 import names that transformers has moved or removed since."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import spacy
import torch
import transformers
from allennlp.data import DatasetReader, Instance
from allennlp.data.fields import MetadataField
from allennlp.training.metrics import Average
from transformers import BertConfig, BertForMaskedLM, BertModel, BertPreTrainedModel

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
    ("allennlp.data.dataset", "Batch", "allennlp.data", "Batch"),
    ("allennlp.data.dataloader", "DataLoader", "allennlp.data", "DataLoader"),
    *(
        ("allennlp.data.tokenizers.word_splitter", former, "allennlp.data.tokenizers", name)
        for former, name in (
            ("JustSpacesWordSplitter", "WhitespaceTokenizer"),
            ("LettersDigitsWordSplitter", "LettersDigitsTokenizer"),
        )
    ),
    ("allennlp.data.samplers", "RandomSampler", "torch.utils.data", "RandomSampler"),
    ("numpy", "int", "builtins", "int"),
    ("numpy", "float_", "numpy", "float64"),
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
        "from transformers.data.metrics.squad_metrics import compute_exact",
        "from transformers.data.processors.squad import SquadResult",
        "from transformers import SquadV2Processor",
        "from allennlp.training.trainer import EpochCallback, BatchCallback",
        "from allennlp.data import PyTorchDataLoader",
        "from allennlp.data.dataset_readers.dataset_reader import AllennlpDataset",
        "from allennlp.data.samplers import Sampler",
        "from allennlp.data.iterators import BucketIterator",
        "from allennlp.data.tokenizers.word_splitter import SimpleWordSplitter",
    ],
)
def test_what_is_gone_is_named_with_what_to_write(
    line: str, expect_message: Callable[[str], None]
) -> None:
    with pytest.raises(ImportError) as error:
        exec(line)
    expect_message(str(error.value))


class Ended(BertPreTrainedModel):
    """A model of 2020, which ends its constructor by this method and computes its own masks."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.classifier = torch.nn.Linear(config.hidden_size, 2)
        self.init_weights()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = self.get_extended_attention_mask(attention_mask, input_ids.shape, input_ids.device)
        assert self.get_head_mask(None, 2) == [None, None]
        assert torch.equal(self.invert_attention_mask(attention_mask), mask)
        embedded = self.bert.embeddings(input_ids)
        return self.bert.encoder(embedded, attention_mask=mask)[0]


def small_bert(**settings: Any) -> BertConfig:
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    return BertConfig(num_attention_heads=2, max_position_embeddings=6, **sizes, **settings)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_subclass_has_what_pretrained_models_had(tmp_path: Path, is_decoder: bool) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    mask = (ids > 0).long()
    model = Ended(small_bert()).eval()
    model.config.is_decoder = model.bert.config.is_decoder = False
    expected = model.bert(ids, attention_mask=mask)[0]
    assert torch.allclose(model(ids, mask)[mask > 0], expected[mask > 0], atol=1e-6)
    if is_decoder:
        model.config.is_decoder = True
        causal = model.get_extended_attention_mask(mask, ids.shape)
        assert (causal[0, 0] == 0).equal(torch.ones(4, 4).tril() > 0)
    model.save_pretrained(tmp_path)
    loaded = Ended.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["lm_labels", "masked_lm_labels"])
def test_labels_have_a_former_name(name: str) -> None:
    model, ids = BertForMaskedLM(small_bert()).eval(), torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids, **{name: ids}).loss, model(ids, labels=ids).loss)


def test_words_are_split_as_in_allennlp_0() -> None:
    tokenizers = importlib.import_module("allennlp.data.tokenizers")
    splitters = importlib.import_module("allennlp.data.tokenizers.word_splitter")
    tokenizer = tokenizers.WordTokenizer(
        word_splitter=splitters.JustSpacesWordSplitter(), start_tokens=["<s>"], end_tokens=["</s>"]
    )
    assert isinstance(tokenizer, tokenizers.Tokenizer)
    assert [token.text for token in tokenizer.tokenize("a cat.")] == ["<s>", "a", "cat.", "</s>"]


class Lines(DatasetReader):
    """A reader of AllenNLP 1."""

    def __init__(self, lazy: bool, by_position: bool) -> None:
        super().__init__(lazy) if by_position else super().__init__(lazy=lazy)

    def _read(self, file_path: str) -> Iterator[Instance]:
        yield from (Instance({"number": MetadataField(number)}) for number in range(3))


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_reader_may_be_lazy(
    by_position: bool, lazy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Lines(lazy, by_position)
    assert len(list(reader.read("-"))) == 3 and reader.max_instances is None
    assert reader.lazy == lazy  # type: ignore[attr-defined]
    assert ("max_instances_in_memory" in caplog.text) == lazy


def test_tensors_of_a_metric_are_unwrapped() -> None:
    loss, number = Average().unwrap_to_tensors(torch.ones(1, requires_grad=True), 2)  # type: ignore[attr-defined]
    assert not loss.requires_grad and number == 2


def test_heads_are_pruned_as_in_transformers_4() -> None:
    find = importlib.import_module("transformers.modeling_utils").find_pruneable_heads_and_indices
    assert find is importlib.import_module("transformers.pytorch_utils").__getattr__(
        "find_pruneable_heads_and_indices"
    )
    heads, rows = find([1, 2], 4, 2, set())
    assert heads == {1, 2} and rows.tolist() == [0, 1, 6, 7]
    # Of the two heads that are left, 0 and 3.
    heads, rows = find([2, 3], 2, 2, {1, 2})
    assert heads == {3} and rows.tolist() == [0, 1]


def test_in1d_is_that_of_numpy_1() -> None:
    assert np.in1d([[1, 2], [3, 4]], [2, 3], invert=True).tolist() == [True, False, False, True]


def test_a_model_of_spacy_is_loaded_by_its_shortcut(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="'en_core_web_sm'"):
        spacy.load("en")


def test_words_are_masked_as_a_whole() -> None:
    collator = transformers.DataCollatorForWholeWordMask
    assert issubclass(collator, transformers.DataCollatorForLanguageModeling)
    assert collator.whole_word_mask


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
