"""A model's own image processor, stopped while its pixels are bytes, which are then normalised.

pytest tests/unit/backends/families/test_processors.py
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.factories import image, make_renderer, present, prompt
from tests.models import make_tiny_gemma3, make_tiny_internvl, make_tiny_qwen2_5_vl, make_tiny_smolvlm, make_tiny_vl
from tinker_server.backends.families.processors import ImageProcessor
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed

KINDS = {
    "Qwen3-VL": (make_tiny_vl, {}),
    "Qwen2.5-VL": (make_tiny_qwen2_5_vl, {}),
    "InternVL": (make_tiny_internvl, {"crop_to_patches": True}),
    "SmolVLM2": (make_tiny_smolvlm, {"do_pad": False}),
    "Gemma 3": (make_tiny_gemma3, {"do_pan_and_scan": False}),
}
OPENAI_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
"""Settings of the published Qwen2.5-VL."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def source(kind, tmp_path_factory):
    directory = KINDS[kind][0](tmp_path_factory.mktemp("processors") / "model")
    changed(directory, OPENAI_CLIP)
    return directory


@pytest.fixture(scope="module")
def processor(kind, source):
    return ImageProcessor(str(source), **KINDS[kind][1])


def changed(directory, settings) -> None:
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("size", [(96, 64), (50, 130), (33, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_normalised_later_are_bitwise_the_processors_own(kind, source, processor, size, dtype) -> None:
    vision = make_renderer(source).family.vision
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8))
    pixels = present(vision).process(noise)["pixel_values"]
    assert pixels.dtype == torch.uint8
    wanted = processor.own([noise], return_tensors="pt", **KINDS[kind][1])["pixel_values"].to(dtype)
    normalised = present(vision).normalise(pixels, dtype)
    assert normalised.dtype == dtype
    assert torch.equal(normalised, wanted.view_as(normalised))


def test_every_value_of_every_channel_is_normalised_as_the_processor_does(processor) -> None:
    values_3V = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    own = processor.own
    statistics = tuple(own.image_mean), tuple(own.image_std)
    wanted = own.rescale_and_normalize(values_3V[None, :, None], True, own.rescale_factor, True, *statistics)
    assert torch.equal(processor.normalise(values_3V.view(1, -1), torch.float32), wanted.view(1, -1))


def test_many_patches_are_normalised_part_by_part(processor, monkeypatch) -> None:
    pixels = torch.randint(0, 256, (7, 12), dtype=torch.uint8)
    whole = processor.normalise(pixels, torch.float32)
    for cells in (1, 25, 36):
        monkeypatch.setattr("tinker_server.backends.families.processors._VALUES_AT_ONCE", cells)
        assert torch.equal(processor.normalise(pixels, torch.float32), whole)


def test_a_trainers_pixels_stay_bytes_and_a_samplers_are_normalised(source) -> None:
    model_input = prompt(image(70, 50))
    limits: dict[str, Any] = {"image_cache_bytes": 0, "max_image_pixels": 10**7}
    (stays,) = Renderer(str(source), pixel_dtype=torch.uint8, **limits).render(model_input, "prompt").images
    sampler = Renderer(str(source), pixel_dtype=torch.bfloat16, **limits)
    (rounded,) = sampler.render(model_input, "prompt").images
    pixels = stays.tensors["pixel_values"]
    assert pixels.dtype == torch.uint8 and pixels.nbytes == present(sampler.family.vision).size_bytes(
        sampler.layout(model_input, "prompt")[1][0].grid
    )
    wanted = present(sampler.family.vision).normalise(pixels, torch.bfloat16)
    assert torch.equal(rounded.tensors["pixel_values"], wanted)


@pytest.mark.parametrize("settings", [{"do_normalize": False}, {"do_rescale": False}])
def test_a_processor_that_does_not_normalise_is_refused_by_name(tmp_path, settings) -> None:
    directory = make_tiny_vl(tmp_path / "model")
    changed(directory, settings)
    with pytest.raises(BackendFailed, match="model: its image processor does not rescale and normalise"):
        make_renderer(directory)


def test_a_processor_that_does_more_to_pixels_is_refused_by_name(tiny_vl, monkeypatch) -> None:
    own = type(ImageProcessor(str(tiny_vl)).own)
    normalise = own.rescale_and_normalize
    monkeypatch.setattr(own, "rescale_and_normalize", lambda *args: normalise(*args) * (2 if args[2] else 1))
    with pytest.raises(BackendFailed, match="does more to pixels than to rescale and normalise them"):
        ImageProcessor(str(tiny_vl))
