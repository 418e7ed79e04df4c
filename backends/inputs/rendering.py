"""Render a ModelInput for a model: token ids with every image expanded, pixel tensors, image spans.

The server (counts only), the trainer and the sampler all render here, with the model's own image processor, so that
they see the same positions and the same pixels. The model's family knows its form of an image. Knows no chat template
and no tokenizer.

T tokens
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import AutoConfig

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.families.family import ImageSpan, RenderedImage, Vision
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.inputs.images import USUAL_SCANS, BadImage, cost_of, decode, open_image, size_of
from tinker_server.backends.inputs.prefetch import Prefetcher
from tinker_server.backends.lru import LRU
from tinker_server.backends.protocol import InvalidInput

_PREFETCH_BYTES = 1 << 28
MAX_LARGEST_IMAGES = 10
"""Images of a request may take as long to decode as this many of the largest size. Ten of 50 million
pixels take 3 s."""


class Layout(NamedTuple):
    """Positions of an input's tokens, known from its chunks and the headers of its images."""

    num_tokens: int
    spans: list[ImageSpan]
    """Spans of the images, in the order of their chunks."""


@dataclass(frozen=True)
class Rendered:
    """An input, ready for packing: images in order of their spans."""

    token_ids_T: np.ndarray
    spans: list[ImageSpan]
    images: list[RenderedImage]


class Renderer:
    """Renders for a base model. `source` is a local directory."""

    def __init__(
        self,
        source: str,
        *,
        image_cache_bytes: int,
        max_image_pixels: int,
        pixel_dtype: torch.dtype = torch.float32,
        pins_pixels: bool = False,
    ) -> None:
        """`pixel_dtype`: the model's, which would round the pixels to it before anything else; uint8: bytes, not
        normalised. `pins_pixels`: in memory from which a GPU copies while the host goes on."""
        self.config = AutoConfig.from_pretrained(source)
        text_config = self.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.family = find_family(self.config, source)
        self.takes_images = self.family.vision is not None
        self._max_image_pixels = max_image_pixels
        self._pixel_dtype = pixel_dtype
        self._pins_pixels = pins_pixels
        self._cache: LRU[str, RenderedImage] = LRU(image_cache_bytes, lambda image: image.size_bytes)
        self._in_use: WeakValueDictionary[str, RenderedImage] = WeakValueDictionary()
        """Images still referenced: an image of several inputs is decoded once."""
        self.prefetcher: Prefetcher[RenderedImage] = Prefetcher(_PREFETCH_BYTES)
        """Decodes images that will be rendered soon; paused while kernels are launched."""

    def layout(self, model_input: ModelInput, where: str | Sequence[str]) -> Layout:
        """Return the positions of an input; of its images only the headers are read.

        `where` begins the message of every InvalidInput, e.g. "datum 3", or has the beginning for each chunk.
        """
        length = 0
        spans: list[ImageSpan] = []
        for index, chunk in enumerate(model_input.chunks):
            at = _place(where, index)
            if isinstance(chunk, EncodedTextChunk):
                self._check_tokens(chunk.tokens, at)
                length += len(chunk.tokens)
            elif isinstance(chunk, ImageChunk):
                vision = self._vision(at)
                span = self._span(vision, chunk, length, at)
                spans.append(span)
                length += span.num_tokens
            else:
                raise InvalidInput(
                    f"{at}: {chunk.type} chunks are not supported; send encoded_text"
                    + (" or image chunks with the file's bytes" if self.takes_images else " chunks")
                )
        self.check_pixels(sum(span.num_pixels for span in spans), where if isinstance(where, str) else "the request")
        return Layout(length, spans)

    def check_pixels(self, num_pixels: int, where: str) -> None:
        """Raise InvalidInput if a request has so many pixels in all that decoding them would delay others."""
        allowed = MAX_LARGEST_IMAGES * self._max_image_pixels
        if num_pixels > allowed:
            raise InvalidInput(
                f"{where}: images of {num_pixels} pixels in all; {allowed} are allowed in one request (a JPEG of more"
                f" than {USUAL_SCANS} scans counts as its pixels times scans / {USUAL_SCANS})"
            )

    def pixel_bytes(self, images: Iterable[bytes]) -> int:
        """Return the bytes of the pixels of image files before normalisation, from their headers; others have none."""
        vision, size_bytes = self.family.vision, 0
        if vision is None:
            return 0
        for data in images:
            with suppress(ValueError), open_image(data, self._max_image_pixels) as image:
                size_bytes += vision.size_bytes(vision.grid(*size_of(image)))
        return size_bytes

    def render(
        self,
        model_input: ModelInput,
        where: str | Sequence[str],
        known: Container[str] = frozenset(),
        layout: Layout | None = None,
    ) -> Rendered:
        """Render token ids and pixels; images whose hash is `known` are not decoded. `layout`: the input's, if it is
        known.

        Raises InvalidInput as `layout`, and for images that do not decode.
        """
        num_tokens, spans = layout or self.layout(model_input, where)
        token_ids_T = np.empty(num_tokens, dtype=np.int64)
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
                at = _place(where, index)
                vision = self._vision(at)
                token_ids_T[offset:end] = vision.image_ids(span)
                images.append(self._image(vision, chunk, span, known, at))
            offset = end
        return Rendered(token_ids_T, spans, images)

    def prefetch(self, inputs: Iterable[tuple[ModelInput, Layout]], known: Container[str] = frozenset()) -> None:
        """Start to decode the images of inputs that will be rendered soon, on threads, as many as the memory for it
        allows; none whose hash is `known`. Errors of an image are raised when its input is rendered."""
        vision = self.family.vision
        if vision is None:
            return
        with self.prefetcher.pause():  # or the first threads would compete with this loop
            for key, data, span in (image for model_input in inputs for image in images_of(*model_input)):
                if key not in known and key not in self._in_use and self._cache.get(key) is None:
                    work = partial(self._decode, vision, key, data)
                    self.prefetcher.start(key, vision.size_bytes(span.grid), work)

    def _check_tokens(self, tokens: np.ndarray, at: str) -> None:
        if tokens.size == 0:
            return
        for bad in (tokens.min(), tokens.max()):
            if not 0 <= bad < self.vocab_size:
                raise InvalidInput(f"{at}: token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        for placeholder, name in self.family.placeholders.items():
            if (tokens == placeholder).any():
                raise InvalidInput(
                    f"{at}: token {placeholder} ({name}) is the model's placeholder of an image or video;"
                    " send an image chunk in its place"
                )

    def _vision(self, at: str) -> Vision:
        if self.family.vision is None:
            raise InvalidInput(f"{at}: this model takes no images")
        return self.family.vision

    def _span(self, vision: Vision, chunk: ImageChunk, offset: int, at: str) -> ImageSpan:
        try:
            with open_image(chunk.data, self._max_image_pixels) as image:
                grid, cost = vision.grid(*size_of(image)), cost_of(image)
        except ValueError as error:  # BadImage, or the processor's own limit on the aspect ratio
            raise InvalidInput(f"{at}: {error}") from None
        num_tokens, expected = vision.num_tokens(grid), chunk.expected_tokens
        if expected is not None and expected != num_tokens:
            raise InvalidInput(f"{at}: Expected {expected} tokens, got {num_tokens} from image")
        return ImageSpan(offset, num_tokens, grid, cost)

    def _image(
        self, vision: Vision, chunk: ImageChunk, span: ImageSpan, known: Container[str], at: str
    ) -> RenderedImage:
        key = chunk.sha256
        if key in known:
            self.prefetcher.cancel(key)
            return RenderedImage(key, vision.sizes_of_image(span))
        image = self._cache.get(key) or self._in_use.get(key)
        if image is None:
            try:
                image = self.prefetcher.take(key) or self._decode(vision, key, chunk.data)
            except BadImage as error:
                raise InvalidInput(f"{at}: {error}") from None
            self._in_use[key] = image
            self._cache.put(key, image)
        return image

    def _decode(self, vision: Vision, key: str, data: bytes) -> RenderedImage:
        """Raises BadImage."""
        tensors = vision.process(decode(data, self._max_image_pixels))
        pixels = {name: self._pixels(vision, tensor) for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
        return RenderedImage(key, tensors | pixels)

    def _pixels(self, vision: Vision, tensor: torch.Tensor) -> torch.Tensor:
        if self._pixel_dtype != torch.uint8:
            tensor = vision.normalise(tensor, self._pixel_dtype)
        return tensor.pin_memory() if self._pins_pixels else tensor


def _place(where: str | Sequence[str], index: int) -> str:
    return f"{where}, chunk {index}" if isinstance(where, str) else where[index]


def images_of(model_input: ModelInput, layout: Layout) -> Iterator[tuple[str, bytes, ImageSpan]]:
    """Yield the hash, the file and the span of each image of an input."""
    chunks = [chunk for chunk in model_input.chunks if isinstance(chunk, ImageChunk)]
    for chunk, span in zip(chunks, layout.spans, strict=True):
        yield chunk.sha256, chunk.data, span
