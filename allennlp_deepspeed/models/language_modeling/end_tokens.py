"""Finds the tokens that end a response."""

from typing import TYPE_CHECKING, Any, Dict, List, Optional

from transformers import PreTrainedTokenizerBase

from allennlp_deepspeed.models.language_modeling.assistant_spans import PROBE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def end_tokens(tokenizer: PreTrainedTokenizerBase, transformer: "PreTrainedModel") -> List[int]:
    """
    Returns the tokenizer's end-of-sequence token, the end-of-turn tokens of its chat template, and
    the end tokens of the model's generation config that are added tokens. A config without end
    tokens has the default of its class, which may be an ordinary token of the tokenizer.
    """
    named = getattr(transformer.generation_config, "eos_token_id", None)
    others = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id}
    ends = [tokenizer.eos_token_id, *_ends_of_turns(tokenizer)]
    for token in named if isinstance(named, list) else [named]:
        if token in tokenizer.added_tokens_decoder and token not in others:
            ends.append(token)
    return [token for token in dict.fromkeys(ends) if token is not None]


def set_end_tokens(transformer: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the `end_tokens` into a model's config and generation config."""
    ends = end_tokens(tokenizer, transformer)
    transformer.config.get_text_config().eos_token_id = ends[0] if ends else None
    if transformer.generation_config is not None:
        several: Any = ends if len(ends) > 1 else next(iter(ends), None)
        transformer.generation_config.eos_token_id = several


def _ends_of_turns(tokenizer: PreTrainedTokenizerBase) -> List[int]:
    """
    Returns the first token after a message of the assistant if it is an added token. If the chat
    template has none there, returns those with which the next messages begin.
    """
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}
    first = _first_token_after(tokenizer, [question, answer])
    if first is not None:
        return [first]
    following = ({"role": role, "content": "a"} for role in ("user", "tool"))
    ends = [_first_token_after(tokenizer, [question, answer, message]) for message in following]
    return [token for token in ends if token is not None]


def _first_token_after(
    tokenizer: PreTrainedTokenizerBase, messages: List[Dict[str, str]]
) -> Optional[int]:
    """Returns the first visible token after the probe in a conversation if it is an added token."""
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # of any type: there may be no template, or it may refuse these messages
        return None
    _, probe, after = text.rpartition(PROBE)
    tokens = tokenizer(after, add_special_tokens=False)["input_ids"] if probe else []
    visible = (token for token in tokens if str(tokenizer.decode([token])).strip())
    first = next(visible, None)
    return first if first in tokenizer.added_tokens_decoder else None
