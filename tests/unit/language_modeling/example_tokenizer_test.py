"""
Prompts and responses have the tokens that a tokenizer makes of both together, and of chats, of
whatever template, the responses are predicted.
"""

import json
import logging
from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader
from transformers import AutoTokenizer

from allennlp_deepspeed.models.language_modeling import CausalLMReader
from allennlp_deepspeed.models.language_modeling.assistant_spans import Conversation
from tests.fixtures.chat_tokenizer import (
    CONTENT_AFTER_RESULT,
    ENDED_TEXT,
    MARKED,
    OPEN_ENDED,
    PLAIN,
    PROMPTED_TO_THINK,
    RETURNING,
    THINKING_AFTER_QUESTION,
    THINKING_LAST,
    TURN_MARKERS,
    WITH_TOOLS,
    WITHOUT_THINKING,
    chat_tokenizer,
    sentencepiece_like,
)
from tests.unit.language_modeling.causal_lm_reader_test import write

Record = Dict[str, Any]


def user(content: Any) -> Record:
    return {"role": "user", "content": content}


def assistant(content: Any, **others: Any) -> Record:
    return {"role": "assistant", "content": content, **others}


def tokens(reader: CausalLMReader, record: Record, field: str = "input_ids") -> List[int]:
    return reader.text_to_instance(**record)[field].tensor.tolist()  # type: ignore[attr-defined]


def text(reader: CausalLMReader, record: Record) -> str:
    return str(reader.tokenizer.decode(tokens(reader, record)))


def predicted(reader: CausalLMReader, record: Record) -> List[str]:
    """The parts of the text that are predicted."""
    parts: List[List[int]] = [[]]
    for label in tokens(reader, record, "labels"):
        if label != -100:
            parts[-1].append(label)
        elif parts[-1]:
            parts.append([])
    return [str(reader.tokenizer.decode(part)) for part in parts if part]


@pytest.mark.parametrize("adds_end", [False, True])
@pytest.mark.parametrize(
    "prompt, response, expected",
    [
        ("foo(", "bar)", "bar)</s>"),
        ("foo", " bar", " bar</s>"),
        # A token of both is one of the response.
        ("foo ", "bar", " bar</s>"),
        # What the user has written stays, and isn't there twice.
        ("foo</s>", "bar", "bar</s>"),
        ("foo", " bar</s>", " bar</s>"),
    ],
)
def test_prompt_and_response_have_the_tokens_of_both_together(
    tmp_path: Path, prompt: str, response: str, expected: str, adds_end: bool
) -> None:
    name = sentencepiece_like(tmp_path / "tokenizer", adds_end)
    reader = CausalLMReader(name, loss_on="responses")
    tokenizer = AutoTokenizer.from_pretrained(sentencepiece_like(tmp_path / "plain"))
    # As TRL has them.
    joint = tokenizer(prompt + response.removesuffix("</s>") + "</s>")["input_ids"]
    record = {"prompt": prompt, "response": response}
    assert tokens(reader, record) == joint
    labels = tokens(reader, record, "labels")
    num_given = labels.count(-100)
    assert labels == [-100] * num_given + joint[num_given:]
    pieces = tokenizer.convert_ids_to_tokens(joint[num_given:])
    assert "".join(pieces).replace("▁", " ") == expected
    whole = {"text": prompt + response}
    assert tokens(reader, whole) == joint
    assert reader.example_tokenizer.tokenize_prompt(prompt) == tokenizer(prompt)["input_ids"]


CONVERSATION = [user("one"), assistant("two", reasoning_content="hm"), user("three")]
LAST = assistant("four", reasoning_content="ah")


@pytest.mark.parametrize(
    "template, expected",
    [
        (PLAIN, ["two<|im_end|>\n", "four<|im_end|>\n"]),
        (THINKING_LAST, ["two<|im_end|>\n", "<think>ah</think>four<|im_end|>\n"]),
        (MARKED, ["two<|im_end|>", "four<|im_end|>"]),
        (PROMPTED_TO_THINK, ["two<|im_end|>\n", "four<|im_end|>\n"]),
        (ENDED_TEXT, ["two<|im_end|>\n", "four<|im_end|>\n<|endoftext|>"]),
        (RETURNING, ["two<|im_end|>\n", "<think>ah</think>four<|endoftext|>"]),
        (THINKING_AFTER_QUESTION, ["two<|im_end|>\n", "ah\n</think>four<|im_end|>\n"]),
    ],
    ids=[
        "plain",
        "thinking_last",
        "marked",
        "prompted_to_think",
        "ended_text",
        "returning",
        "thinking_after_question",
    ],
)
def test_responses_of_a_conversation(tmp_path: Path, template: str, expected: List[str]) -> None:
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", template), loss_on="responses")
    record = {"messages": [*CONVERSATION, LAST]}
    rendered = reader.tokenizer.apply_chat_template(record["messages"], tokenize=False)
    assert text(reader, record) == rendered
    assert predicted(reader, record) == expected
    # Of these the first one belongs to the prompt.
    assert predicted(reader, {"prompt": CONVERSATION, "response": [LAST]}) == expected[1:]
    reader = CausalLMReader(reader.tokenizer.name_or_path)
    assert predicted(reader, record) == [rendered.removeprefix("<|im_start|>")]


CALL = {"tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "5"}


@pytest.mark.parametrize(
    "template, call, expected",
    [
        (
            RETURNING,
            assistant("", reasoning_content="hm", **CALL),
            [' to sum {"a": 1}<|im_end|>\n', "five<|im_end|>\n"],
        ),
        (
            THINKING_AFTER_QUESTION,
            assistant("", **CALL),
            ["call sum<|im_end|>\n", "five<|im_end|>\n"],
        ),
        (
            CONTENT_AFTER_RESULT,
            assistant("I add.", **CALL),
            ["call sum<think>", "I add.<|im_end|>\n", "five<|im_end|>\n"],
        ),
    ],
    ids=["returning", "thinking_after_question", "content_after_result"],
)
def test_responses_with_calls_of_tools(
    tmp_path: Path, template: str, call: Record, expected: List[str]
) -> None:
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", template), loss_on="responses")
    messages = [user("one"), call, RESULT, assistant("five"), user("three"), LAST]
    *parts, _ = predicted(reader, {"messages": messages})
    assert parts == expected


def test_responses_without_an_ending_end_with_the_next_marker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    markers = {"additional_special_tokens": TURN_MARKERS}
    name = chat_tokenizer(tmp_path / "tokenizer", OPEN_ENDED, **markers)
    reader = CausalLMReader(name, loss_on="responses")
    messages = [user("one"), assistant("two"), user("three"), assistant("", **CALL), RESULT]
    record = {"messages": [*messages, assistant("four")]}
    assert predicted(reader, record) == [
        "\ntwo<|user|>",
        "\ncall sum<|observation|>",
        "\nfour<|user|>",
    ]
    assert predicted(reader, {"prompt": messages[:3], "response": messages[3:4]}) == [
        "\ncall sum<|observation|>"
    ]
    assert not caplog.messages
    every = CausalLMReader(name)
    assert text(every, record) == every.tokenizer.apply_chat_template(
        record["messages"], tokenize=False
    )
    assert len(caplog.messages) == 1, "The last response has no ending."


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("<|im_start|>", "### ").replace("<|im_end|>", ""),
        MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    ],
    ids=["plain_text", "marked"],
)
def test_responses_whose_ending_is_not_predicted_are_named_once(
    tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture, expect_message: Any
) -> None:
    name = chat_tokenizer(tmp_path / "tokenizer", template)
    reader = CausalLMReader(name, loss_on="responses")
    for _ in range(2):
        predicted(reader, {"messages": [user("one"), assistant("two")]})
    (message,) = caplog.messages
    expect_message(message.replace(str(tmp_path), "DIRECTORY"))


THOUGHT = assistant("two", reasoning_content="hm")


@pytest.mark.parametrize(
    "template, first",
    [
        (THINKING_AFTER_QUESTION, THOUGHT),
        (WITHOUT_THINKING, assistant("<think>\nhm\n</think>two")),
        (PLAIN, THOUGHT),
        (PLAIN, assistant("two", **CALL)),
    ],
    ids=["of_earlier_turns", "of_all_turns", "unknown_key", "calls"],
)
@pytest.mark.parametrize("loss_on", ["all", "responses"])
def test_what_a_template_leaves_out_is_named_once(
    tmp_path: Path,
    template: str,
    first: Record,
    loss_on: str,
    caplog: pytest.LogCaptureFixture,
    expect_message: Any,
) -> None:
    name = chat_tokenizer(tmp_path / "tokenizer", template)
    reader = CausalLMReader(name, loss_on=loss_on)
    for _ in range(2):
        tokens(reader, {"messages": [user("one"), first, user("three"), assistant("<think>four")]})
    (message,) = caplog.messages
    expect_message(message)


def test_what_a_template_shows_in_other_words_is_not_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content | replace('<think>', '<hm>') }}")
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", template), loss_on="responses")
    parts = [{"type": "text", "text": "two"}]
    for content in ("<think> ah</think>\n\n two ", parts, None):
        tokens(reader, {"messages": [user("one"), assistant(content)]})
    # Of the prompt no response is predicted.
    prompt = [user("one"), assistant("two", reasoning_content="hm"), user("three")]
    tokens(reader, {"prompt": prompt, "response": [assistant("four")]})
    assert not caplog.messages


def test_a_template_from_a_file_is_for_the_data(tmp_path: Path) -> None:
    name = chat_tokenizer(tmp_path / "tokenizer", THINKING_LAST)
    keeping = MARKED.replace(
        "{{ m.content }}", "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
    )
    (tmp_path / "keeping.jinja").write_text(keeping)
    config = {
        "type": "causal_lm",
        "tokenizer": name,
        "loss_on": "responses",
        "chat_template": "FILE",
    }
    path = tmp_path / "config.jsonnet"
    path.write_text(json.dumps(config).replace('"FILE"', 'importstr "keeping.jinja"'))
    reader = DatasetReader.from_params(Params.from_file(path))
    assert isinstance(reader, CausalLMReader)
    assert predicted(reader, {"messages": [*CONVERSATION, LAST]}) == [
        "<think>hm</think>two<|im_end|>",
        "<think>ah</think>four<|im_end|>",
    ]
    assert reader.tokenizer.chat_template == THINKING_LAST
    prompt = reader.example_tokenizer.tokenize_messages(Conversation(CONVERSATION))
    assert "hm" not in str(reader.tokenizer.decode(prompt))


@pytest.mark.parametrize("own, given", [(PLAIN, "keeping.jinja"), (None, MARKED)])
def test_wrong_templates_are_refused(
    tmp_path: Path, own: Any, given: str, expect_message: Any
) -> None:
    name = chat_tokenizer(tmp_path / "tokenizer", own)
    with pytest.raises(ConfigurationError) as info:
        CausalLMReader(name, chat_template=given)
    expect_message(info.value.message)


def test_thinking_that_the_prompt_begins_is_predicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = chat_tokenizer(tmp_path / "tokenizer", PROMPTED_TO_THINK)
    reader = CausalLMReader(name, loss_on="responses")
    thinking = assistant("<think>\nhm</think>two")
    with caplog.at_level(logging.WARNING):
        assert predicted(reader, {"messages": [user("one"), thinking]}) == [
            "hm</think>two<|im_end|>\n"
        ]
        assert "<think>" not in caplog.text
        assert predicted(reader, {"messages": [user("one"), assistant("<b>")]}) == [
            "<b><|im_end|>\n"
        ]
        assert "<think>" in caplog.text, "They are generated after it, and trained without."


def test_a_message_without_text_is_a_response(tmp_path: Path) -> None:
    template = THINKING_LAST.replace("{{ m.content | trim }}", "{{ m.content }}{{ m.tool_calls }}")
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", template), loss_on="responses")
    call = assistant(None, tool_calls="call()")
    record = {"messages": [user("one"), call, user("two"), assistant("three")]}
    assert predicted(reader, record)[0] == "call()<|im_end|>\n"


def test_tools_and_arguments_of_a_line_are_for_the_template(tmp_path: Path) -> None:
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", WITH_TOOLS), loss_on="responses")
    record: Record = {"messages": [user("one"), assistant("two")]}
    assert text(reader, record).startswith("<|im_start|>user")
    given = {"tools": [{"name": "sum"}], "chat_template_kwargs": {"brief": True}}
    assert text(reader, {**record, **given}).startswith("tools:sum,Be brief.<|im_start|>user")
    assert predicted(reader, {**record, **given}) == ["two<|im_end|>\n"]
    assert text(reader, {**record, "tools": '[{"name": "sum"}]'}).startswith("tools:sum,<|im")
    (instance,) = reader.read(write(tmp_path, {**record, **given}))
    ids = instance["input_ids"].tensor.tolist()  # type: ignore[attr-defined]
    assert ids == tokens(reader, {**record, **given})


def test_responses_that_are_not_in_the_text_are_refused(
    tmp_path: Path, expect_message: Any
) -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", template), loss_on="responses")
    record = {"messages": [*CONVERSATION, LAST]}
    assert predicted(reader, record) == ["<|im_end|>\n"] * 2
    template = template.replace("m.role == 'user'", "loop.last")
    reader = CausalLMReader(chat_tokenizer(tmp_path / "other", template), loss_on="responses")
    with pytest.raises(ConfigurationError) as info:
        tokens(reader, record)
    expect_message(info.value.message)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [assistant("one"), user("two"), assistant("three")]},
        {"prompt": [user("one")], "response": "two"},
        {"prompt": [user("one")]},
        {"messages": [user("one"), assistant("two")], "tools": 3},
        {"messages": [user("one"), assistant("two")], "tools": "[{"},
        {"messages": [user("one"), assistant("two")], "chat_template_kwargs": []},
        {"prompt": [user("one")], "completion": [assistant("two")]},
        {"prompt": "one", "response": "two", "tools": [{"name": "sum"}]},
        {"text": "one", "chat_template_kwargs": {"brief": True}},
    ],
    ids=[
        "begins_with_assistant",
        "mixed",
        "no_response",
        "tools",
        "json",
        "kwargs",
        "completion",
        "tools_of_strings",
        "kwargs_of_strings",
    ],
)
def test_wrong_chats_are_refused(tmp_path: Path, record: Record, expect_message: Any) -> None:
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", PLAIN), loss_on="responses")
    with pytest.raises(ConfigurationError) as info:
        list(reader.read(write(tmp_path, record)))
    expect_message(info.value.message.replace(str(tmp_path), "DIRECTORY"))
