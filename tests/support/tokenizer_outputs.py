"""
What tokenizers of several kinds give for calls of transformers 4. `KEPT` has the outputs of
transformers 4.43.4: of its fast tokenizers, and of its slow ones for what the fast ones refuse. To
write it, run this file in an environment with that version, sentencepiece and protobuf.
"""

import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import transformers

KEPT = Path(__file__).parents[1] / "fixtures" / "data" / "tokenizer_outputs.json"

_FILES = KEPT.parent / "tokenizers"
_BPE = {"bpe_vocab.json": "vocab.json", "bpe_merges.txt": "merges.txt"}
_SPACE = {"add_prefix_space": True}
# The class, its names of files, and the arguments of each kind.
KINDS: Dict[str, Tuple[str, Dict[str, str], Dict[str, Any]]] = {
    "bert": ("BertTokenizer", {"wordpiece_vocab.txt": "vocab.txt"}, {}),
    "roberta": ("RobertaTokenizer", _BPE, _SPACE),
    "gpt2": ("GPT2Tokenizer", _BPE, {"pad_token": "<pad>", **_SPACE}),
    "t5": ("T5Tokenizer", {"unigram.model": "spiece.model"}, {"extra_ids": 2}),
    "albert": ("AlbertTokenizer", {"unigram.model": "spiece.model"}, {}),
    "xlmr": ("XLMRobertaTokenizer", {"unigram.model": "sentencepiece.bpe.model"}, {}),
    "xlnet": ("XLNetTokenizer", {"unigram.model": "spiece.model"}, {}),
}

TEXT, PAIR = "the quick brown fox", "a lazy dog"
IDS, PAIR_IDS = [7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23]


def outputs(tokenizer: Any) -> Dict[str, Any]:
    """By the call, as JSON. What was refused is left out."""
    found = {}
    for name, call in _calls(tokenizer):
        try:
            output = call()
        except Exception:
            continue
        output = dict(output) if hasattr(output, "keys") else output
        found[name] = json.loads(json.dumps(output, default=str))
    return found


def _calls(tokenizer: Any) -> Iterator[Tuple[str, Callable[[], Any]]]:
    def call(method: str, *args: Any, **kwargs: Any) -> Tuple[str, Callable[[], Any]]:
        return f"{method}{args} {kwargs}", lambda: getattr(tokenizer, method)(*args, **kwargs)

    tokens, pair_tokens = tokenizer.tokenize(TEXT), tokenizer.tokenize(PAIR)
    for ids, pair in itertools.product((IDS, [9]), (None, PAIR_IDS)):
        yield call("build_inputs_with_special_tokens", ids, pair)
        yield call("create_token_type_ids_from_sequences", ids, pair)
        yield call("get_special_tokens_mask", ids, pair)
        yield call("prepare_for_model", ids, pair, return_special_tokens_mask=True)
        for truncation in ("longest_first", "only_first", "only_second"):
            yield call("truncate_sequences", ids, pair, 3, truncation, 1)
            overflows = {"return_overflowing_tokens": truncation != "longest_first", "stride": 2}
            yield call(
                "prepare_for_model", ids, pair, max_length=9, truncation=truncation, **overflows
            )
            former = {"truncation_strategy": truncation, "pad_to_max_length": True}
            yield call("prepare_for_model", ids, pair, max_length=9, **former)
            yield call("encode_plus", TEXT, None if pair is None else PAIR, max_length=18, **former)
        yield call("prepare_for_model", ids, pair, max_length=6, add_special_tokens=False)
    for texts in ((TEXT,), (TEXT, PAIR), (tokens,), (tokens, pair_tokens), (IDS,), (IDS, PAIR_IDS)):
        yield call("encode_plus", *texts)
        yield call("encode_plus", *texts, max_length=30, pad_to_max_length=True)
        yield call("encode", *texts, max_length=12)
        yield call("encode", *texts, add_special_tokens=False)
    words = {"is_split_into_words": True}
    yield call("encode_plus", TEXT.split(), PAIR.split(), **words)
    yield call("encode", TEXT.split(), **words)
    yield call("batch_encode_plus", [TEXT, PAIR], pad_to_max_length=True, max_length=9)
    yield call("batch_encode_plus", [(TEXT, PAIR), ("a", "b")], padding=True)
    yield call("__call__", TEXT, PAIR, pad_to_max_length=True, max_length=9)
    for name in ("_pad_token", "_unk_token", "_cls_token", "_bos_token", "_eos_token"):
        yield name, lambda name=name: str(getattr(tokenizer, name))
    if "▁" in "".join(tokens):
        # transformers 5 counts the control symbols of a SentencePiece file as additional.
        return
    for name in ("additional_special_tokens", "additional_special_tokens_ids"):
        yield name, lambda name=name: getattr(tokenizer, name)
    yield (
        "special_tokens_map_extended",
        lambda: {name: str(value) for name, value in tokenizer.special_tokens_map_extended.items()},
    )


def tokenizer_of(kind: str, suffix: str = "", **changed: Any) -> Any:
    """A tokenizer of the class whose name ends with `suffix`."""
    name, files, arguments = KINDS[kind]
    with tempfile.TemporaryDirectory() as directory:
        for kept, expected in files.items():
            shutil.copy(_FILES / kept, Path(directory, expected))
        cls = getattr(transformers, name + suffix)
        return cls.from_pretrained(directory, **{**arguments, **changed})


def _write() -> None:
    kept: Dict[str, Any] = {}
    for kind in KINDS:
        kept[kind] = {**outputs(tokenizer_of(kind)), **outputs(tokenizer_of(kind, "Fast"))}
    lines: List[str] = []
    for kind, found in kept.items():
        calls = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found)
        lines.append(f"{json.dumps(kind)}: {{\n{calls}\n}}")
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(_write())
