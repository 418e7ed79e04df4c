"""What a rank does with the image files of a batch."""

import hashlib
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from PIL import Image

from tests.factories import MIXED, cross_entropy, datum, image, prompt, words
from tests.trainers import LORA, forward_backward, trained, trainer
from tinker_server.backends.inputs import images, rendering
from tinker_server.backends.inputs.rendering import Renderer


def test_a_file_is_hashed_once_on_a_rank(tiny_vl: Path, renderer: Renderer) -> None:
    """Also if its datums are computed in several microbatches, each prefetched while the last is computed."""
    rank = trained(trainer(tiny_vl, max_tokens=100), {"m": LORA})
    inputs = [*MIXED.values(), prompt(words(3), image(96, 64, 1))]
    batch = cross_entropy([datum(model_input, renderer, seed) for seed, model_input in enumerate(inputs)])
    num_hashes = 0

    def count(_: FrameType, event: str, function: object) -> None:
        nonlocal num_hashes
        num_hashes += event == "c_call" and function is hashlib.sha256

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        forward_backward(rank, "m", batch)
    finally:
        sys.setprofile(before)
    assert num_hashes == 7, "one of each datum's image chunks"


@pytest.mark.parametrize("max_tokens", [1024, 100])
def test_a_file_is_opened_for_its_header_and_once_to_be_decoded(
    tiny_vl: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Also if it is prefetched, and if several datums have it."""
    rank = trained(trainer(tiny_vl, max_tokens), {"m": LORA})
    inputs = [*MIXED.values(), prompt(words(3), image(96, 64, 1))]
    batch = cross_entropy([datum(one, renderer, seed) for seed, one in enumerate(inputs)])
    opened = Counter[bytes]()
    open_image = images.open_image

    def noted(data: bytes, max_pixels: int) -> Image.Image:
        opened[data] += 1
        return open_image(data, max_pixels)

    for module in (images, rendering):
        monkeypatch.setattr(module, "open_image", noted)
    forward_backward(rank, "m", batch)
    twice = image(96, 64, 1).data
    assert len(opened) == 6 and opened.pop(twice) == 3, "two headers of two datums, and one decoding"
    assert set(opened.values()) == {2}
    opened.clear()
    forward_backward(rank, "m", batch)
    assert sum(opened.values()) == 7, "the tower has seen all images: headers alone are read"
