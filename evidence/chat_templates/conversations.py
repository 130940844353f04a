"""Conversations of the kinds that chat data sets have."""

from typing import Any, Dict, List

Record = Dict[str, Any]


def _user(content: str) -> Record:
    return {"role": "user", "content": content}


def _assistant(content: Any, **others: Any) -> Record:
    return {"role": "assistant", "content": content, **others}


def _call(city: str) -> Dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"tool_calls": [{"type": "function", "id": "call00001", "function": function}]}


def _result(content: str) -> Record:
    return {
        "role": "tool",
        "name": "get_weather",
        "tool_call_id": "call00001",
        "content": content,
    }


_SYSTEM = {"role": "system", "content": "Answer briefly."}
_TOOL = {
    "name": "get_weather",
    "description": "Returns the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
_TOOLS = {"tools": [{"type": "function", "function": _TOOL}]}

_ASKED = _user("Is it raining in Bern?")
_FURTHER = [_user("Thank you."), _assistant("You are welcome.")]
_REASONED = _assistant("Hello there.", reasoning_content="They greet me.")
_TAGGED = _assistant("<think>\nThey greet me.\n</think>\n\nHello there.")


def _with_call(call: Record, *others: Record) -> Record:
    return {"messages": [_ASKED, call, _result("Rain."), *others], **_TOOLS}


CONVERSATIONS: Dict[str, Record] = {
    "one turn": {"messages": [_user("Hi."), _assistant("Hello there.")]},
    "system": {"messages": [_SYSTEM, _user("Hi."), _assistant("Hello there.")]},
    "two turns": {"messages": [_user("Hi."), _assistant("Hello there."), *_FURTHER]},
    "three turns, system": {
        "messages": [
            _SYSTEM,
            *(_user("Hi."), _assistant("Hello there.")),
            *(_user("Who are you?"), _assistant("A model.")),
            *_FURTHER,
        ]
    },
    "ends with a user": {"messages": [_user("Hi."), _assistant("Hello there."), _user("Bye.")]},
    "spaces": {"messages": [_user(" Hi. "), _assistant("\n Hello there. \n"), *_FURTHER]},
    "reasoning": {"messages": [_user("Hi."), _REASONED]},
    "reasoning, two turns": {"messages": [_user("Hi."), _REASONED, *_FURTHER]},
    "think tags": {"messages": [_user("Hi."), _TAGGED]},
    "think tags, two turns": {"messages": [_user("Hi."), _TAGGED, *_FURTHER]},
    "tool": _with_call(_assistant("", **_call("Bern")), _assistant("It is raining.")),
    "tool, content": _with_call(
        _assistant("I look it up.", **_call("Bern")), _assistant("It is raining.")
    ),
    "tool, further turn": _with_call(
        _assistant("", **_call("Bern")), _assistant("It is raining."), *_FURTHER
    ),
    "two tools": _with_call(
        _assistant("", **_call("Bern")),
        *(_assistant("", **_call("Chur")), _result("Sun.")),
        _assistant("Only in Bern."),
    ),
    "tool, reasoning": _with_call(
        _assistant("", reasoning_content="I need the weather.", **_call("Bern")),
        _assistant("It is raining.", reasoning_content="It says rain."),
    ),
}


def prompt_and_response(record: Record) -> Record:
    """Returns the conversation as a prompt and its last message."""
    *prompt, response = record["messages"]
    others: List[str] = [key for key in record if key != "messages"]
    return {"prompt": prompt, "response": [response], **{key: record[key] for key in others}}


def with_parts(record: Record) -> Record:
    """Returns the conversation with contents that are lists of parts, as of images and text."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in record["messages"]
    ]
    return {**record, "messages": messages}
