"""
Methods and attributes that tokenizers had in transformers 4, with the values that they had there.

transformers 5 has one class where version 4 had a slow and a fast tokenizer. What only the slow one
took, such as lists of tokens or of token IDs, is read as the slow one did.

Works around AllenNLP 2.10.1: it is written for tokenizers of transformers 4, and so are projects of
its time. transformers 5 refuses `add_special_tokens` when a tokenizer is loaded, has removed
methods and attributes, and ignores `pad_to_max_length` without a word. Gone when tokenizers have
them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import transformers
from transformers.tokenization_utils_base import BatchEncoding, TruncationStrategy

# Those that no longer return type IDs unless they are asked to.
_WITH_TYPE_IDS = {
    f"{name}Tokenizer"
    for name in (
        *("Albert", "BertJapanese", "Bertweet", "CTRL", "Cpm", "Flaubert", "Funnel", "Herbert"),
        *("Phobert", "RemBert", "RoCBert", "RoFormer", "Splinter", "XLM", "XLNet"),
    )
}

# A text, its tokens, or their IDs.
Input = Union[str, Sequence[str], Sequence[int]]


def restore() -> None:
    """Gives all tokenizers their former methods, attributes and arguments."""
    base: Any = transformers.PreTrainedTokenizerBase
    if hasattr(base, "_pad_token"):
        return
    for method in (
        encode,
        encode_plus,
        batch_encode_plus,
        build_inputs_with_special_tokens,
        create_token_type_ids_from_sequences,
    ):
        setattr(base, method.__name__, method)
    # Those written in Python have methods of these names, which truncate differently.
    for cls in (base, transformers.PythonBackend):
        cls.prepare_for_model = prepare_for_model  # type: ignore[method-assign]
        cls.truncate_sequences = truncate_sequences  # type: ignore[method-assign]
    base.__init__ = _with_former_settings(base.__init__)
    base.get_special_tokens_mask = _of_any_sequence(base.get_special_tokens_mask)
    base.__call__ = _with_former_arguments(base.__call__)
    for name in base.SPECIAL_TOKENS_ATTRIBUTES:
        setattr(base, f"_{name}", _hidden_token(name))
    base.additional_special_tokens = property(_additional_tokens, _set_additional_tokens)
    base.additional_special_tokens_ids = property(
        lambda self: self.convert_tokens_to_ids(self.additional_special_tokens)
    )
    base.max_len = property(lambda self: self.model_max_length)
    base.special_tokens_map_extended = property(_special_tokens_map_extended)
    base.ids_to_tokens = property(_ids_to_tokens)


def encode_plus(
    self: Any,
    text: Input,
    text_pair: Optional[Input] = None,
    add_special_tokens: bool = True,
    padding: Any = False,
    truncation: Any = None,
    max_length: Optional[int] = None,
    stride: int = 0,
    is_split_into_words: bool = False,
    **kwargs: Any,
) -> BatchEncoding:
    """
    Encodes one text, or a pair of texts. A list has the tokens of a text or their IDs, or its words
    with `is_split_into_words`.
    """
    kwargs.update(
        add_special_tokens=add_special_tokens,
        padding=padding,
        truncation=truncation,
        max_length=max_length,
        stride=stride,
    )
    are_texts = all(isinstance(each, (str, type(None))) for each in (text, text_pair))
    if are_texts or is_split_into_words:
        return self(text, text_pair, is_split_into_words=is_split_into_words, **kwargs)
    if kwargs.pop("return_offsets_mapping", False):
        raise NotImplementedError(
            "Tokens have no offsets in a text: call the tokenizer with the text, or with words and "
            "is_split_into_words=True."
        )
    pair_ids = None if text_pair is None else _token_ids(self, text_pair)
    ids = _token_ids(self, text)
    return self.prepare_for_model(ids, pair_ids, prepend_batch_axis=True, **kwargs)


def _token_ids(tokenizer: Any, text: Input) -> List[int]:
    if isinstance(text, str):
        return tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))
    if isinstance(text, (list, tuple)) and text:
        if isinstance(text[0], str):
            return tokenizer.convert_tokens_to_ids(list(text))
        if isinstance(text[0], int):
            return list(text)
    raise ValueError(
        f"{text!r} isn't a text, a list of tokens or a list of token IDs: call the tokenizer with "
        "several texts."
    )


def batch_encode_plus(
    self: Any,
    batch_text_or_text_pairs: List[Any],
    add_special_tokens: bool = True,
    padding: Any = False,
    truncation: Any = None,
    max_length: Optional[int] = None,
    **kwargs: Any,
) -> BatchEncoding:
    """Encodes several texts or pairs of texts."""
    return self(
        batch_text_or_text_pairs,
        add_special_tokens=add_special_tokens,
        padding=padding,
        truncation=truncation,
        max_length=max_length,
        **kwargs,
    )


def encode(self: Any, text: Input, *args: Any, **kwargs: Any) -> Any:
    """Returns the token IDs of `encode_plus`."""
    return encode_plus(self, text, *args, **kwargs)["input_ids"]


def prepare_for_model(
    self: Any,
    ids: List[int],
    pair_ids: Optional[List[int]] = None,
    add_special_tokens: bool = True,
    padding: Any = False,
    truncation: Any = None,
    max_length: Optional[int] = None,
    stride: int = 0,
    pad_to_multiple_of: Optional[int] = None,
    return_tensors: Any = None,
    return_token_type_ids: Optional[bool] = None,
    return_attention_mask: Optional[bool] = None,
    return_overflowing_tokens: bool = False,
    return_special_tokens_mask: bool = False,
    return_length: bool = False,
    verbose: bool = True,
    prepend_batch_axis: bool = False,
    padding_side: Optional[str] = None,
    truncation_strategy: Any = None,
    pad_to_max_length: Optional[bool] = None,
    **kwargs: Any,
) -> BatchEncoding:
    """Truncates the IDs of one or two texts, adds special tokens, and pads."""
    padding, truncation, max_length, _ = self._get_padding_truncation_strategies(
        pad_to_multiple_of=pad_to_multiple_of,
        verbose=verbose,
        **_strategies(padding, truncation, max_length, truncation_strategy, pad_to_max_length),
    )
    if return_token_type_ids and not add_special_tokens:
        raise ValueError("return_token_type_ids=True needs add_special_tokens=True.")
    longest_first = TruncationStrategy.LONGEST_FIRST
    if return_overflowing_tokens and truncation == longest_first and pair_ids is not None:
        raise ValueError(
            "Overflowing tokens of a pair need truncation='only_first' or 'only_second'."
        )
    num_special = self.num_special_tokens_to_add(pair=pair_ids is not None)
    length = len(ids) + len(pair_ids or ()) + (num_special if add_special_tokens else 0)
    overflowing: List[int] = []
    if truncation != TruncationStrategy.DO_NOT_TRUNCATE and max_length and length > max_length:
        ids, pair_ids, overflowing = self.truncate_sequences(
            ids, pair_ids, length - max_length, truncation, stride
        )
    encoded: Dict[str, Any] = {}
    if return_overflowing_tokens:
        encoded["overflowing_tokens"] = overflowing
        encoded["num_truncated_tokens"] = length - max_length  # type: ignore[operator]
    if add_special_tokens:
        encoded["input_ids"] = self.build_inputs_with_special_tokens(ids, pair_ids)
        type_ids = self.create_token_type_ids_from_sequences(ids, pair_ids)
    else:
        encoded["input_ids"] = ids if pair_ids is None else ids + pair_ids
        type_ids = [0] * len(encoded["input_ids"])
    if _is_wanted(self, "token_type_ids", return_token_type_ids):
        encoded["token_type_ids"] = type_ids
    if return_special_tokens_mask:
        encoded["special_tokens_mask"] = (
            self.get_special_tokens_mask(ids, pair_ids)
            if add_special_tokens
            else [0] * len(encoded["input_ids"])
        )
    self._eventual_warn_about_too_long_sequence(encoded["input_ids"], max_length, verbose)
    padded: Any = self.pad(
        encoded,
        padding=padding.value,
        max_length=max_length,
        pad_to_multiple_of=pad_to_multiple_of,
        padding_side=padding_side,
        return_attention_mask=_is_wanted(self, "attention_mask", return_attention_mask),
    )
    if return_length:
        padded["length"] = len(padded["input_ids"])
    return BatchEncoding(
        dict(padded), tensor_type=return_tensors, prepend_batch_axis=prepend_batch_axis
    )


def _is_wanted(tokenizer: Any, name: str, argument: Optional[bool]) -> bool:
    return name in tokenizer.model_input_names if argument is None else argument


def truncate_sequences(
    self: Any,
    ids: List[int],
    pair_ids: Optional[List[int]] = None,
    num_tokens_to_remove: int = 0,
    truncation_strategy: Union[str, TruncationStrategy] = "longest_first",
    stride: int = 0,
) -> Tuple[List[int], Optional[List[int]], List[int]]:
    """
    Truncates one of two sequences, or both.

    # Returns

    `Tuple[List[int], Optional[List[int]], List[int]]`
        Both, and the removed tokens with `stride` others, where only one sequence is truncated. A
        sequence that is too short for it is left as it is.
    """
    strategy = TruncationStrategy(truncation_strategy)
    if num_tokens_to_remove <= 0:
        return ids, pair_ids, []
    is_longest_first = strategy == TruncationStrategy.LONGEST_FIRST
    if strategy == TruncationStrategy.ONLY_FIRST or (is_longest_first and pair_ids is None):
        ids, overflowing = _truncate(self, ids, num_tokens_to_remove, stride)
        return ids, pair_ids, overflowing
    if strategy == TruncationStrategy.ONLY_SECOND and pair_ids is not None:
        pair_ids, overflowing = _truncate(self, pair_ids, num_tokens_to_remove, stride)
        return ids, pair_ids, overflowing
    if is_longest_first and pair_ids is not None:
        from_longer = min(abs(len(ids) - len(pair_ids)), num_tokens_to_remove)
        half = (num_tokens_to_remove - from_longer) // 2
        from_first = half + (from_longer if len(ids) > len(pair_ids) else 0)
        return (
            _without(self, ids, from_first),
            _without(self, pair_ids, num_tokens_to_remove - from_first),
            [],
        )
    return ids, pair_ids, []


def _truncate(
    tokenizer: Any, ids: List[int], count: int, stride: int
) -> Tuple[List[int], List[int]]:
    if len(ids) <= count:
        return ids, []
    window = min(len(ids), stride + count)
    overflowing = ids[:window] if tokenizer.truncation_side == "left" else ids[-window:]
    return _without(tokenizer, ids, count), overflowing


def _without(tokenizer: Any, ids: List[int], count: int) -> List[int]:
    if tokenizer.truncation_side == "left" or count <= 0:
        return ids[count:]
    return ids[:-count]


def build_inputs_with_special_tokens(
    self: Any, token_ids_0: List[int], token_ids_1: Optional[List[int]] = None
) -> List[int]:
    """
    Adds the special tokens that a tokenizer puts around any text, or around and between any two.

    # Parameters

    token_ids_0 : `List[int]`, required.
    token_ids_1 : `List[int]`, optional (default = `None`)

    # Returns

    `List[int]`
        The tokens of both, with special tokens.

    # Raises

    `ValueError`
        If the tokenizer has no tokens for the example texts.
    """
    return [each for part in _parts(self, token_ids_0, token_ids_1) for each in part.ids]


def create_token_type_ids_from_sequences(
    self: Any, token_ids_0: List[int], token_ids_1: Optional[List[int]] = None
) -> List[int]:
    """Returns the type IDs of `build_inputs_with_special_tokens`."""
    return [part.type_id for part in _parts(self, token_ids_0, token_ids_1) for _ in part.ids]


class _Part(NamedTuple):
    """A special token, or one of the sequences."""

    ids: List[int]
    is_special: bool
    type_id: int


def _parts(tokenizer: Any, ids: List[int], pair_ids: Optional[List[int]]) -> List[_Part]:
    sequences = {0: ids} if pair_ids is None else {0: ids, 1: pair_ids}
    example = tokenizer(*["a", "b"][: len(sequences)], return_token_type_ids=True)
    parts = []
    for token, type_id, which in zip(
        example["input_ids"], example["token_type_ids"], example.sequence_ids(0)
    ):
        if which is None:
            parts.append(_Part([token], True, type_id))
        elif which in sequences:
            parts.append(_Part(sequences.pop(which), False, type_id))
    if sequences:
        raise ValueError(f"{type(tokenizer).__name__} has no tokens for 'a' or 'b'.")
    return parts


def _of_any_sequence(get_special_tokens_mask: Callable[..., List[int]]) -> Callable[..., List[int]]:
    @functools.wraps(get_special_tokens_mask)
    def get_mask(
        self: Any,
        token_ids_0: List[int],
        token_ids_1: Optional[List[int]] = None,
        already_has_special_tokens: bool = False,
    ) -> List[int]:
        if already_has_special_tokens:
            return get_special_tokens_mask(self, token_ids_0, token_ids_1, True)
        parts = _parts(self, token_ids_0, token_ids_1)
        return [int(part.is_special) for part in parts for _ in part.ids]

    return get_mask


def _with_former_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & {"truncation_strategy", "pad_to_max_length"}:
            kwargs.update(_strategies(**{name: kwargs.pop(name, None) for name in _STRATEGIES}))
        if kwargs.get("is_split_into_words"):
            _refuse_glued_words(self)
        return call(self, *args, **kwargs)

    return __call__


_STRATEGIES = ("padding", "truncation", "max_length", "truncation_strategy", "pad_to_max_length")


def _strategies(
    padding: Any,
    truncation: Any,
    max_length: Optional[int],
    truncation_strategy: Any,
    pad_to_max_length: Optional[bool],
) -> Dict[str, Any]:
    """Returns today's arguments."""
    if truncation is None:
        truncation = truncation_strategy
        if max_length is not None and not padding:
            truncation = "longest_first"
    if not padding:
        padding = pad_to_max_length and ("longest" if max_length is None else "max_length")
    return {"padding": padding or False, "truncation": truncation, "max_length": max_length}


def _refuse_glued_words(tokenizer: Any) -> None:
    if getattr(tokenizer, "add_prefix_space", True) or "ByteLevel" not in str(
        getattr(tokenizer.backend_tokenizer, "pre_tokenizer", None)
    ):
        return
    raise ValueError(
        f"{type(tokenizer).__name__} would join the words: load it with add_prefix_space=True."
    )


def _with_former_settings(construct: Callable[..., None]) -> Callable[..., None]:
    """
    Ignores `add_special_tokens`, as before, because it is an argument of each call. Now it is
    refused, even if it is in the file that a former version saved.
    """

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, add_special_tokens: Any = None, **kwargs: Any) -> None:
        if any(cls.__name__ in _WITH_TYPE_IDS for cls in type(self).__mro__):
            kwargs.setdefault("model_input_names", [*self.model_input_names, "token_type_ids"])
        # XLNet's is set before, and was lost.
        pad_token_type_id = vars(self).get("_pad_token_type_id", 0)
        construct(self, *args, **kwargs)
        self._pad_token_type_id = pad_token_type_id

    return __init__


def _hidden_token(name: str) -> property:
    def get(self: Any) -> Optional[str]:
        # Not an `AddedToken`, which some were: AllenNLP looks for it in a vocabulary.
        token = vars(self).get("_special_tokens_map", {}).get(name)
        return None if token is None else str(token)

    def set(self: Any, value: Any) -> None:
        self._special_tokens_map[name] = value

    return property(get, set)


def _additional_tokens(self: Any) -> List[str]:
    return [str(token) for token in _additional_tokens_extended(self)]


def _set_additional_tokens(self: Any, tokens: List[Any]) -> None:
    self.extra_special_tokens = tokens


def _additional_tokens_extended(tokenizer: Any) -> List[Any]:
    """Those that have no name, which those of a file that a former version saved may have."""
    named = set(tokenizer.special_tokens_map.values())
    return [token for token in tokenizer._extra_special_tokens if str(token) not in named]


def _special_tokens_map_extended(self: Any) -> Dict[str, Any]:
    tokens = {name: self._special_tokens_map[name] for name in self.SPECIAL_TOKENS_ATTRIBUTES}
    tokens["additional_special_tokens"] = _additional_tokens_extended(self)
    return {name: token for name, token in tokens.items() if token}


def _ids_to_tokens(self: Any) -> Dict[int, str]:
    tokens = self.backend_tokenizer.get_vocab(with_added_tokens=False)
    return {index: token for token, index in sorted(tokens.items(), key=lambda item: item[1])}
