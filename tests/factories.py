"""Small inputs for tests: images of known content, datums with random targets."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image, PngImagePlugin

from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.inputs import Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput, TokenRun
from tinker_server.backends.protocol import EncodedBatch

if TYPE_CHECKING:  # it imports torch
    from tinker_server.backends.inputs.rendering import Renderer

T = TypeVar("T")
VOCAB = 300
"""Below every tiny model's image placeholder."""


def present(value: T | None) -> T:
    """Return a part of an answer that the test has asked for."""
    assert value is not None
    return value


def succeeded(outcome: T | Exception | None) -> T:
    """Return the answer of a request that the test expects to succeed."""
    assert outcome is not None and not isinstance(outcome, Exception), outcome
    return outcome


def as_text(chunk: Chunk) -> EncodedTextChunk:
    """Return a chunk that the test knows to be text."""
    assert isinstance(chunk, EncodedTextChunk)
    return chunk


def as_image(chunk: Chunk) -> ImageChunk:
    """Return a chunk that the test knows to be an image."""
    assert isinstance(chunk, ImageChunk)
    return chunk


def make_renderer(source: Path, **options: Any) -> "Renderer":
    from tinker_server.backends.inputs.rendering import Renderer

    return Renderer(str(source), image_cache_bytes=1 << 26, max_image_pixels=10**7, **options)


def photo(width: int, height: int, seed: int = 0, *, mode: str = "RGB", format: str = "png") -> bytes:
    """A smooth random picture as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def text(*tokens: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=np.array(tokens, np.int32))


def words(count: int, seed: int = 0) -> EncodedTextChunk:
    """Random token ids."""
    return EncodedTextChunk(tokens=np.random.default_rng(seed).integers(0, VOCAB, count, dtype=np.int32))


def image(width: int, height: int, seed: int = 0) -> ImageChunk:
    return ImageChunk(data=photo(width, height, seed), format="png")


def twins(width: int, height: int) -> tuple[ImageChunk, ImageChunk]:
    """Two photographs whose files have one length, and the same first and last 8,192 bytes: a camera's description."""
    camera = PngImagePlugin.PngInfo()
    for is_behind_the_pixels in (False, True):
        camera.add(b"caMa", bytes(8192), after_idat=is_behind_the_pixels)
    files = []
    for seed in (1, 2):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(photo(width, height, seed))).save(buffer, "png", pnginfo=camera, compress_level=0)
        files.append(buffer.getvalue())
    first, second = files
    assert len(first) == len(second) and first[:8192] == second[:8192] and first[-8192:] == second[-8192:]
    return ImageChunk(data=first, format="png"), ImageChunk(data=second, format="png")


def prompt(*chunks: Chunk) -> ModelInput:
    return ModelInput(chunks=list(chunks))


MIXED: dict[str, ModelInput] = {
    "text": prompt(words(17, 1)),
    "one image": prompt(words(4, 2), image(96, 64, 1), words(7, 3)),
    "three images of different sizes": prompt(
        words(3, 4), image(64, 96, 2), words(2, 5), image(130, 50, 3), words(1, 6), image(200, 150, 4), words(5, 7)
    ),
    "image last": prompt(words(6, 8), image(70, 70, 5)),
    "image first": prompt(image(40, 90, 6), words(4, 9)),
}
"""Inputs that together show what can go wrong with images."""


def datum(model_input: ModelInput, renderer: "Renderer", seed: int = 0, *, k: int | None = None) -> Datum:
    """Random targets and weights, some negative, some zero; `k` for soft targets."""
    length, _ = renderer.layout(model_input, "datum")
    random = np.random.default_rng(seed)
    shape = (length,) if k is None else (length, k)
    weights = random.normal(size=shape).astype(np.float32) * (random.random(shape) < 0.8)
    return Datum(
        model_input=model_input,
        loss_fn_inputs={"target_tokens": random.integers(0, VOCAB, shape), "weights": weights.astype(np.float32)},
    )


def batch(datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None = None) -> EncodedBatch:
    """A forward_backward as the SDK sends it."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss_fn, loss_fn_config=config or {})
    for datum in datums:
        inputs = {name: _tensor(values) for name, values in datum.loss_fn_inputs.items()}
        runs = map(_span, datum.model_input_spans)
        message.data.add(
            model_input=map(_chunk, datum.model_input.chunks), loss_fn_inputs=inputs, model_input_spans=runs
        )
    return EncodedBatch(message.SerializeToString(), wire.PROTOBUF)


def _chunk(chunk: Chunk) -> pb.Chunk:
    if isinstance(chunk, ImageChunk):
        return pb.Chunk(image=pb.ImageChunk(data=chunk.data, format=chunk.format))
    assert isinstance(chunk, EncodedTextChunk)
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=chunk.tokens.astype("<i4").tobytes()))


def _span(run: TokenRun) -> pb.ProvenanceSpan:
    span = pb.TokenRun(sequence_id=run.sequence_id, offset=run.offset, length=run.length)
    return pb.ProvenanceSpan(prompt_tokens=span) if run.part == "prompt" else pb.ProvenanceSpan(sampled_tokens=span)


def _tensor(values: np.ndarray) -> pb.Tensor:
    dtype = pb.DTYPE_FLOAT32 if values.dtype == np.float32 else pb.DTYPE_INT64
    return pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape)


def cross_entropy(datums: Sequence[Datum]) -> EncodedBatch:
    return batch(datums, "cross_entropy")


LOSS_INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}


def datum_for(loss_fn: str, model_input: ModelInput, renderer: "Renderer", seed: int) -> Datum:
    length, _ = renderer.layout(model_input, "datum")
    random = np.random.default_rng(seed)
    inputs = {"target_tokens": random.integers(0, 300, length)}
    for name in LOSS_INPUTS[loss_fn]:
        values = random.normal(-5.5, 0.5, length) if name == "logprobs" else random.normal(size=length)
        inputs[name] = (values * (1 if name == "logprobs" else random.random(length) < 0.8)).astype(np.float32)
    return Datum(model_input=model_input, loss_fn_inputs=inputs)


def batch_for(loss_fn: str, inputs: list[ModelInput], renderer: "Renderer", seed: int) -> EncodedBatch:
    return batch([datum_for(loss_fn, one, renderer, seed + i) for i, one in enumerate(inputs)], loss_fn)


PAINT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"red": {"type": "boolean"}},
            "required": ["red"],
            "additionalProperties": False,
        },
    },
}
"""A tool that a model may call, as OpenAI describes one."""
