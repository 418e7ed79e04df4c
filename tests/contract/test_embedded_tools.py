"""The model that comes with the server calls tools: its template, and every client's form of them on its engine.

pytest tests/contract/test_embedded_tools.py
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from tests.chats import chat, emitted, events
from tests.engines import fork_sampler
from tests.factories import PAINT
from tests.sampling import sampler_config
from tinker_server.backends.families.registry import tool_parser
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.embedded import DIRECTORIES, TINY_VL

pytestmark = pytest.mark.asyncio(loop_scope="module")
DIRECTORY = DIRECTORIES[TINY_VL]
SEEDS = range(12)
ASKED = [{"role": "system", "content": "You paint."}, {"role": "user", "content": "Paint it red."}]
LOOSE = {"type": "function", "function": {"name": "paint", "parameters": PAINT["function"]["parameters"]}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "paint", "arguments": '{"red": 1}'}}
PLAIN = "<|im_start|>system\nYou paint.<|im_end|>\n<|im_start|>user\nPaint it red.<|im_end|>\n<|im_start|>assistant\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerPool]:
    running = SamplerPool(sampler_config(DIRECTORY, tmp_path_factory.mktemp("scratch")), fork_sampler)
    await running.start()
    yield running
    await running.stop()


def write(messages: list[dict[str, Any]], **more: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))


async def test_the_template_teaches_calls_in_a_form_that_is_parsed_and_leaves_other_chats_as_they_were() -> None:
    assert tool_parser((DIRECTORY / "chat_template.jinja").read_text()) == "hermes"
    assert write(ASKED) == PLAIN
    taught = write(ASKED, tools=[PAINT])
    assert taught.startswith("<|im_start|>system\nYou paint.\n\nYou may call these functions:\n<tools>\n{")
    assert json.loads(taught.partition("<tools>\n")[2].partition("\n</tools>")[0]) == PAINT
    assert taught.endswith("<|im_start|>user\nPaint it red.<|im_end|>\n<|im_start|>assistant\n")


async def test_a_call_and_its_result_are_written_as_the_model_was_told() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    written = write([*ASKED, called, result], tools=[PAINT])
    call = '<tool_call>\n{"name": "paint", "arguments": {"red": 1}}\n</tool_call>'
    answered = "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert written.endswith(f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n{answered}")


@pytest.mark.parametrize("tool", [LOOSE, PAINT], ids=["loose", "strict"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
async def test_a_call_that_is_required_has_an_object_for_arguments_unless_it_is_cut(
    sampler: SamplerPool, tool: dict[str, Any], choice: Any
) -> None:
    asked = {"tools": [tool], "tool_choice": choice, "max_tokens": 400, "temperature": 1}
    answers = await asyncio.gather(*(chat(sampler, ASKED, seed=seed, **asked) for seed in SEEDS))
    ended = set()
    for answer in answers:
        (one,) = answer["choices"]
        ended.add(one["finish_reason"])
        for call in one["message"]["tool_calls"] if one["finish_reason"] != "length" else ():
            assert call["function"]["name"] == "paint"
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict) and (tool is LOOSE or set(arguments) == {"red"})
        if one["finish_reason"] == "length":
            assert len(one["token_ids"]) == asked["max_tokens"]
    whole = "tool_calls" if choice == "required" else "stop"  # as OpenAI answers for a tool that is named
    assert whole in ended <= {whole, "length"}


async def test_claude_codes_form_gets_the_same_call(sampler: SamplerPool) -> None:
    tool = {"name": "paint", "input_schema": PAINT["function"]["parameters"], "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Paint it red."}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "paint", "input": {"red": True}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}]},
    ]
    body: dict[str, Any] = {
        "system": "You paint.",
        "messages": messages,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    for seed in SEEDS:
        (part,), _ = await emitted(sampler, "messages", **body, max_tokens=60, temperature=1, seed=seed)
        answer = json.loads(part)
        parts, _ = await emitted(sampler, "messages", **body, max_tokens=60, temperature=1, seed=seed, stream=True)
        started = [one["content_block"]["name"] for one in events(parts) if one["type"] == "content_block_start"]
        calls = [one for one in answer["content"] if one["type"] == "tool_use"]
        assert [one["name"] for one in calls] == started == ["paint"] * len(calls), (answer, parts)
        assert answer["stop_reason"] in ("tool_use", "max_tokens") and all(
            isinstance(one["input"], dict) for one in calls
        )
