"""Requests in the shapes that programs for people send: Open WebUI, LiteLLM, Claude Code. All are answered.

The shapes follow these programs' public documentation; the values are ours.

pytest tests/contract/test_chat_programs.py
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.dashboard import Owner, with_keys

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ASKED = {"role": "user", "content": "What is this?"}
CACHED = {"type": "ephemeral"}
EDIT = {
    "name": "Edit",
    "description": "Edits a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
OPENAI_HEADERS = {"user-agent": "OpenAI/Python", "x-stainless-lang": "python", "x-stainless-retry-count": "0"}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219",
    "user-agent": "claude-cli/2.0 (external, cli)",
    "x-app": "cli",
}

OPEN_WEBUI: list[dict[str, Any]] = [
    {"stream": True, "messages": [SYSTEM, ASKED], "stream_options": {"include_usage": True}},
    {"stream": True, "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]}]},
    {
        "stream": True,
        "messages": [ASKED],
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 128,
        "seed": 1,
        "stop": ["x"],
    },
    {"stream": False, "messages": [ASKED], "max_completion_tokens": 1000},
]
"""A chat, one with an image, one with all of a model's parameters, and the request for its title."""
LITELLM: list[dict[str, Any]] = [
    {"messages": [ASKED]},
    {"messages": [ASKED], "temperature": 0.2, "max_tokens": 10, "user": "u", "metadata": None, "stop": None},
    {"messages": [ASKED], "stream": True, "stream_options": {"include_usage": True}, "service_tier": "auto"},
    {"messages": [ASKED], "tools": [LOOK], "tool_choice": "auto", "parallel_tool_calls": True},
    {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "a boat"},
        ],
        "tools": [LOOK],
    },
]
CLAUDE_CODE: list[dict[str, Any]] = [
    {
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "system": [{"type": "text", "text": "You edit code.", "cache_control": CACHED}],
        "tools": [EDIT | {"cache_control": CACHED}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Rename it.", "cache_control": CACHED}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "Edit", "input": {"path": "a"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done", "is_error": False}],
            },
        ],
    },
    {"max_tokens": 512, "system": [], "messages": [ASKED], "tools": [], "metadata": {"user_id": "u"}, "temperature": 0},
]
"""A step of an agent, with the settings in docs/chat.md; and a small request, such as for a title."""


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    server, (key,) = with_keys(tmp_path_factory.mktemp("programs"), "alice")
    with Owner(server, key) as alice:
        yield alice
    server.stop()


def ask(alice: Owner, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    signed = headers | {"authorization": f"Bearer {alice.key}"}
    return httpx.post(f"{alice.server.url}{path}", json={"model": "tiny"} | body, headers=signed, timeout=20)


@pytest.mark.parametrize("body", OPEN_WEBUI)
def test_open_webui_is_answered(alice: Owner, body: dict[str, Any]) -> None:
    headers = {"x-openwebui-user-name": "Alice", "x-openwebui-chat-id": "1"}
    listed = httpx.get(f"{alice.server.url}/v1/models", headers=headers | {"authorization": f"Bearer {alice.key}"})
    assert "tiny" in [one["id"] for one in listed.json()["data"]]
    answered = ask(alice, "/v1/chat/completions", body, headers)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize("body", LITELLM)
def test_litellm_is_answered(alice: Owner, body: dict[str, Any]) -> None:
    answered = ask(alice, "/v1/chat/completions", body, OPENAI_HEADERS)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize("body", CLAUDE_CODE)
def test_claude_code_is_answered(alice: Owner, body: dict[str, Any]) -> None:
    answered = ask(alice, "/v1/messages?beta=true", body, CLAUDE_HEADERS)
    assert answered.status_code == 200, answered.text
    counted = {name: body[name] for name in ("system", "messages", "tools")}
    answered = ask(alice, "/v1/messages/count_tokens?beta=true", counted, CLAUDE_HEADERS)
    assert answered.status_code == 200, answered.text
