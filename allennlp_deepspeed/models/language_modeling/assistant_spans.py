"""
Finds the responses in a conversation that a chat template without `{% generation %}` marks has
rendered, by rendering variations of the conversation.
"""

import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Protocol, Tuple

from allennlp.common.checks import ConfigurationError

Message = Dict[str, Any]

# The indices of the first character of a part of a text and of the one after its last.
Span = Tuple[int, int]

PROBE = "\ufffc"
"""A character that occurs in no message."""


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

    def with_values(self, index: int, **values: Any) -> "Conversation":
        """Returns the conversation with other values in one message."""
        messages = list(self.messages)
        messages[index] = {**messages[index], **values}
        return self._replace(messages=messages)

    def response_indices(self) -> List[int]:
        """Returns the indices of the assistant's messages after the prompt."""
        return [
            i
            for i, message in enumerate(self.messages)
            if i >= self.prompt_length and message.get("role") == "assistant"
        ]


class Response(NamedTuple):
    """
    A response in a rendered conversation.

    # Parameters

    spans : `List[Tuple[int, int]]`
        Its parts. There are two if the template moves its content after the next message.
    missing_prompt : `str`, optional (default = `""`)
        The end of the prompt for generation, if the text lacks it.
    """

    spans: List[Span]
    missing_prompt: str = ""


class Render(Protocol):
    """Interface for functions that apply a chat template."""

    def __call__(self, conversation: Conversation, add_generation_prompt: bool = False) -> str: ...


class ResponseFinder:
    """
    Finds the responses in a rendered conversation. A response starts at the end of the prompt for
    generation. It ends where the conversation would end or continue after it.

    # Parameters

    conversation : `Conversation`, required.
    render : `Render`, required.
        Applies the chat template, or raises a `ConfigurationError` if the template refuses the
        messages.
    token_boundary : `Callable[[str, int], int]`, required.
        Returns the end of the last token in a text that ends at or before an index.
    """

    def __init__(
        self,
        conversation: Conversation,
        render: Render,
        token_boundary: Callable[[str, int], int],
    ) -> None:
        self._conversation = conversation
        self._render = render
        self._token_boundary = token_boundary
        self.text = render(conversation)

    def find(self, index: int) -> Response:
        """
        Finds the response whose message has this index.

        # Raises

        `ConfigurationError`
            If it can't be found.
        """
        if index == 0:
            raise ConfigurationError(
                "The conversation begins with a message of the assistant: begin with a message "
                'whose \'role\' is "user" or "system", or write "loss_on": "all".'
            )
        prompt = self._render(self._conversation.truncate(index), add_generation_prompt=True)
        for until in self._complete_texts(self._conversation, index):
            if self.text.startswith(until) and until.startswith(prompt):
                return Response([(len(prompt), len(until))])
        return self._find_by_values(index, prompt)

    def _complete_texts(self, conversation: Conversation, index: int) -> Iterator[str]:
        """
        Yields the text up to a response, if the conversation ends there, and if it continues. A
        template may end the last response differently.
        """
        yield self._render(conversation.truncate(index + 1))
        history = self._render(conversation.truncate(index))
        prompt = self._render(conversation.truncate(index), add_generation_prompt=True)
        shared = common_prefix_length(history, prompt)
        if shared < len(history):
            shared = self._token_boundary(prompt, shared)
        continued = self._render(conversation.truncate(index + 1), add_generation_prompt=True)
        if continued.endswith(prompt[shared:]):
            yield continued[: len(continued) - len(prompt[shared:])]

    def _find_by_values(self, index: int, prompt: str) -> Response:
        """
        Finds the response by the values of its message and of the one before it, if the template
        renders earlier messages differently, such as without their thinking.
        """
        start, missing_prompt = self._find_start(index, prompt)
        for probed in self._probed(index):
            end = self._find_end(index, probed)
            if end is not None and not self._is_after_next_value(index, end):
                return Response([(start, end)], missing_prompt)
        spans = self._find_moved_content(index)
        if not spans:
            raise self._not_found()
        return Response(spans, missing_prompt)

    def _find_start(self, index: int, prompt: str) -> Tuple[int, str]:
        """Returns the start of a response, and the end of the prompt that the text lacks."""
        for probed in self._probed(index - 1):
            value_end = common_prefix_length(self.text, self._render(probed))
            probed_prompt = self._render(probed.truncate(index), add_generation_prompt=True)
            header = prompt[common_prefix_length(prompt, probed_prompt) :]
            shared = common_prefix_length(self.text[value_end:], header)
            if shared == len(header):
                return value_end + shared, ""
            content = self._conversation.messages[index].get("content")
            start = value_end + shared
            if content is None or isinstance(content, str):
                moved = self._conversation.with_values(index, content=PROBE + (content or ""))
                start = min(start, common_prefix_length(self.text, self._render(moved)))
            return start, header[start - value_end :]
        raise self._not_found()

    def _find_end(self, index: int, probed: Conversation) -> Optional[int]:
        """Returns the end of a response, given the conversation with a probe in it."""
        value_end = common_prefix_length(self.text, self._render(probed))
        untils = self._complete_texts(self._conversation, index)
        for until, probed_until in zip(untils, self._complete_texts(probed, index)):
            ending = until[common_prefix_length(until, probed_until) :]
            if until != probed_until and self.text.startswith(ending, value_end):
                return value_end + len(ending)
        return None

    def _is_after_next_value(self, index: int, end: int) -> bool:
        """Returns whether the text up to an end includes a value of the next message."""
        is_last = index + 1 == len(self._conversation.messages)
        probed = None if is_last else next(self._probed(index + 1), None)
        return probed is not None and common_prefix_length(self.text, self._render(probed)) < end

    def _find_moved_content(self, index: int) -> List[Span]:
        """
        Returns the spans of a response with tool calls whose content the template moves after the
        results of the tools, none if it doesn't.
        """
        content = self._conversation.messages[index].get("content")
        if not content or not isinstance(content, str):
            return []
        others = ResponseFinder(
            self._conversation.with_values(index, content=""), self._render, self._token_boundary
        )
        spans = others.find(index).spans
        end = spans[-1][1]
        before, after = (
            self._conversation.with_values(index, content=value)
            for value in (PROBE + content, content + PROBE)
        )
        start = common_prefix_length(self.text, self._render(before))
        if others.text[:end] != self.text[:end] or start < end:
            return []
        content_end = common_prefix_length(self.text, self._render(after))
        followed, probed = (
            self._render(each.truncate(index + 2)) for each in (self._conversation, after)
        )
        ending = followed[common_prefix_length(followed, probed) :]
        if self.text.startswith(ending, content_end):
            content_end += len(ending)
        return [*spans, (start, content_end)]

    def _probed(self, index: int) -> Iterator[Conversation]:
        """Yields the conversation with a probe at the end of a value that the text shows."""
        message = self._conversation.messages[index]
        content = message.get("content")
        variations: List[Dict[str, Any]] = []
        if content is None or isinstance(content, str):
            variations.append({"content": (content or "") + PROBE})
        if isinstance(message.get("tool_calls"), list) and message["tool_calls"]:
            variations.append({"tool_calls": _with_probe(message["tool_calls"])})
        for values in variations:
            probed = self._conversation.with_values(index, **values)
            try:
                if self._render(probed) != self.text:
                    yield probed
            except ConfigurationError:
                # The template refuses a message that has both.
                continue

    def _not_found(self) -> ConfigurationError:
        return ConfigurationError(
            "The tokenizer's chat template renders messages differently when others follow, so "
            "responses can't be located: write each response in its own line, as 'response' after "
            "its 'prompt', or a template with {% generation %} marks as 'chat_template' of the "
            'reader, or "loss_on": "all".'
        )


def common_prefix_length(first: str, second: str) -> int:
    """Returns the length of the longest common prefix."""
    return len(os.path.commonprefix([first, second]))


def _with_probe(tool_calls: List[Any]) -> List[Any]:
    """Returns tool calls with a further argument in the last one, if its arguments are a dict."""
    *others, last = tool_calls
    function = last.get("function", last) if isinstance(last, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return tool_calls
    probed = {**function, "arguments": {**function["arguments"], PROBE: PROBE}}
    return [*others, {**last, "function": probed} if "function" in last else probed]
