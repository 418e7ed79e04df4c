"""Datums with images, against the model's own processor, and images that cannot be; numbers are the checklist's.

pytest tests/conformance/test_images.py
"""

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from PIL import Image
from tinker import types
from transformers import AutoImageProcessor

from tests.conformance.failures import assert_each_fails_alone
from tests.conformance.reference import Trained, assert_gradients
from tests.factories import photo
from tests.fake_server import Running
from tests.recovery import RealTrainer
from tests.reference import Reference
from tests.servers import MODEL, Server
from tests.training import PLACEHOLDER
from tinker_server.backends.inputs.rendering import Renderer

SIZES = [(96, 64), (333, 500), (40, 300)]


def text(*tokens: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=list(tokens))


def picture(data: bytes, expected: int | None = None, format: str = "png") -> types.ImageChunk:
    return types.ImageChunk(data=data, format=format, expected_tokens=expected)  # type: ignore[arg-type]


def datum(chunks: list[types.ModelInputChunk], targets: list[int], weights: list[float]) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": targets, "weights": weights}  # the SDK makes tensors of lists
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def count(processor: Any, data: bytes) -> tuple[int, dict[str, torch.Tensor]]:
    """An image's tokens, and what the model takes, by transformers alone."""
    with Image.open(io.BytesIO(data)) as image:
        features = processor(images=[image.convert("RGB")], return_tensors="pt")
    return int(features["image_grid_thw"].prod()) // processor.merge_size**2, features


def test_043_text_and_images_are_as_the_models_own_processor_has_them(
    trained: Trained, reference: Reference, tiny_vl: Path
) -> None:
    """Targets run across the images; what is predicted there has no weight."""
    processor = AutoImageProcessor.from_pretrained(tiny_vl)
    before = trained.adapter()
    reference.take(before)
    sent, losses, logprobs = [], [], []
    for seed, (width, height) in enumerate(SIZES):
        data = photo(width, height, seed)
        num_tokens, features = count(processor, data)
        start, end = [5, 6, 7 + seed], [8, 9]
        ids = [*start, *[PLACEHOLDER] * num_tokens, *end]
        targets = [*ids[1:], 11]
        targets = [0 if token == PLACEHOLDER else token for token in targets]
        weights = [0.0 if later == PLACEHOLDER else 1.0 for later in [*ids[1:], 11]]
        sent.append(datum([text(*start), picture(data, num_tokens), text(*end)], targets, weights))
        tensor = torch.tensor([ids])
        logits = reference.model(
            input_ids=tensor,
            pixel_values=features["pixel_values"],
            image_grid_thw=features["image_grid_thw"],
            mm_token_type_ids=(tensor == PLACEHOLDER).int(),
            use_cache=False,
        ).logits[0]
        logprobs.append(logits.log_softmax(-1).gather(-1, torch.tensor(targets)[:, None])[:, 0])
        losses.append(-(torch.tensor(weights) * logprobs[-1]).sum())
    output = trained.client.forward_backward(sent, "cross_entropy").result()
    for row, wanted in zip(output.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_allclose(row["logprobs"].to_numpy(), wanted.detach().numpy(), atol=1e-4)
    loss = torch.stack(losses).sum()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert_gradients(trained.gradient(before), reference.gradient(loss))


def test_044_expected_tokens_are_checked_where_they_are_given(
    service: tinker.ServiceClient, renderer: Renderer
) -> None:
    data = photo(64, 64)
    client = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    rows = []
    for expected in (4, None):
        one = datum([text(1), picture(data, expected)], [0] * 5, [1.0] * 5)
        rows.append(client.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy())
    np.testing.assert_array_equal(rows[0], rows[1])
    assert_each_fails_alone(
        service,
        renderer,
        [
            (
                "cross_entropy",
                datum([text(1), picture(data, wrong)], [0] * (1 + wrong), [1.0] * (1 + wrong)),
                f"datum 1, chunk 1: Expected {wrong} tokens, got 4 from image",
            )
            for wrong in (3, 5, 400)
        ],
    )


def flood(width: int, height: int) -> bytes:
    """A PNG of a few bytes that would decode to as many pixels as it says."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"\0" * 1000)) + part(b"IEND", b"")
    )


def late_colour_profile() -> bytes:
    """A PNG with an empty colour profile behind its pixels, at which Pillow stumbles only while it decodes."""
    whole = photo(64, 64)
    return whole[:-12] + struct.pack(">I", 0) + b"iCCP" + struct.pack(">I", zlib.crc32(b"iCCP")) + whole[-12:]


def many_scans() -> bytes:
    """A JPEG of which one scan is repeated: 4000 times 1200x1200 pixels in 200 kB."""
    buffer = io.BytesIO()
    Image.new("RGB", (1200, 1200), (10, 20, 30)).save(buffer, "jpeg", progressive=True)
    whole = buffer.getvalue()
    last = whole[whole.rfind(b"\xff\xc4", 0, whole.rfind(b"\xff\xda")) : -2]
    return whole[:-2] + last * 4000 + whole[-2:]


def test_045_images_that_cannot_be_are_refused_and_nothing_falls(
    server: Server, service: tinker.ServiceClient, renderer: Renderer
) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((64, 64), 40_000, np.uint16)).save(deep, "png")
    files = {
        b"not an image": "chunk 1: the image of 12 bytes is not a readable PNG or JPEG",
        b"": "chunk 1: the image of 0 bytes is not a readable PNG or JPEG",
        photo(64, 64)[:200]: "chunk 1: the image does not decode",
        photo(64, 64, format="gif"): "chunk 1: the image of .* bytes is not a readable PNG or JPEG",
        flood(9000, 9000): "chunk 1: the image has 9000x9000 pixels; 50000000 are allowed",
        flood(60_000, 60_000): "chunk 1: .*(pixels|not a readable)",
        photo(2000, 4): "chunk 1: .*aspect ratio",
        deep.getvalue(): "chunk 1: the image has more than 8 bits a channel",
        late_colour_profile(): "chunk 1: the image does not decode",
        many_scans(): "chunk 1: the JPEG has 4010 scans; at its size, 3472 are allowed",
    }
    assert_each_fails_alone(
        service,
        renderer,
        [
            ("cross_entropy", datum([text(1), picture(data)], [0] * 5, [1.0] * 5), f"datum 1, {message}")
            for data, message in files.items()
        ],
    )
    assert httpx.get(f"{server.base_url}/api/v1/healthz").json() == {"status": "ok"}


def test_045_a_png_that_is_called_jpeg_is_read_as_what_it_is(service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    rows = []
    for format in ("png", "jpeg"):
        one = datum([text(1), picture(photo(64, 64), 4, format)], [0] * 5, [1.0] * 5)
        rows.append(client.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy())
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.fixture
def text_only(tiny_text: Path, tmp_path: Path, forked_ranks: None) -> Iterator[Running]:
    running = Running(tmp_path, backend=RealTrainer(tiny_text, max_context_length=64))
    yield running
    running.stop()


def test_045_a_text_only_model_refuses_images_by_name(text_only: Running) -> None:
    plain = datum([text(1, 2)], [2, 3], [1.0, 1.0])
    pictured = datum([text(1), picture(photo(64, 64))], [0] * 5, [1.0] * 5)
    with tinker.ServiceClient(base_url=text_only.url, api_key="tml-test") as client:
        model = client.create_lora_training_client("tiny", rank=4).result()
        with pytest.raises(tinker.RequestFailedError, match="datum 1, chunk 1: this model takes no images") as caught:
            model.forward_backward([plain, pictured], "cross_entropy").result()
        assert caught.value.category == "user"
        assert model.forward([plain], "cross_entropy").result().metrics["loss:sum"] > 0
