"""Chats in the sampler's process: vLLM's handlers, with the prompts, seeds and fair admission of every other sample.

pytest tests/contract/sampler/test_chat.py
"""

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from tests.chats import TEXT, as_model_input, chat, emitted, events, logprobs
from tests.factories import PAINT, as_image, photo, present
from tests.sampling import assert_close, request, sample, spoilt
from tinker_server.api_schemas.inputs import EncodedTextChunk, ModelInput
from tinker_server.backends.protocol import ChatTask, ChatUsage, InvalidInput
from tinker_server.backends.sampler.commands import CountProgress

pytestmark = pytest.mark.asyncio(loop_scope="package")

PNG, JPEG = photo(96, 64, 1), photo(64, 96, 2, format="jpeg")


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def seeing(*images: bytes) -> list[dict[str, Any]]:
    """A conversation with images between its words."""
    parts = [
        [{"type": "image_url", "image_url": {"url": uri(one)}}, {"type": "text", "text": "what"}] for one in images
    ]
    return [
        {"role": "user", "content": [{"type": "text", "text": "hello"}, *(part for pair in parts for part in pair)]}
    ]


@pytest.mark.parametrize("images", [[], [PNG], [PNG, JPEG], [PNG, PNG]], ids=["text", "image", "two", "twice"])
async def test_a_prompt_is_what_the_processor_makes_and_the_answer_what_a_sample_says(
    sampler, adapters, tiny_vl, renderer, images
):
    messages = seeing(*images) if images else TEXT
    conversation = [{**one, "content": for_processor(one["content"], images)} for one in messages]
    processor = AutoProcessor.from_pretrained(tiny_vl)
    expected = processor.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="np"
    )["input_ids"][0].tolist()

    for weights in (None, adapters["small"]):
        answer = await chat(sampler, messages, weights, temperature=0)
        assert answer["prompt_token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(expected)
        model_input = as_model_input(expected, images, renderer)
        by_task = (await sample(sampler, request(model_input, {"max_tokens": 6, "temperature": 0}), weights)).sequences[
            0
        ]
        (choice,) = answer["choices"]
        assert choice["token_ids"] == by_task.tokens.tolist()
        assert_close(logprobs(choice), by_task.logprobs)


def for_processor(content: str | list[dict[str, Any]], images: list[bytes]) -> str | list[dict[str, Any]]:
    """As transformers has it, with images that are open."""
    remaining = iter(images)
    if isinstance(content, str):
        return content
    return [
        part if part["type"] == "text" else {"type": "image", "image": Image.open(io.BytesIO(next(remaining)))}
        for part in content
    ]


async def test_seeded_choices_are_those_of_a_sample_and_a_stream_says_the_same(sampler, renderer):
    asked: dict[str, Any] = {"n": 3, "seed": 11, "max_tokens": 9}
    whole = await chat(sampler, TEXT, **asked)
    model_input = as_model_input(whole["prompt_token_ids"], [], renderer)
    by_task = await sample(sampler, request(model_input, {"seed": 11, "max_tokens": 9}, num_samples=3), None)
    assert [one["token_ids"] for one in whole["choices"]] == [one.tokens.tolist() for one in by_task.sequences]
    parts, usage = await emitted(
        sampler,
        "chat_completions",
        messages=TEXT,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        **asked,
    )
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    text = {0: "", 1: "", 2: ""}
    for event in events(parts):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids") or []
            text[choice["index"]] += choice["delta"].get("content") or ""
    assert list(streamed.values()) == [one["token_ids"] for one in whole["choices"]]
    assert list(text.values()) == [one["message"]["content"] for one in whole["choices"]]
    final = events(parts)[-1]["usage"]
    assert (final["prompt_tokens"], final["completion_tokens"]) == (usage.prompt, usage.sampled)
    assert usage.sampled == sum(map(len, streamed.values())) and parts[-1] == "data: [DONE]\n\n"


async def test_completions_continue_tokens_and_echo_scores_the_prompt(sampler):
    tokens = list(range(5, 25))
    (part,), usage = await emitted(
        sampler,
        "completions",
        prompt=[tokens, tokens[:4]],
        max_tokens=5,
        temperature=0,
        logprobs=0,
        return_token_ids=True,
    )
    choices = json.loads(part)["choices"]
    assert usage.prompt == 24 and usage.sampled == 10
    for choice, own in zip(choices, (tokens, tokens[:4]), strict=True):
        model_input = ModelInput(chunks=[EncodedTextChunk(tokens=np.array(own, np.int64))])
        by_task = await sample(
            sampler, request(model_input, {"max_tokens": 5, "temperature": 0}, prompt_logprobs=True), None
        )
        assert choice["token_ids"] == by_task.sequences[0].tokens.tolist()
        (echoed,), _ = await emitted(
            sampler, "completions", prompt=own, max_tokens=5, temperature=0, logprobs=1, echo=True
        )
        scores = json.loads(echoed)["choices"][0]["logprobs"]["token_logprobs"]
        assert scores[0] is None
        got = np.array(scores[1:], np.float32)
        assert_close(got, np.concatenate([present(by_task.prompt_logprobs)[1:], by_task.sequences[0].logprobs]))


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_a_stream_of_several_choices_echoes_the_scored_prompt_in_each(sampler, max_tokens):
    """Two prompts of two choices. Only the first choice computes the prompt's log probabilities."""
    asked: dict[str, Any] = {"prompt": [list(range(5, 25)), list(range(5, 9))], "max_tokens": max_tokens}
    asked |= {"n": 2, "echo": True, "logprobs": 1, "seed": 3}
    (whole,), _ = await emitted(sampler, "completions", **asked)
    parts, _ = await emitted(sampler, "completions", stream=True, **asked)
    streamed: dict[int, tuple[str, list[float | None]]] = {}
    for event in events(parts):
        for choice in event["choices"]:
            text, scores = streamed.get(choice["index"], ("", []))
            more = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            streamed[choice["index"]] = text + choice["text"], scores + more
    for choice in json.loads(whole)["choices"]:
        text, scores = streamed[choice["index"]]
        expected = choice["logprobs"]["token_logprobs"]
        assert text == choice["text"] and len(scores) == len(expected)
        assert scores[0] is None and expected[0] is None
        assert_close(np.array(scores[1:], np.float32), np.array(expected[1:], np.float32))


async def test_an_image_placeholder_is_never_drawn_whatever_a_bias_asks(sampler, renderer):
    place = renderer.family.vision.placeholder_id
    for cut in ({}, {"top_p": 0.99}, {"top_k": 5}, {"min_p": 0.01}, {"temperature": 0}):
        answer = await chat(sampler, TEXT, max_tokens=30, logit_bias={str(place): 100}, **cut)
        assert place not in answer["choices"][0]["token_ids"], cut


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "a <|image_pad|> b"}], "placeholder of an image"),
        (
            [{"role": "user", "content": [*seeing(PNG)[0]["content"], {"type": "text", "text": "<|image_pad|>"}]}],
            "places",
        ),
        (seeing(PNG, b"no image"), r"^messages\.0\.content\.3\.image_url\.url: .* not a readable PNG or JPEG"),
        (seeing(PNG, photo(96, 64)[:2000]), r"^messages\.0\.content\.3\.image_url\.url: .* does not decode"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}], "data URI"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
            "data URI",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}]}],
            "base64",
        ),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://a/b"}}]}], "video"),
        (seeing(*[PNG] * 9), "8 image"),
        ([], "messages|empty|template"),
        ([{"role": "user", "content": "x " * 5000}], "4096|context"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(sampler, messages, text):
    for stream in (False, True):
        with pytest.raises(InvalidInput, match=text):
            await emitted(sampler, "chat_completions", messages=messages, max_tokens=4, stream=stream)


@pytest.mark.parametrize(
    ("endpoint", "more"), [("messages", {"max_tokens": 4}), ("count_tokens", {})], ids=["messages", "count"]
)
async def test_an_image_of_anthropics_form_is_refused_by_its_own_field(sampler, endpoint, more):
    """Also where vLLM puts a tool's images before those that come first."""

    def part(data: str, kind: str = "image/png") -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}

    good, cut = (base64.b64encode(data).decode() for data in (PNG, photo(96, 64)[:30]))
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part(good)]}
    for content, text in (
        ([part(good), part("@@")], r"^messages\.0\.content\.1\.source\.data: the image's data is not base64"),
        ([part(good), part(good, "text/plain")], r"^messages\.0\.content\.0\.source\.data: .*media_type image/png"),
        ([part(cut), result], r"^messages\.0\.content\.0\.source\.data: .* not a readable PNG or JPEG"),
    ):
        with pytest.raises(InvalidInput, match=text):
            await emitted(sampler, endpoint, messages=[{"role": "user", "content": content}], **more)


async def test_a_data_uri_may_be_in_capitals(sampler):
    plain, capitals = seeing(PNG), seeing(PNG)
    capitals[0]["content"][1]["image_url"]["url"] = uri(PNG).replace("data:image/png;base64", "DATA:IMAGE/PNG;BASE64")
    answers = [await chat(sampler, messages, temperature=0) for messages in (plain, capitals)]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


async def test_weights_that_diverged_are_named_and_not_sampled(sampler, reference, tmp_path):
    diverged = spoilt(reference, tmp_path / "diverged", 1e30)
    for stream in (False, True):
        with pytest.raises(InvalidInput, match="not finite"):
            await emitted(sampler, "chat_completions", diverged, messages=TEXT, max_tokens=4, stream=stream)
    with pytest.raises(InvalidInput, match="no longer exist"):
        await emitted(sampler, "chat_completions", tmp_path / "nothing", messages=TEXT, max_tokens=4)
    assert (await chat(sampler, TEXT))["choices"][0]["finish_reason"] in ("length", "stop")


async def test_a_tool_that_must_be_called_is_called_with_what_its_schema_allows(sampler):
    for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
        answer = await chat(sampler, TEXT, tools=[PAINT], tool_choice=choice, max_tokens=80, temperature=0)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "paint" and set(json.loads(call["function"]["arguments"])) == {"red"}
    free = await chat(sampler, TEXT, tools=[PAINT], tool_choice="auto", temperature=0)
    assert free["choices"][0]["message"]["content"] and free["usage"]["prompt_tokens"] > 100


async def test_a_message_of_anthropics_form_says_what_a_chat_completion_says(sampler):
    content = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
        },
        {"type": "text", "text": "what"},
    ]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12}
    (part,), usage = await emitted(sampler, "messages", **asked)
    answer = json.loads(part)
    openai = [{"role": "user", "content": [seeing(PNG)[0]["content"][1], {"type": "text", "text": "what"}]}]
    expected = await chat(sampler, openai, temperature=0, max_tokens=12)
    assert answer["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert answer["usage"]["output_tokens"] == usage.sampled
    (counted,), _ = await emitted(sampler, "count_tokens", messages=asked["messages"])
    assert json.loads(counted)["input_tokens"] == usage.prompt == len(expected["prompt_token_ids"])
    parts, _ = await emitted(sampler, "messages", stream=True, **asked)
    streamed = "".join(
        event["delta"].get("text", "") for event in events(parts) if event["type"] == "content_block_delta"
    )
    assert streamed == answer["content"][0]["text"] and events(parts)[-1]["type"] == "message_stop"


async def test_a_chat_that_is_cancelled_leaves_the_engine(sampler):
    begun = asyncio.Event()
    body = {"model": "tiny", "messages": TEXT, "max_tokens": 3900, "stream": True, "n": 2, "logit_bias": {"314": -100}}
    task = ChatTask("chat_completions", body, None, "somebody")
    running = asyncio.create_task(sampler.chat(task, lambda _: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    [child] = sampler.engines[0].supervisor.children
    for _ in range(50):
        before = await child.call(CountProgress())
        await asyncio.sleep(0.2)
        if await child.call(CountProgress()) == before:
            break
    else:
        pytest.fail("the engine still computes ten seconds after its only request was cancelled")
    assert running.cancelled()


async def test_a_field_of_the_wrong_type_is_named(sampler):
    with pytest.raises(InvalidInput, match="max_tokens"):
        await emitted(sampler, "chat_completions", messages=TEXT, max_tokens="many")
    with pytest.raises(InvalidInput, match="response_format"):
        await emitted(sampler, "chat_completions", messages=TEXT, response_format={"type": "poem"})


async def test_what_is_drawn_can_be_read_as_a_sample_with_its_images(sampler, renderer):
    body = {"messages": seeing(PNG), "max_tokens": 6, "seed": 3, "n": 2, "return_token_ids": True, "logprobs": True}
    whole = await kept(sampler, 1 << 20, **body)
    answer = json.loads(whole[0][0])
    ((asked, drawn),) = whole[1].drawn
    assert read(asked.prompt) == read(as_model_input(answer["prompt_token_ids"], [PNG], renderer))
    assert (asked.sampling_params.seed, asked.sampling_params.temperature, asked.num_samples) == (3, 1, 2)
    for choice, sequence in zip(answer["choices"], drawn.sequences, strict=True):
        assert choice["token_ids"] == sequence.tokens.tolist()
        assert_close(sequence.logprobs, logprobs(choice))
    _, streamed = await kept(sampler, 1 << 20, **body, stream=True)
    ((_, same),) = streamed.drawn
    assert [one.tokens.tolist() for one in same.sequences] == [one.tokens.tolist() for one in drawn.sequences]
    for too_little in (0, len(PNG) + 8):
        assert (await kept(sampler, too_little, **body))[1].drawn == ()


def read(prompt: ModelInput) -> list[Any]:
    return [one.tokens.tolist() if isinstance(one, EncodedTextChunk) else as_image(one).data for one in prompt.chunks]


async def kept(sampler, kept_bytes: int, **body) -> tuple[list[str], ChatUsage]:
    parts: list[str] = []
    task = ChatTask("chat_completions", {"model": "tiny", **body}, None, "somebody", kept_bytes)
    return parts, await sampler.chat(task, parts.append)


async def test_the_likeliest_tokens_come_in_order_whichever_was_sampled(sampler):
    answer = await chat(sampler, TEXT, top_logprobs=3, max_tokens=40, seed=1, temperature=2)
    outside = 0
    for one in answer["choices"][0]["logprobs"]["content"]:
        top = [entry["logprob"] for entry in one["top_logprobs"]]
        assert len(top) == 3 and top == sorted(top, reverse=True) and one["logprob"] <= top[0]
        outside += one["logprob"] < top[-1]
    assert outside
