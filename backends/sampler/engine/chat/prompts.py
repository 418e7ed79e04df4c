"""Renders conversations: vLLM applies the model's chat template, and images are rendered here.

vLLM would decode and expand images by itself, with its own limits and pixels. So it gets their files as they were sent,
and its tokens become a ModelInput, which passes through the trainer's own renderer.
"""

import asyncio
import base64
import binascii
import copy
import re
from collections.abc import Container

import numpy as np
from vllm.inputs import EngineInput, TokensPrompt, tokens_input
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.renderers import BaseRenderer

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.processes.launcher import IMAGES_AS_SENT
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.engine.vllm_patches.targets import CHAT_PROMPTS

_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")
MODEL_INPUT = "model_input"
"""The key of the ModelInput in a prompt on its way through vLLM's handlers."""


class _Everything(Container[str]):
    """Contains every image: only the sizes of known images are read."""

    def __contains__(self, _: object) -> bool:
        return True


@MEDIA_CONNECTOR_REGISTRY.register(IMAGES_AS_SENT)
class ImagesAsSent:
    """vLLM's media connector, which fetches and decodes nothing."""

    def __init__(self, **_: object) -> None:
        """Ignore vLLM's options of fetching and decoding."""

    async def fetch_image_async(self, url: str) -> bytes:
        """Return the file of a data URI. Raises InvalidInput for any other address."""
        found = _DATA_URI.match(url)
        if found is None:
            raise InvalidInput("image_url: send the image as a data URI, data:image/png;base64,... or image/jpeg")
        try:
            return base64.b64decode(url[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput("image_url: what follows base64, is not base64") from None


def chat_renderer(engine_renderer: BaseRenderer, renderer: Renderer) -> BaseRenderer:
    """Return vLLM's renderer, whose tokens become a ModelInput, checked as every other, without pixels yet."""
    ours = copy.copy(engine_renderer)

    async def process(prompt: TokensPrompt, **_: object) -> EngineInput:
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
        made: EngineInput = {
            **tokens_input(rendered.token_ids_T.tolist()),
            "prompt": prompt.get("prompt"),
            "mm_placeholders": {"image": spans} if spans else {},
            MODEL_INPUT: model_input,
        }
        return made

    CHAT_PROMPTS.replace(process, on=ours)
    return ours


def _model_input(token_ids: list[int], images: list[object], renderer: Renderer) -> ModelInput:
    """Return the text, cut where the chat template put images, with the images between."""
    ids_T = np.array(token_ids, dtype=np.int64)
    if not images:
        return ModelInput(chunks=[EncodedTextChunk(tokens=ids_T)])
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
    start = 0
    for position, image in zip(positions, images, strict=True):
        if not isinstance(image, bytes):
            raise InvalidInput("an image has no data; send it as image_url with a data URI")
        chunks.append(EncodedTextChunk(tokens=ids_T[start:position]))
        chunks.append(ImageChunk(data=image, format="png" if image.startswith(b"\x89PNG") else "jpeg"))
        start = position + 1
    return ModelInput(chunks=[*chunks, EncodedTextChunk(tokens=ids_T[start:])])
