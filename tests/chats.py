"""Requests of the chat endpoints to a sampler, and what its answers hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import ChatEndpoint, ChatTask, ChatUsage
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.chat.images import sources

TEXT: list[dict[str, Any]] = [
    {"role": "system", "content": "hello system"},
    {"role": "user", "content": "what is this world"},
    {"role": "assistant", "content": "a small corpus"},
    {"role": "user", "content": "image  what\n"},
]


async def emitted(
    sampler: SamplerPool, endpoint: ChatEndpoint, weights: Path | None = None, **body: Any
) -> tuple[list[str], ChatUsage]:
    parts: list[str] = []
    fields = tuple(field for field, _, _ in sources(body.get("messages"), "messages"))
    task = ChatTask(endpoint, {"model": "tiny", **body}, weights, "somebody", image_fields=fields)
    usage = await sampler.chat(task, parts.append)
    return parts, usage


async def chat(
    sampler: SamplerPool, messages: list[dict[str, Any]], weights: Path | None = None, **body: Any
) -> dict[str, Any]:
    """The answer to a chat completion, with its tokens and their log probabilities."""
    asked = {"max_tokens": 6, "return_token_ids": True, "logprobs": True, **body}
    (part,), _ = await emitted(sampler, "chat_completions", weights, messages=messages, **asked)
    answer: dict[str, Any] = json.loads(part)
    return answer


def events(parts: list[str]) -> list[dict[str, Any]]:
    lines = [line for part in parts for line in part.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def logprobs(choice: dict[str, Any]) -> np.ndarray:
    return np.array([one["logprob"] for one in choice["logprobs"]["content"]], np.float32)


def as_model_input(token_ids: list[int], images: list[bytes], renderer: Renderer) -> ModelInput:
    """The chunks that a client of the SDK would send for this prompt."""
    vision = renderer.family.vision
    assert vision is not None
    place, at = vision.placeholder_id, 0
    text: list[int] = []
    chunks: list[Any] = []
    remaining = iter(images)
    while at < len(token_ids):
        if token_ids[at] != place:
            text.append(token_ids[at])
            at += 1
            continue
        image = ImageChunk(data=next(remaining), format="png")
        length, _ = renderer.layout(ModelInput(chunks=[image]), "image")
        chunks += [EncodedTextChunk(tokens=np.array(text, np.int64)), image]
        text, at = [], at + length
    return ModelInput(chunks=[*chunks, EncodedTextChunk(tokens=np.array(text, np.int64))])
