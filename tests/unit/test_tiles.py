"""Models that cut images into tiles: what stands for an image is what their own processor writes."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, InternVLProcessor, InternVLVideoProcessor

from api_schemas.inputs import ImageChunk
from backends.families.coverage import check_coverage
from backends.families.registry import find_family
from backends.protocol import BackendFailed, InvalidInput
from backends.sampler.chat_prompts import chat_renderer
from tests.factories import image, make_renderer, photo, prompt, text, words
from tests.models import make_tiny_internvl

SIZES = [(32, 32), (96, 64), (50, 130), (300, 200), (400, 30), (20, 20)]


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    return make_tiny_internvl(tmp_path_factory.mktemp("internvl") / "model")


@pytest.fixture(scope="module")
def renderer(internvl):
    return make_renderer(internvl)


@pytest.fixture(scope="module")
def processor(internvl):
    return InternVLProcessor(
        AutoImageProcessor.from_pretrained(internvl, backend="torchvision"),
        AutoTokenizer.from_pretrained(internvl),
        InternVLVideoProcessor(),
        image_seq_length=4,
    )


@pytest.mark.parametrize("size", SIZES)
def test_internvl_reads_what_its_own_processor_writes(renderer, processor, size) -> None:
    width, height = size
    pictures = [photo(width, height, 1), photo(64, 96, 2)]
    written = "hello<IMG_CONTEXT>\nworld<IMG_CONTEXT>"
    opened = [Image.open(io.BytesIO(one)) for one in pictures]
    expected = processor(text=[written], images=opened, return_tensors="pt")
    hello, world = (processor.tokenizer(part)["input_ids"] for part in ("hello", "\nworld"))
    first, second = (ImageChunk(data=one, format="png") for one in pictures)
    rendered = renderer.render(prompt(text(*hello), first, text(*world), second), "prompt")
    assert rendered.token_ids_T.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(torch.cat([one.tensors["pixel_values"] for one in rendered.images]), expected["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_an_image_whose_features_are_kept_says_as_much_of_its_tiles_as_its_pixels_do(renderer, size) -> None:
    model_input = prompt(image(*size))
    (whole,) = renderer.render(model_input, "prompt").images
    (kept,) = renderer.render(model_input, "prompt", {whole.hash}).images
    assert "pixel_values" not in kept.tensors
    for name, tensor in kept.tensors.items():
        assert torch.equal(tensor, whole.tensors[name])
    assert whole.tensors["image_num_patches"].tolist() == [len(whole.tensors["pixel_values"])]


@pytest.mark.parametrize("name", ["<img>", "<IMG_CONTEXT>", "</img>"])
def test_a_mark_of_an_image_in_text_is_refused_by_name(renderer, internvl, name) -> None:
    token = AutoTokenizer.from_pretrained(internvl).convert_tokens_to_ids(name)
    with pytest.raises(InvalidInput, match=rf"chunk 0: token {token} \({re.escape(name)}\) .*; send an image chunk"):
        renderer.layout(prompt(text(token), image(64, 64)), "datum")


def test_expected_tokens_count_the_marks_too(renderer) -> None:
    chunk = ImageChunk(data=photo(64, 64), format="png", expected_tokens=5 * 4)
    with pytest.raises(InvalidInput, match="chunk 1: Expected 20 tokens, got 22 from image"):
        renderer.layout(prompt(words(2), chunk), "datum")


def test_internvl_is_covered_and_its_vision_tower_frozen(internvl) -> None:
    config = AutoConfig.from_pretrained(internvl)
    check_coverage(find_family(config, str(internvl)), config, str(internvl))


def test_features_of_another_layer_than_the_engines_are_refused(internvl) -> None:
    config = AutoConfig.from_pretrained(internvl, vision_feature_layer=-2)
    with pytest.raises(BackendFailed, match="features of the tower's last layer"):
        find_family(config, str(internvl))


def test_a_tokenizer_without_the_marks_is_refused_with_their_names(tiny_vl, internvl) -> None:
    with pytest.raises(BackendFailed, match="the tokenizer has no <img>, </img>, <IMG_CONTEXT>"):
        find_family(AutoConfig.from_pretrained(internvl), str(tiny_vl))


async def test_a_chat_has_an_image_where_its_template_has_the_mark(renderer, processor) -> None:
    pictures = [photo(96, 64, 1), photo(20, 20, 2)]
    opened = [Image.open(io.BytesIO(one)) for one in pictures]
    content = [{"type": "image"}, {"type": "text", "text": "hello"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}]
    written = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    ids = processor.tokenizer(written)["input_ids"]
    chat = chat_renderer(SimpleNamespace(), renderer)
    made = await chat._process_tokens_async({"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}})
    expected = processor(text=[written], images=opened, return_tensors="pt")
    assert made["prompt_token_ids"] == expected["input_ids"][0].tolist()
