"""
Tokenizers of SentencePiece that tokenize as the `tokenizer.json` says that was saved with them, and
tokenizers of any kind that decode as they did in transformers 4, by which they were saved.

Works around transformers 5.23.0: its classes of these tokenizers take only the vocabulary from that
file, and have normalizers, pre-tokenizers and added tokens of their own. Several spaces, line
breaks, accents and spaces before special tokens then have other IDs and offsets than in training.
Where its config doesn't say, a tokenizer of any kind leaves spaces around quotes when it decodes.
Gone when a loaded tokenizer has what its file has.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any, Callable, Dict, Optional

logger = logging.getLogger(__name__)

# Arguments of the call that choose the special tokens around a text.
_OF_SPECIAL_TOKENS = {"src_lang", "tgt_lang", "add_bos_token", "add_eos_token"}
_OF_HUB = ("cache_dir", "revision", "subfolder", "token")


def as_saved(get_tokenizer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps AllenNLP's `cached_transformers.get_tokenizer`."""

    @functools.wraps(get_tokenizer)
    def get(model_name: str, **kwargs: Any) -> Any:
        tokenizer = get_tokenizer(model_name, **kwargs)
        # AllenNLP caches it. The slow ones of transformers 4 didn't read the file.
        if "_has_saved_backend" not in vars(tokenizer) and kwargs.get("use_fast", True):
            tokenizer._has_saved_backend = True
            _restore(tokenizer, model_name, kwargs)
        return tokenizer

    return get


def _restore(tokenizer: Any, model_name: str, kwargs: Dict[str, Any]) -> None:
    built = getattr(tokenizer, "_tokenizer", None)
    path = _path(model_name, "tokenizer_config.json", kwargs)
    # The name of its backend is in what transformers 5 saves.
    known = {"backend", "clean_up_tokenization_spaces"}
    is_former = path is not None and not known & {*json.loads(Path(path).read_text()), *kwargs}
    # It ignores that for BPE, with a warning.
    if is_former and type(getattr(built, "model", None)).__name__ != "BPE":
        tokenizer.clean_up_tokenization_spaces = True
    path = _path(model_name, "tokenizer.json", kwargs)
    if path is None or built is None:
        return
    saved = type(built).from_file(path)
    parts, parts_of_built = json.loads(saved.to_str()), json.loads(built.to_str())
    if not _is_of_sentencepiece(parts):
        return
    names = {token["content"] for token in parts["added_tokens"]}
    # The call or the class may add others.
    for _, token in sorted(built.get_added_tokens_decoder().items()):
        if token.content not in names:
            (saved.add_special_tokens if token.special else saved.add_tokens)([token])
    if _OF_SPECIAL_TOKENS & kwargs.keys():
        saved.post_processor = built.post_processor
    if "add_prefix_space" in kwargs:
        saved.pre_tokenizer, saved.decoder = built.pre_tokenizer, built.decoder
    parts = json.loads(saved.to_str())
    differing = [name for name, part in parts.items() if part != parts_of_built[name]]
    if differing:
        tokenizer._tokenizer = saved
        logger.info(
            "%s tokenizes as its tokenizer.json says: transformers had made another %s",
            model_name,
            ", ".join(name.rstrip("s").replace("_", " ") for name in differing),
        )


def _path(model_name: str, file: str, kwargs: Dict[str, Any]) -> Optional[str]:
    from transformers.utils import cached_file

    path: Optional[str] = cached_file(
        model_name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **{name: kwargs[name] for name in _OF_HUB if name in kwargs},
    )
    return path


def _is_of_sentencepiece(parts: Dict[str, Any]) -> bool:
    """Returns whether a normalizer or pre-tokenizer is one of those that only they have."""
    text = json.dumps([parts["pre_tokenizer"], parts["normalizer"]])
    return '"Metaspace"' in text or '"Precompiled"' in text
