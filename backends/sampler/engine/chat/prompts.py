"""Renders conversations: vLLM applies the model's chat template, and images are rendered here.

vLLM would decode and expand images by itself, with its own limits and pixels. So it gets their files as they were sent,
and its tokens become a ModelInput, which passes through the trainer's own renderer.
"""

import base64
import binascii
import copy
import re
from collections.abc import Container
from contextvars import ContextVar
from typing import Any

import numpy as np
from vllm.inputs import EngineInput, TokensPrompt, tokens_input
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.renderers import BaseRenderer

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.inputs.rendering import Rendered, Renderer
from tinker_server.backends.processes.launcher import IMAGES_AS_SENT
from tinker_server.backends.protocol import ChatTask, InvalidInput
from tinker_server.backends.sampler.engine.requests import THREADS
from tinker_server.backends.sampler.engine.vllm_patches.targets import CHAT_PROMPTS

_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
MODEL_INPUT, NAMES = "model_input", "names"
"""Keys in a prompt on its way through vLLM's handlers: its ModelInput, and the field of the body for each chunk."""
TASK: ContextVar[ChatTask] = ContextVar("task")
"""The task whose prompts are rendered."""


class _Everything(Container[str]):
    """Contains every image: only the sizes of known images are read."""

    def __contains__(self, _: object) -> bool:
        return True


@MEDIA_CONNECTOR_REGISTRY.register(IMAGES_AS_SENT)
class ImagesAsSent:
    """vLLM's media connector, which fetches and decodes nothing."""

    def __init__(self, **_: object) -> None:
        """Ignore vLLM's options of fetching and decoding."""

    async def fetch_image_async(self, url: str) -> str:
        """Return the address, which is read where the image's field is known."""
        return url


def chat_renderer(engine_renderer: BaseRenderer, renderer: Renderer) -> BaseRenderer:
    """Return vLLM's renderer, whose tokens become a ModelInput, checked as every other, without pixels yet."""
    ours = copy.copy(engine_renderer)

    async def process(prompt: TokensPrompt, **_: object) -> EngineInput:
        images = (prompt.get("multi_modal_data") or {}).get("image", [])
        task, token_ids = TASK.get(), prompt["prompt_token_ids"]
        if images:
            read = await THREADS.run(task.owner, _read, token_ids, images, renderer, task)
        else:
            read = _read(token_ids, images, renderer, task)
        model_input, names, rendered = read
        if not len(rendered.token_ids_T):
            raise InvalidInput("the prompt is empty")
        spans = [PlaceholderRange(offset=span.offset, length=span.num_tokens) for span in rendered.spans]
        made: EngineInput = {
            **tokens_input(rendered.token_ids_T.tolist()),
            "prompt": prompt.get("prompt"),
            "mm_placeholders": {"image": spans} if spans else {},
            MODEL_INPUT: model_input,
            NAMES: names,
        }
        return made

    CHAT_PROMPTS.replace(process, on=ours)
    return ours


def _read(
    token_ids: list[int], images: list[object], renderer: Renderer, task: ChatTask
) -> tuple[ModelInput, list[str], Rendered]:
    """Return a prompt, the field of the body for each of its chunks, and its tokens with images expanded, without
    pixels.

    Raises InvalidInput.
    """
    model_input, names = _model_input(token_ids, images, renderer, task)
    return model_input, names, renderer.render(model_input, names, _Everything())


def _model_input(
    token_ids: list[int], images: list[object], renderer: Renderer, task: ChatTask
) -> tuple[ModelInput, list[str]]:
    """Return the text, cut where the chat template put images, with the images between, and each chunk's field."""
    text_field = "prompt" if task.endpoint == "completions" else "messages"
    ids_T = np.array(token_ids, dtype=np.int64)
    if not images:
        return ModelInput(chunks=[EncodedTextChunk(tokens=ids_T)]), [text_field]
    vision = renderer.family.vision
    if vision is None:
        raise InvalidInput("this model takes no images")
    positions = np.flatnonzero(ids_T == vision.placeholder_id).tolist()
    if len(positions) != len(images):
        raise InvalidInput(
            f"the conversation has {len(images)} images, and its prompt {len(positions)} places for them:"
            " its text may hold the model's image placeholder"
        )
    chunks: list[EncodedTextChunk | ImageChunk] = []
    names, fields, start = [text_field], _fields(task), 0
    for position, address in zip(positions, images, strict=True):
        if not isinstance(address, str):
            raise InvalidInput("messages: an image has no data; send it as image_url with a data URI")
        names += [fields.get(_data(address), "messages"), text_field]
        image = _decode(address, names[-2])
        chunks.append(EncodedTextChunk(tokens=ids_T[start:position]))
        chunks.append(ImageChunk(data=image, format="png" if image.startswith(b"\x89PNG") else "jpeg"))
        start = position + 1
    return ModelInput(chunks=[*chunks, EncodedTextChunk(tokens=ids_T[start:])]), names


def _decode(address: str, field: str) -> bytes:
    """Return the file of a data URI. Raises InvalidInput for any other address."""
    found = _DATA_URI.match(address)
    if found is None:
        raise InvalidInput(
            f"{field}: send the image as a data URI, data:image/png;base64,... or image/jpeg, or as source.data with"
            " the media_type image/png or image/jpeg"
        )
    try:
        return base64.b64decode(address[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"{field}: the image's data is not base64") from None


def _fields(task: ChatTask) -> dict[str, str]:
    """Return the first field of each image, by the image's data: vLLM may change the order of a message's images."""
    found: dict[str, str] = {}
    for field in task.image_fields:
        value: Any = task.body
        for key in field.split("."):
            value = value[int(key) if isinstance(value, list) else key]
        if isinstance(value, str):
            found.setdefault(_data(value), field)
    return found


def _data(address: str) -> str:
    return address.rpartition(",")[2]
