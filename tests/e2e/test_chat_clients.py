"""The packages `openai` and `anthropic`, as their users call them, against a real server.

pytest tests/e2e/test_chat_clients.py
"""

import base64
import json
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from tinker import types

from tests.factories import PAINT, photo, present
from tests.servers import KEY, MODEL, Server

MESSAGES: Any = [{"role": "user", "content": "hello world"}]
URI = f"data:image/png;base64,{base64.b64encode(photo(64, 64)).decode()}"
SEEING: Any = [
    {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": URI}}]}
]
TOOLS: Any = [PAINT]


@pytest.fixture(scope="module", params=["/oai/api/v1", "/v1"])
def chatgpt(server: Server, request: pytest.FixtureRequest) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + request.param, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module", params=["/anthropic/api", "/anthropic/api/v1", ""])
def claude(server: Server, request: pytest.FixtureRequest) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url + request.param, api_key=KEY, max_retries=0, timeout=60)


def test_openai_lists_the_models(chatgpt: openai.OpenAI) -> None:
    assert next(iter(chatgpt.models.list())).id == MODEL
    assert chatgpt.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("messages", [MESSAGES, SEEING], ids=["text", "image"])
def test_openai_chats_and_streams_the_same(chatgpt: openai.OpenAI, messages: Any) -> None:
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 8, "seed": 3, "n": 2}
    whole = chatgpt.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert whole.usage.completion_tokens <= 16 and len(whole.choices) == 2
    first = whole.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 3 and first.logprob <= first.top_logprobs[0].logprob
    texts = ["", ""]
    for chunk in chatgpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one.message.content for one in whole.choices]
    assert chunk.usage == whole.usage or chunk.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("messages", [MESSAGES, SEEING], ids=["text", "image"])
def test_openai_responds_and_streams_the_same_as_a_chat(chatgpt: openai.OpenAI, messages: Any) -> None:
    chat = chatgpt.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    parts = messages[0]["content"]
    if isinstance(parts, list):
        parts = [{"type": "input_text", "text": parts[0]["text"]}, {"type": "input_image", "image_url": URI}]
    asked: Any = {
        "model": MODEL,
        "input": [{"role": "user", "content": parts}],
        "max_output_tokens": 8,
        "temperature": 0,
    }
    whole = chatgpt.responses.create(**asked)
    with chatgpt.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert (events[-1].type, last.status) in (
        ("response.incomplete", "incomplete"),
        ("response.completed", "completed"),
    )
    assert whole.output_text == streamed == last.output_text == chat.choices[0].message.content
    assert whole.usage.input_tokens == last.usage.input_tokens == present(chat.usage).prompt_tokens


def test_openai_stops_at_the_strings_it_is_given(chatgpt: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    text = chatgpt.chat.completions.create(**asked).choices[0].message.content
    readable = next(one for one in text if one.isalnum())
    stopped = chatgpt.chat.completions.create(**asked, stop=readable).choices[0]
    assert stopped.message.content == text[: text.index(readable)] and stopped.finish_reason == "stop"


def test_openai_calls_tools(chatgpt: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 90}
    (call,) = chatgpt.chat.completions.create(**asked, temperature=0).choices[0].message.tool_calls
    assert call.function.name == "paint" and set(json.loads(call.function.arguments)) == {"red"}
    arguments = ""
    for chunk in chatgpt.chat.completions.create(**asked, temperature=0, stream=True):
        for streamed in chunk.choices[0].delta.tool_calls or []:
            arguments += streamed.function.arguments or ""
    assert json.loads(arguments) == json.loads(call.function.arguments)


def test_openai_completes_and_its_errors_are_its_own(chatgpt: openai.OpenAI, server: Server) -> None:
    done = chatgpt.completions.create(model=MODEL, prompt=["hello", "world"], max_tokens=3, logprobs=1, seed=1)
    assert len(done.choices) == 2 and len(present(present(done.choices[0].logprobs).token_logprobs)) == 3
    with pytest.raises(openai.NotFoundError, match="is not served here") as unknown:
        chatgpt.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature is 5") as bad:
        chatgpt.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        list(chatgpt.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10**6, stream=True))
    with pytest.raises(openai.AuthenticationError, match="key"):
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="sk-none", max_retries=0).models.list()


def test_anthropic_writes_and_streams_the_same(claude: anthropic.Anthropic) -> None:
    data = base64.b64encode(photo(64, 64)).decode()
    content: Any = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "text", "text": "what"},
    ]
    asked: Any = {
        "model": MODEL,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},  # of which the package's own types say nothing any more
        "system": "a small system",
        "messages": [{"role": "user", "content": content}],
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().stop_reason == whole.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(**{key: asked[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_calls_tools_and_its_errors_are_its_own(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "paint", "strict": True, "input_schema": TOOLS[0]["function"]["parameters"]}
    called = claude.messages.create(
        model=MODEL,
        max_tokens=90,
        messages=MESSAGES,
        tools=[tool],
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    )
    (block,) = [one for one in called.content if one.type == "tool_use"]
    assert block.name == "paint" and set(block.input) == {"red"} and called.stop_reason == "tool_use"
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        claude.messages.create(model="other", max_tokens=3, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match=r"thinking is .*enabled.*supported is"):
        claude.messages.create(
            model=MODEL, max_tokens=3000, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 2000}
        )


def test_a_rollout_of_trained_weights_trains_without_tokenising_again(server: Server) -> None:
    """Its tokens and log probabilities are those of a sample of the SDK, by the path and with its base model."""
    service = server.client()
    training = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(5, 15))),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.arange(6, 16)),
            "weights": types.TensorData.from_numpy(np.ones(10, np.float32)),
        },
    )
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    path = training.save_weights_for_sampler(name="chat").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0, timeout=60)
    for name in (path, f"{MODEL};{path}"):
        answer = client.chat.completions.create(
            model=name,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        choice: Any = answer.choices[0]
        tokens = answer.prompt_token_ids  # type: ignore[attr-defined]
        sampled = sampler.sample(
            types.ModelInput.from_ints(tokens), 1, types.SamplingParams(max_tokens=8, temperature=0)
        ).result()
        assert choice.token_ids == list(sampled.sequences[0].tokens) and answer.model == name
        logprobs = [one.logprob for one in choice.logprobs.content]
        np.testing.assert_allclose(logprobs, present(sampled.sequences[0].logprobs), atol=1e-4)
    old = [one.logprob for one in choice.logprobs.content]
    rollout = types.Datum(
        model_input=types.ModelInput.from_ints([*tokens, *choice.token_ids[:-1]]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array([*tokens[1:], *choice.token_ids])),
            "logprobs": types.TensorData.from_numpy(np.array([0] * (len(tokens) - 1) + old, np.float32)),
            "advantages": types.TensorData.from_numpy(np.array([0] * (len(tokens) - 1) + [1] * len(old), np.float32)),
        },
    )
    done = training.forward_backward([rollout], "importance_sampling").result()
    scored = done.loss_fn_outputs[0]["logprobs"].to_numpy()[len(tokens) - 1 :]
    np.testing.assert_allclose(scored, old, atol=1e-3)
