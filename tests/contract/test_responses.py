"""OpenAI's Responses: the package `openai` against a server whose sampler answers as vLLM's handler of chats does.

pytest tests/contract/test_responses.py
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseErrorEvent

from tests.dashboard import Owner, with_keys
from tinker_server.backends.protocol import BackendFailed, ChatTask, ChatUsage
from tinker_server.chat.responses import LABELS, WITHOUT_EFFECT, Translation

PICTURE = "data:image/png;base64,iVBORw0KGgo="
PAINT: Any = {"type": "function", "name": "paint", "parameters": {"type": "object"}, "strict": True}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}


async def answer(task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
    """Say "a boat", then call the tool if there is one; as vLLM's handler has it, whole or in events. Of three tokens a
    stream dies."""
    has_tools, is_cut = bool(task.body.get("tools")), task.body.get("max_completion_tokens") == 2
    call = {"id": "call_1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": 1}'}}
    ended = "length" if is_cut else "tool_calls" if has_tools else "stop"
    if not task.body.get("stream"):
        message = {"role": "assistant", "content": "a boat", "tool_calls": [call] if has_tools else []}
        tell(json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": ended}], "usage": USAGE}))
        return ChatUsage(7, 2, 3)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": "a "}, {"content": "boat"}]
    if has_tools:
        named = {"name": "paint", "arguments": ""}
        deltas.append({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": named}]})
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ('{"colour"', ": 1}")]
    for delta in deltas:
        tell(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n")
        await asyncio.sleep(0)
    if task.body.get("max_completion_tokens") == 3:
        raise BackendFailed("the engine died")
    tell(f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': ended}]})}\n\n")
    tell(f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n")
    return ChatUsage(7, 2, 3)


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    server, made = with_keys(tmp_path_factory.mktemp("responses"), "alice", "bob")
    sampler = server.backend.tiny.sampler
    plain = sampler.chat

    async def chat(task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
        sampler.chats.append(task)
        return await answer(task, tell)

    sampler.chat = chat  # type: ignore[method-assign]
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        yield alice, bob
    sampler.chat = plain  # type: ignore[method-assign]
    server.stop()


def client(who: Owner) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{who.server.url}/v1", api_key=who.key, max_retries=0, timeout=20)


def authorized(who: Owner) -> dict[str, str]:
    return {"authorization": f"Bearer {who.key}"}


def sent(who: Owner) -> dict[str, Any]:
    """The chat completion that the last request became."""
    return dict(who.server.backend.tiny.sampler.chats[-1].body)


def test_a_response_is_answered_as_a_chat(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    with client(alice) as chatgpt:
        whole = chatgpt.responses.create(model="tiny", input="What is this?", instructions="Be short.", top_p=0.5)
        cut = chatgpt.responses.create(model="tiny", input="What?", max_output_tokens=2, metadata={"a": "b"})
    assert (whole.output_text, whole.status, whole.instructions, whole.top_p) == (
        "a boat",
        "completed",
        "Be short.",
        0.5,
    )
    assert whole.usage is not None and whole.usage.input_tokens_details.cached_tokens == 2
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (7, 3, 10)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens" and cut.metadata == {"a": "b"}
    assert [item.status for item in (*whole.output, *cut.output)] == ["completed", "incomplete"]  # type: ignore[union-attr]
    body = sent(alice)
    assert body["messages"] == [{"role": "user", "content": "What?"}] and body["max_completion_tokens"] == 2
    assert "metadata" not in body


def test_a_call_that_is_cut_is_not_completed(owners: tuple[Owner, Owner]) -> None:
    """Its arguments are half of a JSON; the text before it is whole."""
    asked: dict[str, Any] = {"model": "tiny", "input": "What?", "max_output_tokens": 2, "tools": [PAINT]}
    with client(owners[0]) as chatgpt:
        whole = chatgpt.responses.create(**asked)
        done = [event for event in chatgpt.responses.create(**asked, stream=True)]
    items = [event.item.status for event in done if event.type == "response.output_item.done"]
    assert items == [item.status for item in whole.output] == ["completed", "incomplete"]  # type: ignore[union-attr]


def test_a_message_without_a_type_is_one_where_its_type_is_null_too(owners: tuple[Owner, Owner]) -> None:
    message: Any = {"type": None, "role": "user", "content": "hi"}
    with client(owners[0]) as chatgpt:
        chatgpt.responses.create(model="tiny", input=[message])
    assert sent(owners[0])["messages"] == [{"role": "user", "content": "hi"}]


async def test_a_text_with_other_ends_of_lines_comes_through_a_stream_whole() -> None:
    """vLLM writes them into its JSON as they are."""
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1ce\n\nf\r\ng"

    async def chat() -> AsyncGenerator[str, None]:
        for delta in ({"content": text}, {"content": "."}):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    events = [event async for event in Translation({"model": "tiny"}).events(chat())]
    *_, ended = [json.loads(event.partition("data: ")[2]) for event in events]
    assert ended["type"] == "response.completed"
    assert ended["response"]["output"][0]["content"][0]["text"] == f"{text}."


def test_events_of_a_stream_build_the_same_response(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    with client(alice) as chatgpt:
        with chatgpt.responses.stream(model="tiny", input="Paint.", tools=[PAINT]) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = chatgpt.responses.create(model="tiny", input="Paint.", tools=[PAINT])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    for response in (final, whole):
        said, called = response.output
        assert response.output_text == "a boat" and said.type == "message"
        assert called.type == "function_call"
        assert (called.call_id, called.name, called.arguments) == ("call_1", "paint", '{"colour": 1}')
        assert response.usage is not None and response.usage.total_tokens == 10
    assert sent(alice)["tools"][0]["function"] == {"name": "paint", "parameters": {"type": "object"}, "strict": True}


def test_an_answer_has_every_field_of_openais_schema(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    body = {"model": "tiny", "input": "Paint.", "tools": [PAINT], "metadata": {"a": "b"}}
    answered = httpx.post(f"{alice.server.url}/v1/responses", json=body, headers=authorized(alice))
    Response.model_validate(answered.json())


def test_a_stream_that_fails_ends_with_openais_event_of_an_error(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    asked: Any = {"model": "tiny", "input": "What?", "max_output_tokens": 3, "stream": True}
    failed = httpx.post(f"{alice.server.url}/v1/responses", json=asked, headers=authorized(alice))
    *before, last = failed.text.strip().split("\n\n")
    kind, _, data = last.partition("\n")
    event = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "))
    assert kind == "event: error" and event.sequence_number == len(before)
    assert "the engine died" in event.message
    with client(alice) as chatgpt, pytest.raises(openai.APIError, match="the engine died"):
        list(chatgpt.responses.create(**asked))


def test_an_answer_of_text_and_a_call_becomes_a_single_message_again(owners: tuple[Owner, Owner]) -> None:
    """As two turns the model would read another conversation than it wrote."""
    alice, _ = owners
    with client(alice) as chatgpt:
        first = chatgpt.responses.create(model="tiny", input="Paint.", tools=[PAINT])
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
        seen: Any = [{"role": "user", "content": "Paint."}, *first.output, result]
        chatgpt.responses.create(model="tiny", input=seen, tools=[PAINT])
    _, said, _ = sent(alice)["messages"]
    assert said["content"] == [{"type": "text", "text": "a boat"}]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["paint"]


def test_the_effort_of_reasoning_is_that_of_chat_completions_and_comes_back(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    reasoning: Any = {"effort": "low", "summary": "auto"}
    with client(alice) as chatgpt:
        include: Any = ["reasoning.encrypted_content"]
        answer = chatgpt.responses.create(
            model="tiny", input="What?", reasoning=reasoning, include=include, store=False
        )
        assert sent(alice)["reasoning_effort"] == "low"
        assert answer.reasoning is not None and answer.reasoning.effort == "low"
        chatgpt.responses.create(model="tiny", input="What?", reasoning={})
    assert "reasoning_effort" not in sent(alice)


def test_a_conversation_with_images_and_calls_becomes_messages(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    seen: Any = [
        {"role": "developer", "content": "Look."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": PICTURE}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a boat"}]},
        {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "paint", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    form: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    choice: Any = {"type": "function", "name": "paint"}
    with client(alice) as chatgpt:
        chatgpt.responses.create(model="tiny", input=seen, text={"format": form}, tools=[PAINT], tool_choice=choice)
    body = sent(alice)
    system, asked, said, result = body["messages"]
    assert (system["role"], said["content"]) == ("system", [{"type": "text", "text": "a boat"}])
    assert asked["content"][1] == {"type": "image_url", "image_url": {"url": PICTURE}}
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert body["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "paint"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"store": True}, "store is True; supported is false"),
        ({"reasoning": {"effort": "high", "summary": "detailed"}}, "reasoning.summary is detailed; supported are auto"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget is not supported; supported are effort, summary"),
        ({"reasoning": "high"}, "reasoning must be an object"),
        ({"include": ["file_search_call.results"]}, "include is"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is web_search; supported are function"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type is item_reference; supported are message"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type is input_file"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input.0.content.0.file_id is not supported",
        ),
        ({"input": [3]}, "input.0 must be an object"),
        ({"input": None}, "input must be a text or a list"),
        ({"input": [{"role": "user"}]}, "input.0.content must be a text or a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text must be a text"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input.0.name must be a text"),
        ({"input": [{"type": "function_call", "name": "n", "arguments": "{}"}]}, "input.0.call_id must be a text"),
        ({"input": [{"type": "function_call_output", "output": "done"}]}, "input.0.call_id must be a text"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input.0.output must be a text"),
        ({"instructions": 5}, "instructions must be a text"),
        ({"metadata": [1]}, "metadata must be an object"),
        ({"text": {"verbosity": "high"}}, "text.verbosity is high"),
        ({"temperature": 3}, "temperature is 3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    owners: tuple[Owner, Owner], fields: dict[str, Any], words: str
) -> None:
    alice, _ = owners
    body = {"model": "tiny", "input": "What?"} | fields
    refused = httpx.post(f"{alice.server.url}/v1/responses", json=body, headers=authorized(alice))
    assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text


@pytest.mark.parametrize("path", ["/v1/responses", "/oai/api/v1/responses"])
def test_responses_want_a_key_and_other_owners_weights_are_not_found(owners: tuple[Owner, Owner], path: str) -> None:
    alice, bob = owners
    run_id = alice.new_run()
    weights = alice.post("/save_weights_for_sampler", model_id=run_id, seq_id=1, path="mine")["path"]
    statuses = []
    for key in ("tml-wrong", bob.key, alice.key):
        body = {"model": weights, "input": "What?"}
        answered = httpx.post(f"{alice.server.url}{path}", json=body, headers={"authorization": f"Bearer {key}"})
        statuses.append(answered.status_code)
    assert statuses == [401, 404, 200]


def test_the_documentation_has_every_field_without_effect() -> None:
    text = (Path(__file__).parents[2] / "docs/chat.md").read_text()
    assert all(f"| `{field}` |" in text for field in (*WITHOUT_EFFECT, *LABELS))
