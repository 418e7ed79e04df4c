"""The demo's photographs, as the demo asks about them."""

import sys
from pathlib import Path

import numpy as np
from tinker import types

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.embedded import DIRECTORIES, TINY_VL

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from caltech10 import Conversation, Photo, load_photos  # noqa: E402

SEEING = DIRECTORIES[TINY_VL]
"""The base model that comes with the server."""


def conversation() -> Conversation:
    return Conversation(SEEING)


def photographs(split: str, count: int) -> list[Photo]:
    """So many, of all classes in turn."""
    photos = load_photos(split)
    return [photos[i * len(photos) // count] for i in range(count)]


def our_input(model_input: types.ModelInput) -> ModelInput:
    """The SDK's ModelInput as ours."""
    return ModelInput(chunks=[_our_chunk(chunk) for chunk in model_input.chunks])


def _our_chunk(chunk: types.ModelInputChunk) -> EncodedTextChunk | ImageChunk:
    if isinstance(chunk, types.EncodedTextChunk):
        return EncodedTextChunk(tokens=np.array(chunk.tokens, np.int32))
    assert isinstance(chunk, types.ImageChunk)
    return ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens)
