"""Finds parts of messages that a chat template leaves out of the text."""

import re
from collections import Counter
from typing import Any, Iterator, NamedTuple, Optional

from allennlp_deepspeed.models.language_modeling.assistant_spans import Conversation, Message

# Words, without tags such as <think>, which a template may replace by others.
_WORD = re.compile(r"<[^<>\s]*>|(\w+)")


class DroppedPart(NamedTuple):
    """
    A part of a message that isn't in the rendered text.

    # Parameters

    message_index : `int`
    key : `str`
        The key of the message, such as "content".
    value : `str`
        The value of this key.
    """

    message_index: int
    key: str
    value: str


def find_dropped_part(text: str, conversation: Conversation) -> Optional[DroppedPart]:
    """
    Finds the first of the assistant's messages of which a part isn't in the text: the text has
    fewer occurrences of a word than the messages.

    # Parameters

    text : `str`, required.
        The rendered conversation.
    conversation : `Conversation`, required.
    """
    in_text = _count_words(text)
    for key in ("content", "reasoning_content", "reasoning", "thinking", "tool_calls"):
        responses = [
            DroppedPart(index, key, value)
            for index in conversation.response_indices()
            for value in _values(conversation.messages[index], key)
        ]
        dropped = sum((_count_words(part.value) for part in responses), Counter()) - in_text
        for part in responses:
            if dropped & _count_words(part.value):
                return part
    return None


def _values(message: Message, key: str) -> Iterator[str]:
    """Yields the texts of a message, or the names of the functions that it calls."""
    value: Any = message.get(key)
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict):
            part = part.get("function", part)
        if isinstance(part, dict):
            part = part.get("name" if key == "tool_calls" else "text")
        if isinstance(part, str):
            yield part


def _count_words(text: str) -> Counter:
    return Counter(filter(None, _WORD.findall(text)))
