"""Nested fields of a chat request are honoured, harmless, or refused by their path."""

import json
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall

from tinker_server.chat.requests import read
from tinker_server.chat.responses import Translation, to_chat
from tinker_server.errors import BadField

IMAGE = "data:image/png;base64,AAAA"
TOOL = {"name": "paint", "description": "Paint.", "parameters": {"type": "object", "x-unknown": 1}, "strict": True}
CALL = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
BLOCK = {"type": "text", "text": "b"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "c"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
DRAWN = {"type": "image_url", "image_url": {"url": IMAGE}}


def chat(message: dict[str, Any] | None = None, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "a"}, *([message] if message else [])]
    return json.dumps({"model": "m", "max_tokens": 4, "messages": messages, **fields}).encode()


def said(*parts: dict[str, Any], role: str = "user") -> bytes:
    return chat({"role": role, "content": list(parts)})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (said(DRAWN | {"image_url": {"url": IMAGE, "detail": "low"}}), "messages.1.content.0.image_url.detail is low"),
        (
            said(DRAWN | {"image_url": {"url": IMAGE, "size": 3}}),
            "messages.1.content.0.image_url.size is not supported",
        ),
        (said(DRAWN | {"uuid": "a"}), "messages.1.content.0.uuid is not supported"),
        (said({"type": "input_audio", "input_audio": {}}), "messages.1.content.0.type is input_audio"),
        (said({"type": "file", "file": {"file_id": "a"}}), "messages.1.content.0.type is file"),
        (chat({"role": "user", "content": "a", "weight": 0}), "messages.1.weight is not supported"),
        (
            chat({"role": "assistant", "content": None, "function_call": {"name": "paint", "arguments": "{}"}}),
            "messages.1.function_call is not supported",
        ),
        (chat({"role": "assistant", "content": "", "audio": {"id": "a"}}), "messages.1.audio is not supported"),
        (chat({"role": "assistant", "content": "", "refusal": "no"}), "messages.1.refusal is no"),
        (
            chat({"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]}),
            "messages.1.tool_calls.0.type is custom",
        ),
        (chat(tools=[{"type": "function", "function": TOOL | {"examples": []}}]), "tools.0.function.examples is not"),
        (chat(tools=[{"type": "custom", "custom": {}}]), "tools.0.type is custom"),
        (chat(tool_choice={"type": "allowed_tools", "allowed_tools": {}}), "tool_choice.type is allowed_tools"),
        (chat(stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation is True"),
    ],
)
def test_a_nested_field_of_openai_that_would_be_dropped_is_refused_by_its_path(content: bytes, text: str) -> None:
    with pytest.raises(BadField, match=f"^{re.escape(text)}"):
        read("chat_completions", content)


@pytest.mark.parametrize("endpoint", ["messages", "count_tokens"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (said(RESULT | {"content": [{"type": "document"}]}), "messages.1.content.0.content.0.type is document"),
        (said(RESULT | {"content": [BLOCK | {"colour": 1}]}), "messages.1.content.0.content.0.colour is not"),
        (said(RESULT, role="assistant"), "messages.1.content.0.type is tool_result"),
        (said({"type": "redacted_thinking", "data": "a"}, role="assistant"), "messages.1.content.0.type is redacted_"),
        (
            said({"type": "image", "source": {"type": "file", "file_id": "a"}}),
            "messages.1.content.0.source.type is file",
        ),
        (said(BLOCK | {"citations": [{"type": "char_location"}]}), "messages.1.content.0.citations is "),
        (chat(system=[{"type": "image", "source": SOURCE}]), "system.0.type is image"),
        (chat(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools.0.type is web_search_20250305"),
        (chat(tools=[{"name": "a", "input_schema": {}, "input_examples": [{}]}]), "tools.0.input_examples is "),
        (chat(tool_choice={"type": "auto", "name": "a"}), "tool_choice.name is not supported"),
    ],
)
def test_a_nested_field_of_anthropic_that_would_be_dropped_is_refused_by_its_path(
    endpoint: Any, content: bytes, text: str
) -> None:
    body = json.loads(content)
    if endpoint == "count_tokens":
        del body["max_tokens"]
    with pytest.raises(BadField, match=f"^{re.escape(text)}"):
        read(endpoint, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "input_image", "image_url": IMAGE, "detail": "low"}, "input.0.content.0.detail is low"),
        ({"type": "input_text", "text": "a", "colour": 1}, "input.0.content.0.colour is not supported"),
        ({"type": "output_text", "text": "a", "annotations": [{}]}, "input.0.content.0.annotations is "),
    ],
)
def test_a_nested_field_of_responses_that_would_be_dropped_is_refused_by_its_path(
    item: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadField, match=f"^{re.escape(text)}"):
        to_chat({"model": "m", "input": [{"role": "user", "content": [item]}]})


def test_answers_of_the_server_come_back_as_openais_package_writes_them() -> None:
    call = ChatCompletionMessageFunctionToolCall.model_validate(CALL)
    answer = ChatCompletionMessage(role="assistant", content="a", tool_calls=[call], annotations=[])
    for message in (answer.model_dump(), answer.model_dump(exclude_none=True)):
        read("chat_completions", chat(message))
    whole = {"choices": [{"message": {"content": "a", "tool_calls": [CALL]}, "finish_reason": "stop"}]}
    response = json.loads(Translation({"model": "m"}).whole(json.dumps(whole)))
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "b"}]}
    assert len(to_chat({"model": "m", "input": [*response["output"], output]})["messages"]) == 2


def test_what_openais_clients_send_without_effect_is_accepted() -> None:
    parts = [DRAWN | {"image_url": {"url": IMAGE, "detail": "auto"}}, BLOCK | {"cache_control": {"type": "ephemeral"}}]
    tools = [{"type": "function", "function": TOOL, "cache_control": {"type": "ephemeral"}}]
    read("chat_completions", chat({"role": "user", "name": "Ann", "content": parts}, tools=tools))
    read("chat_completions", chat({"role": "tool", "tool_call_id": "a", "content": "b"}))


def test_what_anthropics_clients_send_without_effect_is_accepted() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "a", "signature": ""}
    used = {"type": "tool_use", "id": "a", "name": "paint", "input": {"x": {"y": 1}}, "caller": {"type": "direct"}}
    read("messages", said(thought, BLOCK | {"citations": None}, used | cached, role="assistant"))
    image = {"type": "image", "source": SOURCE} | cached
    failed = RESULT | {"is_error": True, "content": [BLOCK | cached, image]}
    tool = {"name": "paint", "input_schema": {"type": "object"}, "eager_input_streaming": True} | cached
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    read("messages", chat({"role": "user", "content": [failed | cached]}, tools=[tool], tool_choice=choice))
    read("messages", chat(system=[BLOCK | cached]))
