"""What the messages of a chat say reaches the prompt, or is refused by name."""

import json
from typing import Any

import pytest

from tinker_server.chat.requests import read
from tinker_server.chat.responses import to_chat
from tinker_server.errors import BadField


def calling(arguments: object) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": arguments}}
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def arguments_in(body: dict[str, Any]) -> str:
    text: str = body["messages"][-1]["tool_calls"][0]["function"]["arguments"]
    return text


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "7", "null", "paint", [1], 7, True, "[" * 100_000])
def test_arguments_of_a_call_that_are_no_object_are_refused_by_name(arguments: object) -> None:
    with pytest.raises(BadField, match=r"messages\.1\.tool_calls\.0\.function\.arguments is .*must be a JSON object"):
        read("chat_completions", calling(arguments))
    item = {"type": "function_call", "call_id": "a", "name": "paint", "arguments": arguments}
    with pytest.raises(BadField, match=r"input\.0\.arguments is .*must be a JSON object"):
        to_chat({"model": "m", "input": [item]})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"city":  "Oslo"}', '{"city":  "Oslo"}'),
        ({"city": "Oslo"}, '{"city": "Oslo"}'),
        ({}, "{}"),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_of_a_call_are_text_or_an_object(arguments: object, text: str) -> None:
    assert arguments_in(read("chat_completions", calling(arguments)).body) == text
    item = {"type": "function_call", "call_id": "a", "name": "paint", "arguments": arguments}
    assert arguments_in(to_chat({"model": "m", "input": [item]})) == text
