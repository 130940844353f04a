"""
Tokenizers of SentencePiece that transformers 4.20 has saved, and what AllenNLP 2.10.1 made of texts
with them, in `FOLDER`. To write it, run this file from the repository, as `python
tests/support/saved_tokenizers.py`, in an environment with torch 1.12.1, transformers 4.20.1,
tokenizers 0.12.1, sentencepiece 0.1.97 and AllenNLP 2.10.1.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

FOLDER = Path(__file__).parents[1] / "fixtures" / "data" / "tokenizers_of_2022"
OUTPUTS = "outputs.json"

# The arguments of SentencePiece's trainer and of the class.
KINDS: Dict[str, Tuple[Dict[str, Any], Dict[str, Any]]] = {
    "T5": ({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, {"extra_ids": 2}),
    "Albert": (
        {
            **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
            **{"control_symbols": ["[CLS]", "[SEP]"], "user_defined_symbols": ["[MASK]"]},
        },
        {},
    ),
    "XLNet": (
        {
            "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>"],
            "user_defined_symbols": ["<eod>", "<eop>"],
        },
        {},
    ),
    "XLMRoberta": ({}, {}),
    "MBart": ({}, {}),
    "DebertaV2": (
        {
            **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "bos_piece": "[CLS]"},
            **{"eos_piece": "[SEP]", "unk_piece": "[UNK]", "pad_piece": "[PAD]"},
        },
        {},
    ),
}

TEXTS = [
    "The quick brown fox, quoted: ``quick''.",
    "A  double  space and trailing   ",
    " leading space and new\nline\tand tab",
    "an ellipsis\u2026 and caf\u00e9 e\u0301 \u00bd",
    "zero\u200bwidth word \u200b alone",
    "before <mask> in [MASK] <sep> [SEP] </s>after",
    "",
]
# A part of the rules of "nmt_nfkc", all of which are 240 kB.
_RULES = {
    **{"\t": " ", "\n": " ", "\u200b": " ", "\u00a0": " ", "\u2026": "...", "\u00bd": "1/2"},
    **{"e\u0301": "\u00e9"},
}


def outputs(directory: Path) -> List[Any]:
    """
    Returns, for each text, its tokens, those of its words, and the indices of its words, and last
    what has been decoded.
    """
    from allennlp.data import Token, Vocabulary
    from allennlp.data.token_indexers import PretrainedTransformerMismatchedIndexer
    from allennlp.data.tokenizers import PretrainedTransformerTokenizer

    def as_lists(tokens: List[Token]) -> List[Any]:
        return [[each.text, each.text_id, each.type_id, each.idx, each.idx_end] for each in tokens]

    tokenizer = PretrainedTransformerTokenizer(str(directory))
    indexer = PretrainedTransformerMismatchedIndexer(str(directory))
    found: List[Any] = []
    for text in TEXTS:
        words = text.split(" ")
        tokens, offsets = tokenizer.intra_word_tokenize(words)
        indices = indexer.tokens_to_indices([Token(word) for word in words], Vocabulary())
        found += [as_lists(tokenizer.tokenize(text)), as_lists(tokens), offsets, indices]
    found.append([tokenizer.tokenizer.decode(tokenizer.tokenizer.encode(text)) for text in TEXTS])
    return json.loads(json.dumps(found))


def save(directory: Path, tokenizer_class: str, *args: Any, **kwargs: Any) -> None:
    """Saves a tokenizer as one of a hub is saved, which has been loaded before."""
    import transformers

    getattr(transformers, tokenizer_class)(*args, **kwargs).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(directory)


def train_sentencepiece(kind: str, folder: Path) -> Path:
    """Trains on the texts, and returns the path of the model."""
    import sentencepiece

    rules, corpus = folder / "rules.tsv", folder / "corpus.txt"
    lines = [
        "\t".join(" ".join(f"{ord(each):X}" for each in side) for side in rule)
        for rule in _RULES.items()
    ]
    rules.write_text("\n".join(lines) + "\n")
    texts = [text.replace("\n", " ") for text in TEXTS if text]
    corpus.write_text("\n".join([*texts * 3, *["a b a b a c"] * 30]))
    sentencepiece.SentencePieceTrainer.train(
        **{"input": str(corpus), "model_prefix": str(folder / kind), "vocab_size": 120},
        **{"hard_vocab_limit": False, "normalization_rule_tsv": str(rules), **KINDS[kind][0]},
    )
    return folder / f"{kind}.model"


def _write() -> None:
    for kind, (_, arguments) in KINDS.items():
        directory = FOLDER / kind
        with tempfile.TemporaryDirectory() as temporary:
            model = train_sentencepiece(kind, Path(temporary))
            save(directory, f"{kind}TokenizerFast", str(model), **arguments)
        for path in directory.glob("*.model"):
            path.unlink()
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config.pop("name_or_path"), config.pop("special_tokens_map_file")
        (directory / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
        (directory / OUTPUTS).write_text(json.dumps(outputs(directory)) + "\n")


if __name__ == "__main__":
    _write()
