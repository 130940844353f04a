"""
Tokens of texts, answers and conversations, and which of them are to be predicted.
"""

from bisect import bisect_right
from typing import Any, Dict, List, Tuple

from allennlp.common.checks import ConfigurationError
from transformers import PreTrainedTokenizerBase

from allennlp_deepspeed.language_modeling.chunked_cross_entropy import IGNORED
from allennlp_deepspeed.language_modeling.packing import Example

Message = Dict[str, Any]

# Tokens, and whether they are a response.
Segments = List[Tuple[List[int], bool]]


class ExampleTokenizer:
    """
    # Parameters

    tokenizer : `PreTrainedTokenizerBase`, required.
    only_responses : `bool`, required.
        Whether only responses are to be predicted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, only_responses: bool) -> None:
        self._tokenizer = tokenizer
        self._only_responses = only_responses

    def of_text(self, text: str) -> Example:
        """All of it, and that it ends."""
        return self._example([(self._beginning(text) + self._end(), False)])

    def of_response(self, prompt: str, response: str) -> Example:
        """
        They are tokenized apart, as they are when the response is generated: no token is of both.
        """
        tokens = self._tokenizer(response, add_special_tokens=False)["input_ids"]
        return self._example([(self._beginning(prompt), False), (tokens + self._end(), True)])

    def of_messages(self, messages: List[Message]) -> Example:
        """
        In the form of the tokenizer's chat template. The responses are the messages whose role is
        "assistant", with what the template has at their end.

        # Raises

        `ConfigurationError`
            If the tokenizer has no chat template, or one that doesn't take these messages, or if
            the responses can't be found in what it makes of them.
        """
        text = self.render(messages)
        # Where each response begins and ends, in characters.
        borders: List[int] = []
        for i, message in enumerate(messages):
            if message.get("role") == "assistant" and self._only_responses:
                before = self.render(messages[:i], add_generation_prompt=True)
                until = self.render(messages[: i + 1])
                if not (text.startswith(until) and until.startswith(before)):
                    raise ConfigurationError(
                        "The tokenizer's chat template changes messages when others follow, so "
                        "that responses can't be told from what is between them. Give each "
                        'response a line of its own, as the last message, or write "loss_on": '
                        '"all".'
                    )
                borders += [len(before), len(until)]
        return self._example(self._segments(text, borders))

    def of_prompt(self, prompt: str) -> List[int]:
        """The tokens that a response is to be generated for."""
        return self._beginning(prompt)

    def of_conversation(self, messages: List[Message]) -> List[int]:
        """Likewise, of a conversation that is to go on with a response."""
        text = self.render(messages, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def render(self, messages: List[Message], add_generation_prompt: bool = False) -> str:
        """What the chat template makes of messages."""
        if self._tokenizer.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer '{self._tokenizer.name_or_path}' has no chat template for "
                "'messages': use that of a chat model, or give 'prompt' and 'response'."
            )
        try:
            return self._tokenizer.apply_chat_template(  # type: ignore[return-value]
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # of any kind that a template raises
            raise ConfigurationError(
                f"The tokenizer's chat template refuses the messages {messages!r}: {error}"
            ) from error

    def _segments(self, text: str, borders: List[int]) -> Segments:
        """What is before a response and each response, in turns, of tokens of the whole text."""
        if not borders:
            return [(self._tokenizer(text, add_special_tokens=False)["input_ids"], False)]
        if not self._tokenizer.is_fast:
            raise ConfigurationError(
                f"The tokenizer '{self._tokenizer.name_or_path}' doesn't say which characters a "
                "token is made of, so that responses can't be told from what is between them: give "
                "'prompt' and 'response', or write \"loss_on\": \"all\"."
            )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        segments: Segments = [([], i % 2 == 1) for i in range(len(borders) + 1)]
        for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"]):
            segments[bisect_right(borders, start)][0].append(token)
        return segments

    def _beginning(self, text: str) -> List[int]:
        """With what the tokenizer puts before a text, but not what it puts after one."""
        tokens: List[int] = self._tokenizer(text)["input_ids"]
        while tokens and tokens[-1] == self._tokenizer.eos_token_id:
            tokens.pop()
        return tokens

    def _end(self) -> List[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [end]

    def _example(self, segments: Segments) -> Example:
        input_ids: List[int] = []
        labels: List[int] = []
        for tokens, is_response in segments:
            is_predicted = is_response or not self._only_responses
            input_ids += tokens
            labels += tokens if is_predicted else [IGNORED] * len(tokens)
        # There is nothing from which it could be predicted.
        return Example(input_ids, [IGNORED, *labels[1:]] if labels else [])
