"""Thumbnails of the images in samples."""

import asyncio
import io
import time
import uuid

import numpy as np
import pytest
from PIL import Image

from tests.factories import photo
from tinker_server.dashboard.thumbnails import LARGEST_PIXELS, SIDE_PIXELS, thumbnail


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.flaky(reruns=1)  # holds a limit of processor time
async def test_an_image_is_decoded_once_however_often_it_is_asked_for() -> None:
    data, sample_id = png(3900, 4000), uuid.uuid4().hex
    began = time.process_time()
    first = await thumbnail("alice", uuid.uuid4().hex, 0, data)
    once_s = time.process_time() - began
    began = time.process_time()
    made = await asyncio.gather(*(thumbnail("alice", sample_id, 0, data) for _ in range(30)))
    assert time.process_time() - began < 4 * once_s
    assert set(made) == {first}


async def test_images_of_one_sample_have_their_own() -> None:
    sample_id, images = uuid.uuid4().hex, [photo(400, 300), photo(300, 400)]
    made = [await thumbnail("alice", sample_id, number, data) for number, data in enumerate(images)]
    sizes = []
    for one in made:
        assert one is not None
        with Image.open(io.BytesIO(one)) as small:
            sizes.append(small.size)
    assert sizes == [(SIDE_PIXELS, 120), (120, SIDE_PIXELS)]


async def test_too_large_an_image_has_none() -> None:
    data, sample_id = png(4001, 4000), uuid.uuid4().hex
    assert LARGEST_PIXELS < 4001 * 4000
    assert [await thumbnail("alice", sample_id, 0, data) for _ in range(2)] == [None, None]
