import logging
from typing import Any, Dict, Iterator, List, Optional, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Field, Instance
from allennlp.data.dataset_readers.dataset_reader import PathOrStr
from allennlp.data.fields import TensorField
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from allennlp_deepspeed.engine.process.collectives import world_size
from allennlp_deepspeed.models.language_modeling import packing, pretrained
from allennlp_deepspeed.models.language_modeling.assistant_spans import Conversation, Message
from allennlp_deepspeed.models.language_modeling.chunked_cross_entropy import IGNORED
from allennlp_deepspeed.models.language_modeling.example_tokenizer import (
    ExampleTokenizer,
    to_template_kwargs,
)
from allennlp_deepspeed.models.language_modeling.packing import Example
from allennlp_deepspeed.text_files import Row, read_rows

logger = logging.getLogger(__name__)

_FORMS = (
    '{"text": ...}, {"prompt": ..., "response": ...} or {"messages": [{"role": "user", '
    '"content": ...}, ...]}'
)

# Keys next to messages.
_TEMPLATE_KEYS = ("tools", "chat_template_kwargs")

Prompt = Union[str, List[Message]]


@DatasetReader.register("causal_lm")
class CausalLMReader(DatasetReader):
    """
    Reads texts, prompts with responses, or conversations for a causal language model from JSON
    lines, or from rows with such columns of a `.parquet` file or of a directory that `save_to_disk`
    of the package `datasets` has written:

        {"text": "In the beginning God created the heaven and the earth."}
        {"prompt": "The capital of France is", "response": " Paris."}
        {"messages": [{"role": "user", "content": "Hello!"},
                      {"role": "assistant", "content": "Good morning."}]}

    The tokenizer's end-of-sequence token is appended to texts and responses that don't end with it.
    Messages are formatted by its chat template. A prompt and its response are tokenized as one
    text, so the space between them has to be in one of them. They may be lists of messages instead.
    Next to messages a line may have `tools` and `chat_template_kwargs` for the template. Other keys
    are ignored.

    Registered as a `DatasetReader` with name "causal_lm".

    # Parameters

    tokenizer : `str`, required.
        The name of a pretrained model or its directory, or a file that ends in `.gguf`. The
        tokenizer is saved in the archive, and a loaded archive uses the saved tokenizer.
    max_length : `int`, optional (default = `None`)
        Truncates examples to this number of tokens. The number of truncated examples is logged for
        each file.
    loss_on : `str`, optional (default = `"all"`)
        The tokens with a loss: `"all"`, or `"responses"` only. In messages, a response is the text
        between `{% generation %}` and `{% endgeneration %}` in the chat template. If the template
        has no such marks, each message of the assistant is a response, including the tokens with
        which the template ends the message.
    pack : `bool`, optional (default = `False`)
        Whether to pack short examples into sequences of up to `max_length` tokens. Examples don't
        attend to each other. Each worker then tokenizes all examples, so sequences don't
        depend on the world size. With `pack`, `max_instances` counts sequences, not examples.
    tokenizer_kwargs : `Dict[str, Any]`, optional (default = `None`)
        Further arguments of `AutoTokenizer.from_pretrained`.
    chat_template : `str`, optional (default = `None`)
        A template for the messages to train on, such as one that keeps the thinking of all turns,
        with `{% generation %}` marks: in a config file `importstr "template.jinja"`. The tokenizer
        and the archive keep their own template, with which prompts are formatted for generation.

    # Raises

    `ConfigurationError`
        In the constructor, if a key is invalid, or if the tokenizer differs from the archive's.
        While reading, if a row has another format: the error names the file, the number of the line
        or row, and the expected format.
    """

    def __init__(
        self,
        tokenizer: str,
        max_length: Optional[int] = None,
        loss_on: str = "all",
        pack: bool = False,
        tokenizer_kwargs: Optional[Dict[str, Any]] = None,
        chat_template: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            manual_distributed_sharding=True, manual_multiprocess_sharding=True, **kwargs
        )
        if loss_on not in ("all", "responses"):
            raise ConfigurationError(
                f'\'loss_on\' of the reader is {loss_on!r}: write "all" or "responses".'
            )
        if max_length is not None and max_length < 2:
            raise ConfigurationError(
                f"'max_length' of the reader is {max_length}: write a number of tokens of at "
                "least 2, or remove the key for no limit."
            )
        if pack and max_length is None:
            raise ConfigurationError(
                "'pack' of the reader is true, but 'max_length' is unset: write the number of "
                'tokens per sequence, such as "max_length": 1024.'
            )
        self.tokenizer = pretrained.load_reader_tokenizer(
            tokenizer, tokenizer_kwargs or {}, self.serialization_dir
        )
        if chat_template is not None:
            _check_chat_template(chat_template, self.tokenizer)
        self.example_tokenizer = ExampleTokenizer(
            self.tokenizer, only_responses=loss_on == "responses", chat_template=chat_template
        )
        self._sizes = pretrained.example_sizes(self.tokenizer)
        self._max_length = max_length
        self._only_responses = loss_on == "responses"
        self._pack = pack

    @override
    def _read(self, file_path: PathOrStr) -> Iterator[Instance]:
        rows = read_rows(file_path)
        counts = _Counts(str(file_path), self._max_length)
        if self._pack:
            assert self._max_length is not None
            examples = (self._read_example(row, counts) for row in rows)
            for sequence in self.shard_iterable(packing.pack(examples, self._max_length)):
                yield self._instance(
                    Example(
                        [token for example in sequence for token in example.input_ids],
                        [label for example in sequence for label in example.labels],
                    ),
                    packing.position_ids(sequence),
                )
        else:
            for row in self.shard_iterable(rows):
                yield self._instance(self._read_example(row, counts))
        counts.finish()

    def _read_example(self, row: Row, counts: "_Counts") -> Example:
        example = self._cut(self._parse(row), counts)
        if self._sizes is not None:
            self._sizes.add(example.input_ids, row)
        return example

    @override
    def text_to_instance(
        self,
        text: Optional[str] = None,
        prompt: Optional[Prompt] = None,
        response: Optional[Prompt] = None,
        messages: Optional[List[Message]] = None,
        tools: Union[str, List[Dict[str, Any]], None] = None,
        chat_template_kwargs: Optional[Dict[str, Any]] = None,
    ) -> Instance:
        """
        Tokenizes an example and converts it to an instance.

        # Parameters

        text : `str`, optional (default = `None`)
        prompt : `Union[str, List[Dict[str, Any]]]`, optional (default = `None`)
            A text or messages, given with a `response`.
        response : `Union[str, List[Dict[str, Any]]]`, optional (default = `None`)
            A text or messages, given with a `prompt`.
        messages : `List[Dict[str, Any]]`, optional (default = `None`)
        tools : `Union[str, List[Dict[str, Any]]]`, optional (default = `None`)
            Given with messages: JSON schemas of the functions that the assistant may call, or that
            list in JSON.
        chat_template_kwargs : `Dict[str, Any]`, optional (default = `None`)
            Given with messages: further arguments of the chat template.

        # Returns

        An `Instance` with these fields:

        input_ids : `TensorField`
            In a batch: int64 of shape `(batch_size, length)`, padded on the right.
        labels : `TensorField`
            Of the same shape: the same tokens, and -100 for tokens without loss, which are the
            first, padding, and with `loss_on` `"responses"` all tokens except responses.
        attention_mask : `TensorField`
            Of the same shape: 1 for tokens and 0 for padding.
        position_ids : `TensorField`
            Only if examples are packed. Of the same shape: positions from 0 in each example.
        """
        kwargs = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        example = self._tokenize(text, prompt, response, messages, **kwargs)
        example = self._cut(example, _Counts("", self._max_length))
        return self._instance(example, packing.position_ids([example]) if self._pack else None)

    def _parse(self, row: Row) -> Example:
        record = row.parse()
        given: Dict[str, Any] = {
            key: record[key] for key in ("text", "prompt", "messages") if key in record
        }
        if len(given) != 1:
            raise row.error(f"Expected one of {_FORMS}, and not {', '.join(record) or 'nothing'}.")
        if "prompt" in given:
            if "completion" in record and "response" not in record:
                raise row.error("Expected 'response' next to 'prompt': rename 'completion'.")
            given["response"] = record.get("response")
        if "messages" in given or any(isinstance(value, list) for value in given.values()):
            for key, value in given.items():
                _check_messages(row, value, key)
            _check_template_kwargs(row, record)
            given.update({key: record.get(key) for key in _TEMPLATE_KEYS})
        else:
            for key in filter(record.get, _TEMPLATE_KEYS):
                raise row.error(
                    f"'{key}' is for a chat template, which is applied to messages only: write "
                    "'messages', or 'prompt' and 'response' as lists of messages."
                )
            for key, value in given.items():
                row.check_text(value, f"'{key}'")
        try:
            example = self._tokenize(**given)
        except ConfigurationError as error:
            raise row.error(error.message) from error
        if len(example.input_ids) < 2:
            raise row.error("Expected a text of at least two tokens: there is nothing to predict.")
        if self._only_responses and all(label == IGNORED for label in example.labels):
            raise row.error(
                'There is no response, but \'loss_on\' is "responses": write "all", or use '
                "'prompt' and 'response', or 'messages' with an assistant's message."
            )
        return example

    def _tokenize(
        self,
        text: Optional[str] = None,
        prompt: Optional[Prompt] = None,
        response: Optional[Prompt] = None,
        messages: Optional[List[Message]] = None,
        **template_kwargs: Any,
    ) -> Example:
        if isinstance(prompt, list) and isinstance(response, list):
            messages = [*prompt, *response]
        if messages is not None:
            kwargs = to_template_kwargs(**template_kwargs)
            prompt_length = 0 if prompt is None else len(prompt)
            conversation = Conversation(messages, kwargs, prompt_length)
            return self.example_tokenizer.tokenize_conversation(conversation)
        if isinstance(prompt, str) and isinstance(response, str):
            return self.example_tokenizer.tokenize_response(prompt, response)
        if text is None:
            raise ConfigurationError(f"Write one of {_FORMS}.")
        return self.example_tokenizer.tokenize_text(text)

    def _cut(self, example: Example, counts: "_Counts") -> Example:
        input_ids, labels = (values[: self._max_length] for values in example)
        counts.add(is_cut=len(input_ids) < len(example.input_ids), labels=labels)
        return Example(input_ids, labels)

    def _instance(self, example: Example, position_ids: Optional[torch.Tensor] = None) -> Instance:
        input_ids, labels = (torch.tensor(values, dtype=torch.int64) for values in example)
        fields: Dict[str, Field] = {
            # No output depends on the padding token, and every model has an embedding of token 0.
            "input_ids": TensorField(input_ids, padding_value=0),
            "labels": TensorField(labels, padding_value=IGNORED),
            "attention_mask": TensorField(torch.ones_like(input_ids), padding_value=0),
        }
        if position_ids is not None:
            fields["position_ids"] = TensorField(position_ids, padding_value=0)
        return Instance(fields)


class _Counts:
    """Counts the examples of a file that `max_length` truncates."""

    def __init__(self, file_path: str, max_length: Optional[int]) -> None:
        self._file_path = file_path
        self._max_length = max_length
        self._num_examples = 0
        self._num_cut = 0
        self._num_without_targets = 0

    def add(self, is_cut: bool, labels: List[int]) -> None:
        self._num_examples += 1
        self._num_cut += is_cut
        self._num_without_targets += is_cut and all(label == IGNORED for label in labels)

    def finish(self) -> None:
        """
        Logs how many examples were truncated.

        # Raises

        `ConfigurationError`
            If no token of the file has a loss and no other worker has read other rows.
        """
        num_examples, is_whole = self._num_examples, world_size() == 1 and not get_worker_info()
        if is_whole and num_examples and self._num_without_targets == num_examples:
            raise ConfigurationError(
                f"'max_length' of the reader is {self._max_length}, which cuts off all tokens "
                f'with a loss in {self._file_path}: write a larger number, or "loss_on": "all".'
            )
        if self._num_cut > 0:
            logger.warning(
                "Of %d examples in %s, %d were truncated to 'max_length', %d tokens; %d of these "
                "have no tokens with a loss left.",
                self._num_examples,
                self._file_path,
                self._num_cut,
                self._max_length,
                self._num_without_targets,
            )


def _check_chat_template(chat_template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if "{" not in chat_template:
        raise ConfigurationError(
            f"'chat_template' of the reader is {chat_template!r}, which isn't a template: if it is "
            f'the name of a file, write "chat_template": importstr "{chat_template}" (without '
            "quotes around importstr) in the config file."
        )
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            "'chat_template' of the reader is for the data, and the tokenizer has none to generate "
            "with: write it as 'chat_template' in 'tokenizer_kwargs', which is saved in the "
            "archive."
        )


def _check_messages(row: Row, messages: Any, name: str) -> None:
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise row.error(
            f"Expected '{name}' to be a list of objects with 'role' and 'content', and not "
            f"{messages!r}."
        )


def _check_template_kwargs(row: Row, record: Dict[str, Any]) -> None:
    tools, kwargs = record.get("tools"), record.get("chat_template_kwargs")
    if tools is not None and not isinstance(tools, (str, list)):
        raise row.error(f"Expected 'tools' to be a list of JSON schemas, and not {tools!r}.")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise row.error(f"Expected 'chat_template_kwargs' to be an object, and not {kwargs!r}.")
