"""Rendering: chunks mean the same to server, trainer and sampler."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from tests.factories import image, make_renderer, photo, prompt, text, twins, words
from tinker_server.api_schemas.inputs import DmelChunk, ImageAssetPointerChunk, ImageChunk
from tinker_server.api_schemas.sampling import SampleRequest, SamplingParams
from tinker_server.backends.inputs.rendering import Renderer, images_of
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.checks import check_sample


def file_of(picture: Image.Image, format: str) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format)
    return buffer.getvalue()


def test_ids_and_pixels_are_those_of_the_models_own_processor(renderer, tiny_vl):
    processor = AutoProcessor.from_pretrained(tiny_vl)
    pictures = [photo(96, 64, 1), photo(50, 130, 2)]
    written = "<|vision_start|><|image_pad|><|vision_end|>hello<|vision_start|><|image_pad|><|vision_end|>"
    expected = processor(text=[written], images=[Image.open(io.BytesIO(one)) for one in pictures], return_tensors="pt")
    before, between, after = (
        processor.tokenizer(part, add_special_tokens=False)["input_ids"] for part in written.split("<|image_pad|>")
    )
    rendered = renderer.render(
        prompt(
            text(*before),
            ImageChunk(data=pictures[0], format="png"),
            text(*between),
            ImageChunk(data=pictures[1], format="png"),
            text(*after),
        ),
        "prompt",
    )
    assert rendered.token_ids_T.tolist() == expected["input_ids"][0].tolist()
    pixels = torch.cat([one.tensors["pixel_values"] for one in rendered.images])
    assert torch.equal(pixels, expected["pixel_values"])
    grids = torch.cat([one.tensors["image_grid_thw"] for one in rendered.images])
    assert torch.equal(grids, expected["image_grid_thw"])
    # The processor makes two equal frames of each patch, from numbers of a byte each.
    assert renderer.pixel_bytes(pictures) == expected["pixel_values"].numel() // 2
    assert renderer.pixel_bytes([b"no image", *pictures[:1]]) == renderer.pixel_bytes(pictures[:1]) > 0


def test_a_checked_sample_has_the_size_of_its_text_and_images(renderer):
    pictures = [photo(96, 64, 1), photo(50, 130, 2)]
    images = [ImageChunk(data=picture, format="png") for picture in pictures]
    request = SampleRequest(prompt=prompt(words(5), *images), base_model="a", sampling_params=SamplingParams())
    size = check_sample(renderer, request, max_context_length=4096, max_images=2)
    assert size.num_tokens == len(renderer.render(request.prompt, "prompt").token_ids_T)
    assert size.pixel_bytes == renderer.pixel_bytes(pictures)


@pytest.mark.parametrize("size", [(32, 32), (300, 200), (480, 360), (17, 900), (1000, 30), (33, 31)])
def test_counts_from_the_header_are_the_counts_from_the_pixels(renderer, size):
    model_input = prompt(image(*size))
    length, (span,) = renderer.layout(model_input, "prompt")
    rendered = renderer.render(model_input, "prompt")
    _, grid_h, grid_w = rendered.images[0].tensors["image_grid_thw"][0].tolist()
    assert length == span.num_tokens == grid_h * grid_w // 4 == len(rendered.token_ids_T)
    assert span.grid == (grid_h // 2, grid_w // 2)
    vision, rgb = renderer.family.vision, Image.open(io.BytesIO(photo(*size)))
    assert vision.size_bytes(span.grid) == vision.process(rgb)["pixel_values"].nbytes


MODES = [("L", "png"), ("L", "jpeg"), ("CMYK", "jpeg"), ("P", "png"), ("RGBA", "png"), ("LA", "png"), ("1", "png")]


@pytest.mark.parametrize(("mode", "format"), MODES)
def test_every_mode_becomes_rgb(renderer, mode, format):
    data = photo(64, 64, 1, mode=mode, format=format)
    rendered = renderer.render(prompt(ImageChunk(data=data, format=format)), "prompt")
    with Image.open(io.BytesIO(data)) as picture:
        as_rgb = file_of(picture.convert("RGB"), "png")
    expected = renderer.render(prompt(ImageChunk(data=as_rgb, format="png")), "prompt")
    assert torch.equal(rendered.images[0].tensors["pixel_values"], expected.images[0].tensors["pixel_values"])


def test_a_jpeg_called_png_is_the_same_image(tiny_vl):
    data = photo(64, 64, format="jpeg")
    called_png, called_jpeg = (
        make_renderer(tiny_vl).render(prompt(ImageChunk(data=data, format=format)), "prompt")
        for format in ("png", "jpeg")
    )
    assert called_png.token_ids_T.tolist() == called_jpeg.token_ids_T.tolist()
    (got,), (wanted,) = called_png.images, called_jpeg.images
    assert torch.equal(got.tensors["pixel_values"], wanted.tensors["pixel_values"])


def test_sixteen_bit_grayscale_is_refused_and_not_clipped(renderer):
    deep = file_of(Image.fromarray(np.full((40, 40), 40000, np.uint16)), "png")
    with pytest.raises(InvalidInput, match="more than 8 bits"):
        renderer.layout(prompt(ImageChunk(data=deep, format="png")), "prompt")


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tiny_vl):
    renderer = Renderer(str(tiny_vl), image_cache_bytes=0, max_image_pixels=10_000)
    with pytest.raises(InvalidInput, match=r"prompt, chunk 1: the image has 200x100 pixels; 10000 are allowed"):
        renderer.layout(prompt(text(1), image(200, 100)), "prompt")


@pytest.mark.parametrize("expected", [63, 5, 0])
def test_a_wrong_expected_tokens_names_both_counts(renderer, expected):
    chunk = ImageChunk(data=photo(96, 64), format="png", expected_tokens=expected)
    with pytest.raises(InvalidInput, match=f"datum 4, chunk 0: Expected {expected} tokens, got 6 from image"):
        renderer.layout(prompt(chunk), "datum 4")


def test_an_extreme_aspect_ratio_is_refused(renderer):
    with pytest.raises(InvalidInput, match="aspect ratio"):
        renderer.layout(prompt(image(4000, 10)), "prompt")


@pytest.mark.parametrize("data", [b"", b"junk", b"GIF89a" + bytes(40), photo(64, 64)[:20]])
def test_bytes_that_are_no_png_or_jpeg_are_refused(renderer, data):
    with pytest.raises(InvalidInput, match=r"chunk 0: the image of .* bytes is not a readable PNG or JPEG"):
        renderer.layout(prompt(ImageChunk(data=data, format="png")), "prompt")


@pytest.mark.parametrize("token", [-1, 384, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(renderer, token):
    with pytest.raises(InvalidInput, match=f"token id {token} is outside the vocabulary"):
        renderer.layout(prompt(text(1, token)), "prompt")


@pytest.mark.parametrize("name", ["<|image_pad|>", "<|video_pad|>"])
def test_a_placeholder_without_an_image_is_refused_by_name(renderer, tiny_vl, name):
    token = AutoTokenizer.from_pretrained(tiny_vl).convert_tokens_to_ids(name)
    message = rf"datum 1, chunk 1: token {token} \({re.escape(name)}\) is .* placeholder .*; send an image chunk"
    with pytest.raises(InvalidInput, match=message):
        renderer.layout(prompt(words(2), text(1, token)), "datum 1")


def test_the_tokens_around_an_image_are_text(renderer, tiny_vl):
    tokenizer = AutoTokenizer.from_pretrained(tiny_vl)
    around = [tokenizer.convert_tokens_to_ids(name) for name in ("<|vision_start|>", "<|vision_end|>")]
    length, (span,) = renderer.layout(prompt(text(around[0]), image(64, 64), text(around[1])), "datum")
    assert (length, span.offset) == (span.num_tokens + 2, 1)


def test_images_for_a_text_model_are_refused_with_their_position(tiny_text):
    with pytest.raises(InvalidInput, match="datum 2, chunk 1: this model takes no images"):
        make_renderer(tiny_text).layout(prompt(words(3), image(64, 64)), "datum 2")


@pytest.mark.parametrize(
    "chunk",
    [ImageAssetPointerChunk(format="png", location="file:///etc/passwd"), DmelChunk(dmel=b"abc")],
    ids=["pointer", "audio"],
)
def test_other_chunks_are_refused_by_name(renderer, chunk):
    with pytest.raises(InvalidInput, match=f"{chunk.type} chunks are not supported"):
        renderer.layout(prompt(chunk), "prompt")


def test_the_same_image_is_processed_once(renderer):
    model_input = prompt(image(60, 60, 9), words(2), image(60, 60, 9))
    first, second = renderer.render(model_input, "prompt").images
    assert first is second


def camera_jpegs(width, height):
    """Two photographs of one camera: more than 8,192 bytes of EXIF before the first that differs."""
    exif = Image.Exif()
    exif[0x010E] = "a description" * 1000
    files = []
    for seed in (1, 2):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(photo(width, height, seed))).save(buffer, "jpeg", exif=exif.tobytes())
        files.append(buffer.getvalue())
    assert files[0][:8192] == files[1][:8192]
    return [ImageChunk(data=data, format="jpeg") for data in files]


@pytest.mark.parametrize("files", [twins, camera_jpegs])
@pytest.mark.parametrize("prefetches", [False, True])
def test_photographs_whose_files_begin_alike_are_two_images(tiny_vl, files, prefetches):
    """Each has the pixels that the model's own processor makes of its file, and no cache takes one for the other."""
    processor = AutoImageProcessor.from_pretrained(tiny_vl)
    chunks, renderer = files(96, 64), make_renderer(tiny_vl)
    wanted = [processor(Image.open(io.BytesIO(one.data)), return_tensors="pt")["pixel_values"] for one in chunks]
    both = prompt(words(2), chunks[0], words(1), chunks[1])
    if prefetches:
        renderer.prefetch([(both, renderer.layout(both, "prompt"))])
    first, second = renderer.render(both, "prompt").images
    assert torch.equal(first.tensors["pixel_values"], wanted[0])
    assert torch.equal(second.tensors["pixel_values"], wanted[1])
    hashes = [name for name, _, _ in images_of(both, renderer.layout(both, "prompt"))]
    assert hashes == [first.hash, second.hash]
    (other,) = renderer.render(prompt(chunks[1]), "prompt", known={first.hash}).images
    assert torch.equal(other.tensors["pixel_values"], wanted[1])
