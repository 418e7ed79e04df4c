"""ModelInput to what a model reads: token ids with every image expanded, pixel tensors, image spans.

The server (counts only), the trainer and the sampler all render here, with the model's own image
processor on its torchvision backend, so that they see the same positions and the same pixels.
Knows no chat template and no tokenizer.

T tokens, P patches, D values of a patch
"""

import hashlib
import io
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from transformers import AutoConfig, AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from backends.lru import LRU
from backends.protocol import BackendFailed, InvalidInput

VISION_ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)
# Grayscale deeper than 8 bits: Pillow's conversion to RGB would clip it to white.
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})


@dataclass(frozen=True)
class ImageSpan:
    """Where an image stands in the expanded sequence."""

    offset: int
    num_tokens: int
    grid: tuple[int, int]
    """Height and width in merged patches: one token each."""


@dataclass(frozen=True)
class RenderedImage:
    """An image as the vision tower takes it."""

    hash: str
    """sha256 of the file's bytes."""
    pixel_values_PD: torch.Tensor
    """Empty where the renderer was told that they are known."""
    grid_thw: tuple[int, int, int]
    """In patches, before merging."""

    @property
    def size_bytes(self) -> int:
        return self.pixel_values_PD.numel() * self.pixel_values_PD.element_size()


@dataclass(frozen=True)
class Rendered:
    """One input, ready for batching: images in order of their spans."""

    token_ids_T: np.ndarray
    spans: list[ImageSpan]
    images: list[RenderedImage]


class Renderer:
    """Renders for one base model. `source` is a local directory."""

    def __init__(self, source: str, *, image_cache_bytes: int, max_image_pixels: int) -> None:
        self.config = AutoConfig.from_pretrained(source)
        text_config = self.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.takes_images = self.config.architectures[0] in VISION_ARCHITECTURES
        self._max_image_pixels = max_image_pixels
        self._cache: LRU[str, RenderedImage] = LRU(image_cache_bytes, lambda image: image.size_bytes)
        self.placeholders: frozenset[int] = frozenset()
        if self.takes_images:
            try:
                self._processor = AutoImageProcessor.from_pretrained(source, backend="torchvision")
            except (OSError, ValueError) as error:
                raise BackendFailed(f"{source}: the model takes images but has no image processor: {error}") from None
            self.placeholders = frozenset({self.config.image_token_id, self.config.video_token_id})
        elif any("vision" in key for key in self.config.sub_configs):
            raise BackendFailed(
                f"{source}: {self.config.architectures[0]} is not supported; "
                f"models that take images: {', '.join(VISION_ARCHITECTURES)}"
            )

    def layout(self, model_input: ModelInput, where: str) -> tuple[int, list[ImageSpan]]:
        """Length in tokens and image spans, from the chunks and the images' headers alone.

        `where` begins the message of every InvalidInput, e.g. "datum 3".
        """
        length, spans = 0, []
        for index, chunk in enumerate(model_input.chunks):
            at = f"{where}, chunk {index}"
            if isinstance(chunk, EncodedTextChunk):
                self._check_tokens(chunk.tokens, at)
                length += len(chunk.tokens)
            elif isinstance(chunk, ImageChunk):
                with self._open(chunk, at) as image:
                    span = self._span(image.size, chunk.expected_tokens, length, at)
                spans.append(span)
                length += span.num_tokens
            else:
                raise InvalidInput(
                    f"{at}: {chunk.type} chunks are not supported; send encoded_text"
                    + (" or image chunks with the file's bytes" if self.takes_images else " chunks")
                )
        return length, spans

    def render(self, model_input: ModelInput, where: str, known: Container[str] = frozenset()) -> Rendered:
        """Expanded token ids and pixels; images whose hash is `known` are not decoded.

        Raises InvalidInput as `layout`, and for images that do not decode.
        """
        length, spans = self.layout(model_input, where)
        token_ids_T = np.empty(length, dtype=np.int64)
        images: list[RenderedImage] = []
        offset, remaining = 0, iter(spans)
        for index, chunk in enumerate(model_input.chunks):
            if isinstance(chunk, EncodedTextChunk):
                end = offset + len(chunk.tokens)
                token_ids_T[offset:end] = chunk.tokens
            else:
                assert isinstance(chunk, ImageChunk)
                span = next(remaining)
                end = offset + span.num_tokens
                token_ids_T[offset:end] = self.config.image_token_id
                images.append(self._image(chunk, span, known, f"{where}, chunk {index}"))
            offset = end
        return Rendered(token_ids_T, spans, images)

    def _check_tokens(self, tokens: np.ndarray, at: str) -> None:
        if tokens.size == 0:
            return
        for bad in (tokens.min(), tokens.max()):
            if not 0 <= bad < self.vocab_size:
                raise InvalidInput(f"{at}: token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        for placeholder in self.placeholders:
            if (tokens == placeholder).any():
                raise InvalidInput(
                    f"{at}: token {placeholder} is the model's image placeholder; send an image chunk in its place"
                )

    def _open(self, chunk: ImageChunk, at: str) -> Image.Image:
        if not self.takes_images:
            raise InvalidInput(f"{at}: this model takes no images")
        try:
            image = Image.open(io.BytesIO(chunk.data), formats=("PNG", "JPEG"))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise InvalidInput(f"{at}: the {len(chunk.data)} bytes are no readable PNG or JPEG image") from None
        if image.width * image.height > self._max_image_pixels:
            raise InvalidInput(
                f"{at}: the image has {image.width}x{image.height} pixels; {self._max_image_pixels} are allowed"
            )
        if image.mode in _DEEP_MODES:
            raise InvalidInput(f"{at}: the image has more than 8 bits a channel; convert it to 8 bits")
        return image

    def _span(self, size: tuple[int, int], expected: int | None, offset: int, at: str) -> ImageSpan:
        width, height = size
        try:
            grid_h, grid_w = self._grid(height, width)
        except ValueError as error:  # the processor's own limit on the aspect ratio
            raise InvalidInput(f"{at}: {error}") from None
        num_tokens = grid_h * grid_w
        if expected is not None and expected != num_tokens:
            raise InvalidInput(f"{at}: Expected {expected} tokens, got {num_tokens} from image")
        return ImageSpan(offset, num_tokens, (grid_h, grid_w))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Merged patches in each direction, by the processor's own resize rule."""
        processor: Any = self._processor
        size = processor.size
        factor = processor.patch_size * processor.merge_size
        resized = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return resized[0] // factor, resized[1] // factor

    def _image(self, chunk: ImageChunk, span: ImageSpan, known: Container[str], at: str) -> RenderedImage:
        key = hashlib.sha256(chunk.data).hexdigest()
        if key in known:
            merge: int = self._processor.merge_size
            return RenderedImage(key, torch.empty(0), (1, span.grid[0] * merge, span.grid[1] * merge))
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        try:
            with self._open(chunk, at) as opened:
                rgb = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidInput(f"{at}: the image does not decode: {error}") from None
        features = self._processor(images=[rgb], return_tensors="pt")
        grid = features["image_grid_thw"][0].tolist()
        image = RenderedImage(key, features["pixel_values"], (grid[0], grid[1], grid[2]))
        self._cache.put(key, image)
        return image


def mrope_positions(length: int, spans: list[ImageSpan]) -> np.ndarray:
    """[3, T] temporal, height and width positions of one input (Qwen2-VL, arXiv:2409.12191, section 2.1).

    As transformers' `get_rope_index`, but by spans: two images with no text between them stay two images.
    """
    positions_3T = np.empty((3, length), dtype=np.int64)
    token, position = 0, 0
    for span in spans:
        text = span.offset - token
        positions_3T[:, token : span.offset] = np.arange(position, position + text)
        position += text
        grid_h, grid_w = span.grid
        token = span.offset + span.num_tokens
        image = positions_3T[:, span.offset : token]
        image[0] = position
        image[1] = position + np.repeat(np.arange(grid_h), grid_w)
        image[2] = position + np.tile(np.arange(grid_w), grid_h)
        position += max(grid_h, grid_w)
    positions_3T[:, token:] = np.arange(position, position + length - token)
    return positions_3T
