"""
Prompts and responses have the tokens that a tokenizer makes of both together, and of chats, of
whatever template, the responses are predicted.
"""

import logging
from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp.common.checks import ConfigurationError
from transformers import AutoTokenizer

from allennlp_deepspeed.language_modeling import CausalLMReader
from tests.fixtures.chat_tokenizer import (
    MARKED,
    PLAIN,
    PROMPTED_TO_THINK,
    THINKING_LAST,
    WITH_TOOLS,
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
    ],
    ids=["plain", "thinking_last", "marked", "prompted_to_think"],
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


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [assistant("one"), user("two"), assistant("three")]},
        {"prompt": [user("one")], "response": "two"},
        {"prompt": [user("one")]},
        {"messages": [user("one"), assistant("two")], "tools": 3},
        {"messages": [user("one"), assistant("two")], "tools": "[{"},
        {"messages": [user("one"), assistant("two")], "chat_template_kwargs": []},
    ],
    ids=["begins_with_assistant", "mixed", "no_response", "tools", "json", "kwargs"],
)
def test_wrong_chats_are_refused(tmp_path: Path, record: Record, expect_message: Any) -> None:
    reader = CausalLMReader(chat_tokenizer(tmp_path / "tokenizer", PLAIN), loss_on="responses")
    with pytest.raises(ConfigurationError) as info:
        list(reader.read(write(tmp_path, record)))
    expect_message(info.value.message.replace(str(tmp_path), "DIRECTORY"))
