"""Tokenizers of transformers 4.20.1, by their classes, which its environment makes of texts."""

import json
import string
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

from tests.support.saved_tokenizers import KINDS as OF_SENTENCEPIECE
from tests.support.saved_tokenizers import TEXTS, save, train_sentencepiece

# Those of SentencePiece: whose model they have, and the arguments of the class.
PIECES: Dict[str, Tuple[str, Dict[str, Any]]] = {
    **{f"{kind}TokenizerFast": (kind, kinds[1]) for kind, kinds in OF_SENTENCEPIECE.items()},
    "BarthezTokenizerFast": ("XLMRoberta", {}),
    "BigBirdTokenizerFast": ("XLMRoberta", {}),
    "CamembertTokenizerFast": ("XLMRoberta", {}),
    "MBart50TokenizerFast": ("MBart", {"src_lang": "en_XX", "tgt_lang": "de_DE"}),
    "PegasusTokenizerFast": ("T5", {"offset": 5, "mask_token_sent": "<mask_1>"}),
    "ReformerTokenizerFast": ("XLMRoberta", {}),
    "RemBertTokenizerFast": ("Albert", {}),
    "XGLMTokenizerFast": ("XLMRoberta", {}),
}
# Those of words in pieces, which BERT began.
WORDPIECES = (
    "BertTokenizerFast",
    "BertTokenizer",
    "ConvBertTokenizerFast",
    "DPRQuestionEncoderTokenizerFast",
    "DistilBertTokenizerFast",
    "ElectraTokenizerFast",
    "FunnelTokenizerFast",
    "LayoutLMTokenizerFast",
    "LxmertTokenizerFast",
    "MPNetTokenizerFast",
    "MobileBertTokenizerFast",
    "SqueezeBertTokenizerFast",
)
# Those of pairs of bytes, which GPT-2 began.
BYTE_PAIRS = (
    "BartTokenizerFast",
    "BlenderbotTokenizerFast",
    "DebertaTokenizerFast",
    "GPT2TokenizerFast",
    "LEDTokenizerFast",
    "LongformerTokenizerFast",
    "RobertaTokenizer",
    "RobertaTokenizerFast",
)
KINDS = (*PIECES, *WORDPIECES, *BYTE_PAIRS)

_LETTERS = sorted({*string.ascii_lowercase, *"".join(TEXTS).lower()} - {" ", "\n", "\t"})
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<cls>", "<sep>")
_WORDS = ("quick", "fox", "before", "##ed", "##ing", "##th")


def save_kind(kind: str, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if kind in PIECES:
            trained, arguments = PIECES[kind]
            save(directory, kind, str(train_sentencepiece(trained, folder)), **arguments)
        elif kind in WORDPIECES:
            pieces = [*_LETTERS, *(f"##{letter}" for letter in _LETTERS), *_WORDS]
            more = ("<s>", "</s>", "<unk>", "<pad>", "<mask>")
            path = folder / "vocab.txt"
            path.write_text("\n".join([*_SPECIAL_TOKENS, *more, *pieces]) + "\n")
            save(directory, kind, str(path))
        else:
            save(directory, kind, *_write_byte_pairs(folder))


def _write_byte_pairs(folder: Path) -> List[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    special_tokens = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
    more = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
    tokens = [*special_tokens, *more, *sorted(ByteLevel.alphabet())]
    merges = []
    for word in (" quick", " fox", "before", "The", " and"):
        ((piece, _),) = ByteLevel(add_prefix_space=False).pre_tokenize_str(word)
        for end in range(1, len(piece)):
            if piece[: end + 1] not in tokens:
                merges.append(f"{piece[:end]} {piece[end]}")
                tokens.append(piece[: end + 1])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return [str(folder / "vocab.json"), str(folder / "merges.txt")]
