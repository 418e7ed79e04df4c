"""vLLM's models keep one error of a chat body that is wrong everywhere."""

import tracemalloc
from typing import Any

import pytest

from tinker_server.backends.protocol import ChatEndpoint, ChatTask, InvalidInput
from tinker_server.backends.sampler.engine.chat.requests import parse
from tinker_server.chat.bounds import MAX_STOPS

USER = {"role": "user", "content": "hello"}
COUNT = 20_000
WRONG: dict[str, tuple[ChatEndpoint, dict[str, Any]]] = {
    "token ids below 0": ("completions", {"prompt": [-1] * COUNT}),
    "lists of token ids below 0": ("completions", {"prompt": [[-1] * COUNT]}),
    "messages": ("chat_completions", {"messages": [{}] * COUNT}),
    "tools": ("chat_completions", {"messages": [USER], "tools": [{}] * COUNT}),
    "stop tokens": ("chat_completions", {"messages": [USER], "stop_token_ids": ["a"] * COUNT}),
    "parts of a message of Anthropic's": ("messages", {"messages": [{"role": "user", "content": [{}] * COUNT}]}),
    "parts of its system prompt": ("messages", {"messages": [USER], "system": [{}] * COUNT}),
    "messages to count": ("count_tokens", {"messages": [{}] * COUNT}),
}


def read(endpoint: ChatEndpoint, fields: dict[str, Any]) -> Any:
    return parse(ChatTask(endpoint, {"model": "m", "max_tokens": 1, **fields}, None, "somebody"))


@pytest.mark.parametrize("name", WRONG)
def test_the_first_error_of_a_list_is_the_last_that_is_kept(name: str) -> None:
    endpoint, fields = WRONG[name]
    with pytest.raises(InvalidInput):
        read(endpoint, fields)  # so that what is made once is there
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput) as refused:
            read(endpoint, fields)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(refused.value).split(".")[0] in (*fields, "0")  # vLLM validates some fields beforehand
    assert most < 50 * COUNT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ["x"] * 5}, r"stop\..*list.*: List should have at most 4 items after validation, not 5"),
        ({"stop": 5}, "stop.str: Input should be a valid string"),
    ],
)
def test_the_error_of_a_text_or_list_is_that_of_the_form_that_was_meant(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read("chat_completions", {"messages": [USER], **fields})


def test_the_server_allows_as_many_stops_as_the_engine() -> None:
    fields: tuple[tuple[ChatEndpoint, str], ...] = (("chat_completions", "stop"), ("messages", "stop_sequences"))
    for endpoint, field in fields:
        read(endpoint, {"messages": [USER], field: ["x"] * MAX_STOPS[field]})
        with pytest.raises(InvalidInput, match="at most"):
            read(endpoint, {"messages": [USER], field: ["x"] * (MAX_STOPS[field] + 1)})


def test_right_requests_are_read_as_vllm_reads_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "hello"}]}] * 3
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    request = read("chat_completions", {"messages": messages, "tools": tools, "stop": ["a", "b"], "stream": True})
    assert len(request.messages) == 3 and request.tools[0].function.name == "f" and request.stop == ["a", "b"]
    assert read("completions", {"prompt": [[1, 2], [3]]}).prompt == [[1, 2], [3]]
    assert read("messages", {"messages": [USER] * 2}).messages[1].content == "hello"
