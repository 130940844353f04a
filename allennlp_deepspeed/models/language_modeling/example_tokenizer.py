"""
Tokenizes texts, responses and conversations, and finds the tokens of responses.
"""

import json
import logging
import re
from functools import cached_property
from itertools import takewhile
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, Union

from allennlp.common.checks import ConfigurationError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from allennlp_deepspeed.models.language_modeling.assistant_spans import (
    PROBE,
    Conversation,
    Response,
    ResponseFinder,
    Span,
    common_prefix_length,
)
from allennlp_deepspeed.models.language_modeling.chunked_cross_entropy import IGNORED
from allennlp_deepspeed.models.language_modeling.dropped_parts import DroppedPart, find_dropped_part
from allennlp_deepspeed.models.language_modeling.packing import Example

logger = logging.getLogger(__name__)

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    chat_template : `str`, optional (default = `None`)
        The template of the conversations to train on, if it isn't the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        only_responses: bool,
        chat_template: Optional[str] = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._only_responses = only_responses
        self._chat_template = chat_template
        self._adds_end = _adds_end(tokenizer)
        self._special_tokens = {*tokenizer.added_tokens_decoder, tokenizer.eos_token_id}
        self._given_warnings: Set[str] = set()

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
        Tokenizes a conversation formatted by the chat template. Responses are the text between the
        template's `{% generation %}` marks. In a template without marks they are the messages whose
        role is "assistant", with their ending in the template. If the template has no ending, it is
        the special token of the next message that ends a response.

        # Raises

        `ConfigurationError`
            If the tokenizer has no chat template, if the template refuses these messages, or if the
            responses can't be found in the rendered text.
        """
        text = self.render(conversation)
        dropped = find_dropped_part(text, conversation)
        if dropped is not None:
            self._warn_of_dropped_part(dropped, conversation)
        if not self._only_responses:
            tokens, _ = self._encode(text, add_special_tokens=False)
            if not self._ends_responses:
                self._warn_of_ending()
            return self._example(tokens, [True] * len(tokens))
        if not self._tokenizer.is_fast:
            raise ConfigurationError(
                f"The tokenizer '{self._tokenizer.name_or_path}' has no character offsets, so "
                "responses can't be located: use 'prompt' and 'response', or write \"loss_on\": "
                '"all".'
            )
        responses = self._find_responses(text, conversation)
        missing_prompts = [r.missing_prompt for r in responses if r.missing_prompt]
        if missing_prompts and dropped is None:
            self._warn_of_prompt(missing_prompts[0])
        parts = [span for response in responses for span in response.spans]
        if not self._ends_responses:
            text, parts = self._with_endings(text, parts, conversation)
        tokens, spans = self._encode(text, add_special_tokens=False)
        return self._example(tokens, _overlaps(spans, parts))

    def tokenize_prompt(self, prompt: str) -> List[int]:
        """Tokenizes a prompt for which a response is to be generated."""
        return self._encode(prompt)[0]

    def tokenize_messages(self, conversation: Conversation) -> List[int]:
        """
        Tokenizes a conversation for which a response is to be generated, formatted by the
        tokenizer's own template, as by any other program that loads the model.
        """
        text = self._apply(None, conversation, add_generation_prompt=True)
        return self._encode(text, add_special_tokens=False)[0]

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Applies the chat template for training."""
        return self._apply(self._chat_template, conversation, add_generation_prompt)

    def _apply(
        self, template: Optional[str], conversation: Conversation, add_generation_prompt: bool
    ) -> str:
        messages, kwargs, _ = conversation
        if template is None and self._tokenizer.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer '{self._tokenizer.name_or_path}' has no chat template for "
                "'messages': use the tokenizer of a chat model, or 'prompt' and 'response', or "
                'write "tokenizer_kwargs": {"chat_template": importstr \'FILE\'} in the reader.'
            )
        try:
            return self._tokenizer.apply_chat_template(  # type: ignore[return-value]
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except Exception as error:  # of any kind that a template raises
            raise ConfigurationError(
                f"The tokenizer's chat template refuses the messages {messages!r}: {error}"
            ) from error

    def _template(self, conversation: Conversation) -> str:
        """Returns the template for a conversation: a tokenizer may have another one for tools."""
        tools = conversation.template_kwargs.get("tools")
        return self._tokenizer.get_chat_template(self._chat_template, tools)

    def _find_responses(self, text: str, conversation: Conversation) -> List[Response]:
        """Finds the responses in a rendered conversation."""
        if self._has_marks(conversation):
            return [Response([span]) for span in self._marked_spans(text, conversation)]
        finder = ResponseFinder(conversation, self.render, self._token_boundary)
        return [finder.find(index) for index in conversation.response_indices()]

    def _has_marks(self, conversation: Conversation) -> bool:
        return bool(_GENERATION_MARK.search(self._template(conversation)))

    def _marked_spans(self, text: str, conversation: Conversation) -> List[Span]:
        """Returns the spans between the marks of the template."""
        messages, kwargs, prompt_length = conversation
        # `apply_chat_template` leaves null keys out, and doesn't return spans.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        rendered: Any = render_jinja_template(
            conversations=[given],
            chat_template=self._template(conversation),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **kwargs},
        )
        _, (marked,) = rendered
        prompt = self.render(conversation.truncate(prompt_length)) if prompt_length else ""
        return [(s, e) for s, e in marked if s >= common_prefix_length(prompt, text)]

    @cached_property
    def _ends_responses(self) -> bool:
        """Returns whether the tokens with a loss include a special token that ends responses."""
        question = {"role": "user", "content": "a"}
        messages = [question, {"role": "assistant", "content": PROBE}]
        if self._only_responses:
            messages.append(question)
        conversation = Conversation(messages)
        try:
            text = self.render(conversation)
            (response, *_) = (
                self._find_responses(text, conversation)
                if self._only_responses
                else [Response([(0, len(text))])]
            )
        except (ConfigurationError, ValueError):
            # The template refuses such a conversation, or it has no response.
            return True
        ending = text[text.find(PROBE) + 1 : response.spans[-1][1]]
        tokens, _ = self._encode(ending, add_special_tokens=False)
        return not self._special_tokens.isdisjoint(tokens)

    def _with_endings(
        self, text: str, parts: List[Span], conversation: Conversation
    ) -> Tuple[str, List[Span]]:
        """
        Extends responses by the special token that follows them, which ends generation. After the
        last response it is appended to the text.
        """
        if self._has_marks(conversation):
            self._warn_of_ending()
            return text, parts
        if conversation.messages[-1].get("role") == "assistant":
            text += self._following_marker(conversation)
        tokens, spans = self._encode(text, add_special_tokens=False)
        ends = {s: e for token, (s, e) in zip(tokens, spans) if token in self._special_tokens}
        if any(end not in ends for _, end in parts):
            self._warn_of_ending()
        return text, [(start, ends.get(end, end)) for start, end in parts]

    def _following_marker(self, conversation: Conversation) -> str:
        """
        Returns the special token with which the message after a response begins, "" if none does.
        """
        calls = conversation.messages[-1].get("tool_calls")
        question = {"role": "user", "content": "a"}
        response = {
            "role": "assistant",
            "content": PROBE,
            **({"tool_calls": calls} if calls else {}),
        }
        following = {"role": "tool" if calls else "user", "content": "a"}
        probe = conversation._replace(messages=[question, response, following])
        try:
            text, longer = self.render(probe.truncate(2)), self.render(probe)
        except ConfigurationError:
            return ""
        tokens, _ = self._encode(longer[len(text) :], add_special_tokens=False)
        is_special = longer.startswith(text) and tokens and tokens[0] in self._special_tokens
        return str(self._tokenizer.decode(tokens[:1])) if is_special else ""

    def _token_boundary(self, text: str, index: int) -> int:
        """Returns the end of the last token in a text that ends at or before an index."""
        _, spans = self._encode(text, add_special_tokens=False)
        return max((end for _, end in spans if end <= index), default=0)

    def _warn_of_dropped_part(self, part: DroppedPart, conversation: Conversation) -> None:
        single = conversation.truncate(part.message_index + 1)._replace(
            prompt_length=part.message_index
        )
        self._warn_once(
            "The chat template leaves out a part of the assistant's messages, which isn't trained, "
            "such as %r in '%s' of message %d of a conversation: %suse a template that keeps it, "
            "with {%% generation %%} marks, as 'chat_template' of the reader.",
            part.value[:60],
            part.key,
            part.message_index,
            "write one line per response, as 'response' after its 'prompt', or "
            if self._keeps_all(single)
            else "",
        )

    def _keeps_all(self, conversation: Conversation) -> bool:
        """Returns whether the text of a conversation has all of the assistant's messages."""
        try:
            return find_dropped_part(self.render(conversation), conversation) is None
        except ConfigurationError:
            return False

    def _warn_of_prompt(self, beginning: str) -> None:
        self._warn_once(
            "The tokenizer's chat template starts generation with %r, but some responses don't "
            "begin with it, and are trained without it: add what belongs there, such as thinking.",
            beginning,
        )

    def _warn_of_ending(self) -> None:
        self._warn_once(
            "The chat template of '%s' ends responses without a special token that has a loss, so "
            "generation may not stop: use a template that ends them with one, as 'chat_template' "
            "of the reader.",
            self._tokenizer.name_or_path,
        )

    def _warn_once(self, message: str, *arguments: Any) -> None:
        if message not in self._given_warnings:
            self._given_warnings.add(message)
            logger.warning(message, *arguments)

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
