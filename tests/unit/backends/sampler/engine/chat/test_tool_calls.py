"""A call ends at the first end tag outside of its strings, wherever its text is cut on the way."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from tinker_server.backends.sampler.engine.chat.tool_calls import end_calls_outside_strings

TRICKY = {"text": 'a </tool_call> b <tool_call> "c" \\</tool_call>', "n": [1, {"</tool_call>": None}]}


@pytest.fixture
def parser() -> Any:
    end_calls_outside_strings()
    return Hermes2ProToolParser(cast(Any, SimpleNamespace(get_vocab=dict, tokenizer=None)))


def stream(parser: Any, text: str, size: int) -> list[dict[str, str]]:
    """What the parser's events add up to, for a text that comes in pieces of this size."""
    calls: list[dict[str, str]] = []
    for end in range(size, len(text) + size, size):
        before, now = text[: end - size], text[:end]
        delta = parser.extract_tool_calls_streaming(before, now, now[len(before) :], [], [], [], None)
        for call in delta.tool_calls if delta else ():
            if call.function.name:
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    return calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_end_tag_within_a_string_belongs_to_the_arguments(parser: Any, size: int) -> None:
    call = json.dumps({"name": "paint", "arguments": TRICKY})
    text = f"<tool_call>\n{call}\n</tool_call><tool_call>{call}</tool_call>"
    found = stream(parser, text, size)
    assert [one["name"] for one in found] == ["paint", "paint"]
    assert [json.loads(one["arguments"]) for one in found] == [TRICKY, TRICKY]


def test_a_call_that_is_cut_has_the_beginning_of_its_arguments(parser: Any) -> None:
    (call,) = stream(parser, '<tool_call>{"name": "paint", "arguments": {"text": "a </tool_call> b', 5)
    assert call == {"name": "paint", "arguments": '{"text": "a </tool_call> b'}
