"""
Tokenizers of AllenNLP 0.9, with splitters of words that are tokenizers themselves since AllenNLP 1.
For those that have no equal today, the `ImportError` says what to write.
"""

from __future__ import annotations

import functools
from typing import Any, List, Optional

from allennlp.data.tokenizers import (
    LettersDigitsTokenizer,
    SpacyTokenizer,
    Token,
    Tokenizer,
    WhitespaceTokenizer,
)
from typing_extensions import override

WordSplitter = Tokenizer
JustSpacesWordSplitter = WhitespaceTokenizer
LettersDigitsWordSplitter = LettersDigitsTokenizer
SpacyWordSplitter = functools.partial(SpacyTokenizer, pos_tags=False)


class WordTokenizer(Tokenizer):
    """
    Splits words, and adds tokens at the start and the end.

    # Parameters

    word_splitter : `Tokenizer`, optional (default = `SpacyTokenizer(pos_tags=False)`)
    start_tokens : `List[str]`, optional (default = `None`)
    end_tokens : `List[str]`, optional (default = `None`)
    """

    def __init__(
        self,
        word_splitter: Optional[Tokenizer] = None,
        start_tokens: Optional[List[str]] = None,
        end_tokens: Optional[List[str]] = None,
    ) -> None:
        self._word_splitter = word_splitter or SpacyWordSplitter()
        self._start_tokens = [Token(text, 0) for text in start_tokens or []]
        self._end_tokens = [Token(text, -1) for text in end_tokens or []]

    @override
    def tokenize(self, text: str) -> List[Token]:
        return [*self._start_tokens, *self._word_splitter.tokenize(text), *self._end_tokens]


def __getattr__(name: str) -> Any:
    if name in ("BertBasicWordSplitter", "OpenAISplitter", "SimpleWordSplitter"):
        raise ImportError(
            f"AllenNLP no longer has {name}: write SpacyTokenizer, WhitespaceTokenizer or "
            "PretrainedTransformerTokenizer of allennlp.data.tokenizers."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
