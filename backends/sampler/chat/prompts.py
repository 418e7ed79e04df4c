"""A conversation as the model reads it: vLLM applies the model's chat template, and images are rendered here.

vLLM would decode and expand images by itself, with limits and pixels of its own. So it gets their files as they were
sent, and what it tokenised becomes a ModelInput, which passes through the trainer's own renderer.
"""

import asyncio
import base64
import binascii
import copy
import re
from collections.abc import Container
from typing import Any

import numpy as np
from vllm.inputs import EngineInput, tokens_input
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from backends.inputs.rendering import Renderer
from backends.processes.launcher import IMAGES_AS_SENT
from backends.protocol import InvalidInput

_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")
MODEL_INPUT = "model_input"
"""Where a prompt on its way through vLLM's handlers has what it is made of."""


class _Everything(Container[str]):
    """Of images that are `known`, only the size is looked at."""

    def __contains__(self, _: object) -> bool:
        return True


@MEDIA_CONNECTOR_REGISTRY.register(IMAGES_AS_SENT)
class ImagesAsSent:
    """vLLM's media connector, which fetches and decodes nothing."""

    def __init__(self, **_: Any) -> None:
        """vLLM's options of fetching and decoding."""

    async def fetch_image_async(self, url: str) -> bytes:
        """The file of a data URI. Raises InvalidInput for any other address."""
        found = _DATA_URI.match(url)
        if found is None:
            raise InvalidInput("image_url: send the image as a data URI, data:image/png;base64,... or image/jpeg")
        try:
            return base64.b64decode(url[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput("image_url: what follows base64, is not base64") from None


def chat_renderer(engine_renderer: Any, renderer: Renderer) -> Any:
    """vLLM's renderer, but what it has tokenised becomes a ModelInput, checked as every other, without pixels yet."""
    ours = copy.copy(engine_renderer)

    async def process(prompt: Any, **_: Any) -> EngineInput:
        images = (prompt.get("multi_modal_data") or {}).get("image", [])
        model_input = _model_input(prompt["prompt_token_ids"], images, renderer)
        known = _Everything()
        if images:
            rendered = await asyncio.to_thread(renderer.render, model_input, "prompt", known)
        else:
            rendered = renderer.render(model_input, "prompt", known)
        if not len(rendered.token_ids_T):
            raise InvalidInput("the prompt is empty")
        spans = [PlaceholderRange(offset=span.offset, length=span.num_tokens) for span in rendered.spans]
        made: Any = {
            **tokens_input(rendered.token_ids_T.tolist()),
            "prompt": prompt.get("prompt"),
            "mm_placeholders": {"image": spans} if spans else {},
            MODEL_INPUT: model_input,
        }
        return made

    ours._process_tokens_async = process
    return ours


def _model_input(token_ids: list[int], images: list[object], renderer: Renderer) -> ModelInput:
    """The chunks between and around the places where the chat template put images."""
    ids_T = np.array(token_ids, dtype=np.int64)
    if not images:
        return ModelInput(chunks=[EncodedTextChunk(tokens=ids_T)])
    vision = renderer.family.vision
    if vision is None:
        raise InvalidInput("this model takes no images")
    places = np.flatnonzero(ids_T == vision.placeholder_id).tolist()
    if len(places) != len(images):
        raise InvalidInput(
            f"the conversation has {len(images)} images, and its prompt {len(places)} places for them:"
            " its text may hold the model's image placeholder"
        )
    chunks: list[EncodedTextChunk | ImageChunk] = []
    start = 0
    for place, image in zip(places, images, strict=True):
        if not isinstance(image, bytes):
            raise InvalidInput("an image has no data; send it as image_url with a data URI")
        chunks.append(EncodedTextChunk(tokens=ids_T[start:place]))
        chunks.append(ImageChunk(data=image, format="png" if image.startswith(b"\x89PNG") else "jpeg"))
        start = place + 1
    return ModelInput(chunks=[*chunks, EncodedTextChunk(tokens=ids_T[start:])])
