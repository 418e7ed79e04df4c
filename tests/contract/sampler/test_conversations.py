"""What vendors mean by a request, where vLLM's own handlers say less: messages that are continued, calls that are cut.

pytest tests/contract/sampler/test_conversations.py
"""

import json
from typing import Any

import pytest
from pydantic_core import from_json
from transformers import AutoProcessor

from tests.chats import TEXT, as_model_input, chat, emitted, events, logprobs
from tests.factories import PAINT
from tests.sampling import assert_close
from tinker_server.backends.protocol import ChatEndpoint, InvalidInput

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_conversation_that_ends_with_the_assistant_is_continued_in_anthropics_form(sampler, tiny_vl):
    begun = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a small"}]
    processor = AutoProcessor.from_pretrained(tiny_vl)
    expected = processor.tokenizer.encode(
        processor.apply_chat_template(begun, tokenize=False, continue_final_message=True), add_special_tokens=False
    )
    own: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    openai = await chat(sampler, begun, max_tokens=12, temperature=0, **own)
    assert openai["prompt_token_ids"] == expected
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "small"}]
    for last in ("a small", parts):
        asked: dict[str, Any] = {"messages": [begun[0], {"role": "assistant", "content": last}]}
        (counted,), _ = await emitted(sampler, "count_tokens", **asked)
        assert json.loads(counted)["input_tokens"] == len(expected)
        (part,), usage = await emitted(sampler, "messages", **asked, max_tokens=12, temperature=0)
        assert usage.prompt == len(expected)
        text = json.loads(part)["content"][0]["text"]
        assert text == openai["choices"][0]["message"]["content"]
        streamed, _ = await emitted(sampler, "messages", stream=True, **asked, max_tokens=12, temperature=0)
        deltas = [one["delta"] for one in events(streamed) if one["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == text
    endpoints: list[tuple[ChatEndpoint, dict[str, Any]]] = [("messages", {"max_tokens": 2}), ("count_tokens", {})]
    for endpoint, more in endpoints:
        empty = [begun[0], {"role": "assistant", "content": ""}]
        counts = [(await emitted(sampler, endpoint, messages=one, **more))[1] for one in (begun[:1], empty)]
        assert counts[0].prompt == counts[1].prompt


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a small ", r"messages\.1: the last message is the assistant's, so it must not end with white space"),
        ([{"type": "tool_use", "id": "a", "name": "paint", "input": {}}], r"messages\.1\.content\.0: .* not tool_use"),
        ([{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}], r"content\.1: .* not thinking"),
    ],
)
async def test_a_last_message_that_cannot_be_continued_is_refused_by_name(sampler, content, text):
    messages = [TEXT[1], {"role": "assistant", "content": content}]
    for stream in (False, True):
        with pytest.raises(InvalidInput, match=text):
            await emitted(sampler, "messages", messages=messages, max_tokens=2, stream=stream)
    with pytest.raises(InvalidInput, match=text):
        await emitted(sampler, "count_tokens", messages=messages)


async def test_a_bias_moves_log_probabilities_as_it_moves_logits_and_no_further(sampler, reference, renderer):
    plain = await chat(sampler, TEXT, temperature=0, max_tokens=3)
    at, first = len(plain["prompt_token_ids"]), plain["choices"][0]["token_ids"][0]
    zero = await chat(sampler, TEXT, temperature=0, max_tokens=3, logit_bias={"7": 0, str(first): 0})
    assert logprobs(zero["choices"][0]).tolist() == logprobs(plain["choices"][0]).tolist()
    biases = {7: 3.0, first: -2.5, 11: -100.0}
    given = {str(token): bias for token, bias in biases.items()}
    biased = await chat(sampler, TEXT, max_tokens=1, n=16, seed=1, logit_bias=given)
    model_input = as_model_input(plain["prompt_token_ids"], [], renderer)
    logits_V = reference.logprobs_TV(model_input, [], None)[at - 1].clone()
    for token, bias in biases.items():
        logits_V[token] += bias
    expected_V = logits_V.log_softmax(-1).numpy()
    for choice in biased["choices"]:
        assert_close(logprobs(choice), expected_V[choice["token_ids"]])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_only_echoed_counts_no_completion_token(sampler, stream):
    asked: dict[str, Any] = {"prompt": [list(range(5, 25)), list(range(5, 9))], "n": 2, "logprobs": 1}
    asked |= {"max_tokens": 0, "echo": True, "return_token_ids": True, "stream": stream}
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    parts, usage = await emitted(sampler, "completions", **asked, **more)
    answers = events(parts) if stream else [json.loads(parts[0])]
    assert (usage.prompt, usage.sampled) == (24, 0)
    counted = answers[-1]["usage"]
    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (24, 0, 24)
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert not any(choice.get("token_ids") for choice in choices)
    assert {choice["finish_reason"] for choice in choices} <= {"length", None}


CALLING = {"messages": TEXT, "tools": [PAINT], "tool_choice": "required", "temperature": 0}


@pytest.mark.parametrize("max_tokens", [10, 25, 120])
async def test_a_call_is_the_same_in_a_stream_and_in_a_whole_answer_wherever_it_is_cut(sampler, max_tokens):
    asked = {**CALLING, "max_tokens": max_tokens, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    (part,), _ = await emitted(sampler, "chat_completions", **asked)
    (choice,) = json.loads(part)["choices"]
    streamed, _ = await emitted(sampler, "chat_completions", stream=True, **asked)
    deltas = [one["choices"][0] for one in events(streamed) if one["choices"]]
    ended = [one["finish_reason"] for one in deltas if one.get("finish_reason")]
    assert [choice["finish_reason"]] == ended == ["tool_calls" if max_tokens == 120 else "length"]
    functions = [call["function"] for one in deltas for call in one["delta"].get("tool_calls", ())]
    arguments = "".join(one.get("arguments") or "" for one in functions)
    calls = choice["message"].get("tool_calls") or []
    assert "".join(call["function"]["arguments"] for call in calls) == arguments
    assert [call["function"]["name"] for call in calls] == [one["name"] for one in functions if one.get("name")]
    assert choice["token_ids"] == [token for one in deltas for token in one.get("token_ids") or ()]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) <= max_tokens
    assert (max_tokens < 120 or json.loads(arguments)) and "<tool_call>" not in (choice["message"]["content"] or "")


@pytest.mark.parametrize("max_tokens", [25, 120])
async def test_a_call_in_anthropics_form_has_what_its_stream_gives_of_its_input(sampler, max_tokens):
    tool = {"name": "paint", "input_schema": PAINT["function"]["parameters"], "strict": True}
    asked = {"messages": TEXT[1:], "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": max_tokens}
    (part,), _ = await emitted(sampler, "messages", **asked, temperature=0)
    whole = json.loads(part)
    streamed, _ = await emitted(sampler, "messages", **asked, temperature=0, stream=True)
    found = events(streamed)
    ended = next(one["delta"]["stop_reason"] for one in found if one["type"] == "message_delta")
    assert whole["stop_reason"] == ended == ("tool_use" if max_tokens == 120 else "max_tokens")
    text = "".join(one["delta"].get("partial_json") or "" for one in found if one["type"] == "content_block_delta")
    started = [one["content_block"]["name"] for one in found if one["type"] == "content_block_start"]
    calls = [one for one in whole["content"] if one["type"] == "tool_use"]
    assert [one["name"] for one in calls] == started
    assert [one["input"] for one in calls] == [from_json(text or "{}", allow_partial="trailing-strings")][: len(calls)]
