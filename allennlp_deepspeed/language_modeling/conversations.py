"""
Tokenizes texts, responses and conversations, and finds the tokens of responses.
"""

import json
import logging
import os
import re
from itertools import takewhile
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from allennlp.common.checks import ConfigurationError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from allennlp_deepspeed.language_modeling.chunked_cross_entropy import IGNORED
from allennlp_deepspeed.language_modeling.packing import Example

logger = logging.getLogger(__name__)

Message = Dict[str, Any]

# The indices of the first character of a part of a text and of the one after its last.
Span = Tuple[int, int]

PROBE = "\ufffc"
"""A character that occurs in no message."""

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """
    Messages of a conversation, and arguments of the chat template.

    # Parameters

    messages : `List[Dict[str, Any]]`
    template_kwargs : `Dict[str, Any]`, optional (default = `{}`)
        Arguments of the chat template, such as `tools`.
    prompt_length : `int`, optional (default = `0`)
        The number of messages that belong to the prompt. None of them is a response.
    """

    messages: List[Message]
    template_kwargs: Dict[str, Any] = {}
    prompt_length: int = 0

    def truncate(self, length: int) -> "Conversation":
        """Returns the conversation of the first `length` messages."""
        return self._replace(messages=self.messages[:length])

    def with_content(self, index: int, content: str) -> "Conversation":
        """Returns the conversation with another content of one message."""
        messages = list(self.messages)
        messages[index] = {**messages[index], "content": content}
        return self._replace(messages=messages)


def to_template_kwargs(
    tools: Union[str, List[Any], None] = None,
    chat_template_kwargs: Optional[Dict[str, Any]] = None,
) -> Dict[str, Any]:
    """
    Returns the arguments of a chat template.

    # Parameters

    tools : `Union[str, List[Dict[str, Any]]]`, optional (default = `None`)
        JSON schemas, or the JSON of a list of them.
    chat_template_kwargs : `Dict[str, Any]`, optional (default = `None`)

    # Raises

    `ConfigurationError`
        If the tools aren't valid JSON.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"Expected 'tools' to be a list in JSON: {error}.") from error
    return {**({} if tools is None else {"tools": tools}), **(chat_template_kwargs or {})}


class ExampleTokenizer:
    """
    Tokenizes examples and labels their tokens.

    # Parameters

    tokenizer : `PreTrainedTokenizerBase`, required.
    only_responses : `bool`, required.
        Whether only responses have a loss.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, only_responses: bool) -> None:
        self._tokenizer = tokenizer
        self._only_responses = only_responses
        self._adds_end = _adds_end(tokenizer)
        self._has_warned = False

    def tokenize_text(self, text: str) -> Example:
        """Tokenizes a text and the end-of-sequence token."""
        tokens, _ = self._encode(self._with_end_token(text))
        return self._example(tokens, [not self._only_responses] * len(tokens))

    def tokenize_response(self, prompt: str, response: str) -> Example:
        """
        Tokenizes a prompt and its response as one text. A token that has characters of both is a
        token of the response.
        """
        text = prompt + self._with_end_token(response)
        tokens, spans = self._encode(text)
        if self._tokenizer.is_fast:
            return self._example(tokens, _overlaps(spans, [(len(prompt), len(text))]))
        pairs = zip(tokens, self.tokenize_prompt(prompt))
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return self._example(tokens, [i >= num_shared for i in range(len(tokens))])

    def tokenize_conversation(self, conversation: Conversation) -> Example:
        """
        Tokenizes a conversation formatted by the tokenizer's chat template. Responses are the text
        between the template's `{% generation %}` marks. In a template without marks they are the
        messages whose role is "assistant", with their ending in the template.

        # Raises

        `ConfigurationError`
            If the tokenizer has no chat template, if the template refuses these messages, or if the
            responses can't be found in the rendered text.
        """
        text = self.render(conversation)
        tokens, spans = self._encode(text, add_special_tokens=False)
        if not self._only_responses:
            return self._example(tokens, [True] * len(tokens))
        if not self._tokenizer.is_fast:
            raise ConfigurationError(
                f"The tokenizer '{self._tokenizer.name_or_path}' has no character offsets, so "
                "responses can't be located: use 'prompt' and 'response', or write \"loss_on\": "
                '"all".'
            )
        return self._example(tokens, _overlaps(spans, self._find_responses(text, conversation)))

    def tokenize_prompt(self, prompt: str) -> List[int]:
        """Tokenizes a prompt for which a response is to be generated."""
        return self._encode(prompt)[0]

    def tokenize_messages(self, conversation: Conversation) -> List[int]:
        """Tokenizes a conversation for which a response is to be generated."""
        text = self.render(conversation, add_generation_prompt=True)
        return self._encode(text, add_special_tokens=False)[0]

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Applies the chat template."""
        messages, kwargs, _ = conversation
        if self._tokenizer.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer '{self._tokenizer.name_or_path}' has no chat template for "
                "'messages': use the tokenizer of a chat model, or 'prompt' and 'response'."
            )
        try:
            return self._tokenizer.apply_chat_template(  # type: ignore[return-value]
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # of any kind that a template raises
            raise ConfigurationError(
                f"The tokenizer's chat template refuses the messages {messages!r}: {error}"
            ) from error

    def _find_responses(self, text: str, conversation: Conversation) -> List[Span]:
        """Finds the responses in a rendered conversation."""
        messages, kwargs, prompt_length = conversation
        template = self._tokenizer.get_chat_template(None, kwargs.get("tools"))
        if not _GENERATION_MARK.search(template):
            return [
                self._find_response(text, conversation, i)
                for i, message in enumerate(messages)
                if i >= prompt_length and message.get("role") == "assistant"
            ]
        # `apply_chat_template` leaves null keys out, and doesn't return spans.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        rendered: Any = render_jinja_template(
            conversations=[given],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **kwargs},
        )
        _, (marked,) = rendered
        prompt = self.render(conversation.truncate(prompt_length)) if prompt_length else ""
        return [
            (start, end) for start, end in marked if start >= _common_prefix_length(prompt, text)
        ]

    def _find_response(self, text: str, conversation: Conversation, index: int) -> Span:
        """Finds the message with this index in a rendered conversation."""
        if index == 0:
            raise ConfigurationError(
                "The conversation begins with a message of the assistant: begin with a message "
                'whose \'role\' is "user" or "system", or write "loss_on": "all".'
            )
        prompt = self.render(conversation.truncate(index), add_generation_prompt=True)
        until = self.render(conversation.truncate(index + 1))
        if text.startswith(until) and until.startswith(prompt):
            return len(prompt), len(until)
        return self._find_response_by_content(text, conversation, index, prompt, until)

    def _find_response_by_content(
        self, text: str, conversation: Conversation, index: int, prompt: str, until: str
    ) -> Span:
        """
        Finds the response if the template leaves out parts of earlier messages, such as their
        thinking, or adds a generation prompt that isn't in the text.
        """
        content = conversation.messages[index].get("content") or ""
        history = self.render(conversation.truncate(index))
        if isinstance(content, str) and text.startswith(history):
            probed = conversation.with_content(index, content + PROBE)
            probed_text = self.render(probed)
            end = _common_prefix_length(text, probed_text)
            ending = until[_common_prefix_length(until, self.render(probed.truncate(index + 1))) :]
            if probed_text != text and text.startswith(ending, end):
                start = _common_prefix_length(text, prompt)
                if start < len(prompt):
                    probed = conversation.with_content(index, PROBE + content)
                    start = min(start, _common_prefix_length(text, self.render(probed)))
                    self._warn_of_prompt(prompt[start:])
                return start, end + len(ending)
        raise ConfigurationError(
            "The tokenizer's chat template renders messages differently when others follow, so "
            "responses can't be located. Write each response in its own line, as the last "
            'message, or write "loss_on": "all".'
        )

    def _warn_of_prompt(self, beginning: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The tokenizer's chat template starts generation with %r, but some responses "
                "don't begin with it, and are trained without it: add what belongs there, such as "
                "thinking.",
                beginning,
            )

    def _encode(self, text: str, add_special_tokens: bool = True) -> Tuple[List[int], List[Span]]:
        """
        Returns tokens without the end-of-sequence token that the tokenizer may add, and their spans
        in the text if the tokenizer is a fast one.
        """
        encoded = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=self._tokenizer.is_fast,
        )
        tokens, spans = encoded["input_ids"], encoded.get("offset_mapping", [])
        if add_special_tokens and self._adds_end:
            return tokens[:-1], spans[:-1]
        return tokens, spans

    def _with_end_token(self, text: str) -> str:
        end = self._tokenizer.eos_token or ""
        return text if text.endswith(end) else text + end

    def _example(self, tokens: List[int], are_responses: List[bool]) -> Example:
        pairs = zip(tokens, are_responses)
        all_count = not self._only_responses
        labels = [token if all_count or counts else IGNORED for token, counts in pairs]
        # The first token has no context to be predicted from.
        return Example(tokens, [IGNORED, *labels[1:]] if labels else [])


def _adds_end(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer appends the end-of-sequence token to every text."""
    last = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    return tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id] != last


def _overlaps(spans: Sequence[Span], wanted: Sequence[Span]) -> List[bool]:
    """Returns for each of `spans` whether it shares a character with one of `wanted`."""
    return [any(s < end and start < e for start, end in wanted) for s, e in spans]


def _common_prefix_length(first: str, second: str) -> int:
    """Returns the length of the longest common prefix."""
    return len(os.path.commonprefix([first, second]))
