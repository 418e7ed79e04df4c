"""Chat requests are bounded before vLLM's models parse them."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tinker_server.backends.protocol import ChatEndpoint
from tinker_server.chat import bounds, requests
from tinker_server.chat.requests import read, receive
from tinker_server.errors import BadField

USER = {"role": "user", "content": "hello"}


def body(endpoint: str = "chat_completions", **fields: Any) -> bytes:
    needed = {"model": "m"} if endpoint == "completions" else {"model": "m", "messages": [USER]}
    return json.dumps({**needed, **fields}).encode()


@pytest.mark.parametrize("endpoint", ["chat_completions", "messages", "count_tokens"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [0] * 1_000_000}, "messages has 1000000 items; 8192 are allowed"),
        ({"messages": [0]}, "messages.0 is a number; it must be an object"),
        ({"messages": 5}, "messages is a number; it must be a list of objects"),
        ({"messages": [USER, "x"]}, "messages.1 is a text"),
        ({"messages": [{"role": "user", "content": [0] * 300_000}]}, "messages.0.content has 300000 items"),
        ({"messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0 is null"),
        ({"messages": [{"role": "user", "content": [{"content": [[]]}]}]}, "messages.0.content.0.content.0 is a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [True]}]}, "messages.0.tool_calls.0 is true or false"),
        ({"messages": [{"role": "user", "content": [{}] * 5000}] * 4}, "messages has more than 8192 parts"),
        ({"tools": [1]}, "tools.0 is a number"),
        ({"tools": [{}] * 2000}, "tools has 2000 items; 1024 are allowed"),
        ({"tools": [{"a": list(range(70_000))}]}, "the request has more than 65536 values"),
    ],
)
def test_lists_are_bounded_and_hold_objects_where_objects_belong(endpoint, fields, named):
    with pytest.raises(BadField, match=named):
        read(endpoint, body(endpoint, **fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stop": ["x"] * 5}, "stop has 5 items; 4 are allowed"),
        ({"stop": [7]}, "stop holds a number; it must hold texts"),
        ({"stop_token_ids": [7] * 1025}, "stop_token_ids has 1025 items; 1024 are allowed"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids holds a text; it must hold token ids"),
        ({"stop": ["x" * 3000]}, "stop has one of 3000 characters; 1024 are allowed"),
        ({"stop": [[]]}, "stop holds a list"),
        ({"stop_token_ids": [{}]}, "stop_token_ids holds an object"),
        ({"logit_bias": {str(token): 1 for token in range(1001)}}, "logit_bias has 1001 tokens; 1000 are allowed"),
        ({"logit_bias": {"1": []}}, "logit_bias must be an object of numbers"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"description": "x" * (1 << 18)}}}},
            r"response_format has 2621\d\d characters; 262144 are allowed for a grammar",
        ),
    ],
)
def test_what_ends_and_bends_an_answer_is_bounded(fields, named):
    with pytest.raises(BadField, match=named):
        read("chat_completions", body(**fields))


async def received(content: bytes, piece_bytes: int) -> bytes:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), piece_bytes):
            yield content[at : at + piece_bytes]

    return bytes(await receive(pieces()))


DATA = "A" * 5000
OPENAI = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}]
CAPITALS = [{"type": "image_url", "image_url": f"DATA:IMAGE/PNG;BASE64,{DATA}"}]
ANTHROPIC = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}]


@pytest.mark.parametrize("piece_bytes", [1, 7, 100])
@pytest.mark.parametrize("image", [OPENAI, CAPITALS, ANTHROPIC], ids=["OpenAI's", "capitals", "Anthropic's"])
async def test_text_is_bounded_before_it_is_parsed_and_images_do_not_count(monkeypatch, piece_bytes, image) -> None:
    monkeypatch.setattr(requests, "MAX_TEXT_BYTES", 1000)
    texts = [{"role": "user", "content": 'say "a" ' * 30}]
    allowed, refused = body(messages=[{"role": "user", "content": image * 3}, *texts]), body(messages=texts * 3)
    assert len(refused) > 1000 > len(body(messages=texts))
    assert await received(allowed, piece_bytes) == allowed
    with pytest.raises(BadField, match="more than 1000 bytes beside its images"):
        await received(refused, piece_bytes)
    with pytest.raises(BadField, match="more than 1000 bytes beside its images"):
        await received(body(messages=[{"role": "user", "content": "x" * 1000}]), piece_bytes)
    monkeypatch.setattr(requests, "MAX_IMAGE_CHARS", 4000)
    with pytest.raises(BadField, match="an image of more than 4000 characters"):
        await received(allowed, piece_bytes)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"prompt": "data:" + DATA}),
        ("completions", {"prompt": ["data:" + DATA, "b"]}),
        ("chat_completions", {"messages": [{"role": "user", "content": "data:" + DATA}]}),
        ("chat_completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "data:" + DATA}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "system": "data:" + DATA, "max_tokens": 1}),
    ],
)
def test_a_text_that_begins_as_an_image_does_is_a_text(monkeypatch, endpoint, fields) -> None:
    monkeypatch.setattr(requests, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(BadField, match="more than 1000 bytes beside its images"):
        read(endpoint, body(endpoint, **fields))
    for image in (OPENAI, ANTHROPIC):
        kind: ChatEndpoint = "messages" if image is ANTHROPIC else "chat_completions"
        read(kind, body(kind, messages=[{"role": "user", "content": image}], max_tokens=1))


@pytest.mark.parametrize("field", ["structures", "triggers"])
def test_a_structural_tag_without_a_format_is_refused_by_name(field):
    with pytest.raises(BadField, match=r"response_format\.structures is not supported; structural_tag takes a format"):
        read("chat_completions", body(response_format={"type": "structural_tag", field: []}))


@pytest.mark.parametrize("prompt", [[1, "a"], [[1], 2], [["a"]], [{}], {}, [], 7, [True], [1.5]])
def test_a_prompt_is_text_or_token_ids(prompt):
    with pytest.raises(BadField, match="prompt must be a text, a list of texts, a list of token ids"):
        read("completions", body("completions", prompt=prompt))


@pytest.mark.parametrize("prompt", ["text", ["one", "other"], [1, 2, 3], [[1, 2], [3]], list(range(262_144))])
def test_prompts_of_every_kind_are_let_in(prompt):
    assert read("completions", body("completions", prompt=prompt)).body["prompt"] == prompt


def test_long_conversations_with_images_and_many_tools_are_let_in():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    turns = [
        {"role": "user", "content": [image, {"type": "text", "text": "what, then, is, this? " * 50}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "[1, 2, 3]" * 100},
    ]
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {str(i): {} for i in range(50)}}},
    }
    request = read("chat_completions", body(messages=turns * 20 + [USER] * 4000, tools=[tool] * 200))
    messages = request.body["messages"]
    assert isinstance(messages, list) and len(messages) == 4060
    assert bounds.MAX_MESSAGES > 4060


def asking(pattern: str) -> dict[str, Any]:
    schema = {"properties": {"a": {"anyOf": [{"type": "string", "pattern": pattern}]}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("^(([a-z ]{1,900}x?){1,900}y?){1,900}$", "nested repetitions come to 729000000"),
        ("(a|(b{200}?c){200})", "nested repetitions come to 40000"),
        ("(?:(?=x{300})y){300}", "come to 90000"),
        ("a{20000}", "come to 20000"),
        ("a" * 5000, "a pattern of 5000 characters; 4096 are allowed"),
    ],
)
def test_patterns_repeat_a_bounded_number_of_times(pattern, named):
    for fields in (asking(pattern), {"tools": [{"function": asking(pattern)}]}):
        with pytest.raises(BadField, match=named):
            read("chat_completions", body(**fields))


def schema_of(patterns: list[str]) -> dict[str, Any]:
    return {"properties": {str(number): {"pattern": pattern} for number, pattern in enumerate(patterns)}}


@pytest.mark.parametrize("in_tools", [0, 75, 150])
def test_patterns_are_counted_together_before_the_first_is_parsed(in_tools: int) -> None:
    """Each alone is let in, and takes some 30 ms to parse."""
    patterns = [f"{number:04}" + "(a?)" * 1023 for number in range(150)]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema_of(patterns[in_tools:])}}
    tools = [{"function": {"name": "f", "parameters": schema_of(patterns[:in_tools])}}]
    content = body(response_format=form, tools=tools)
    began = time.process_time()
    with pytest.raises(BadField, match=r"response_format and tools have \d+ characters; 16384 are allowed"):
        read("chat_completions", content)
    assert time.process_time() - began < 1
    tools = [{"function": {"name": "f", "parameters": schema_of(patterns[:4])}}]
    assert read("chat_completions", body(tools=tools)).body["tools"] == tools


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}-\d{2}-\d{2}$",
        r"^([a-z0-9]{1,63}\.){1,10}[a-z]{2,63}$",
        r"^(?:[A-Fa-f0-9]{1,4}:){7}[A-Fa-f0-9]{1,4}$",
        r"^\p{L}+[\w-.]*$",
        "^(a+b*)*$",
        "^.{1,10000}$",
    ],
)
def test_patterns_of_everyday_are_let_in(pattern):
    assert read("chat_completions", body(**asking(pattern)))
