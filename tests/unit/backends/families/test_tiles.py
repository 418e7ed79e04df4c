"""Models that cut images into tiles: an image's tokens are those that their own processor writes."""

import base64
import io
import json
import re
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    Idefics3Processor,
    InternVLProcessor,
    InternVLVideoProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from tests.factories import image, make_renderer, photo, present, prompt, text, words
from tests.models import make_tiny_internvl, make_tiny_smolvlm
from tinker_server.api_schemas.inputs import ImageChunk
from tinker_server.backends.families.coverage import check_coverage
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.protocol import BackendFailed, ChatTask, InvalidInput
from tinker_server.backends.sampler.engine.chat.prompts import TASK, chat_renderer

KINDS = {
    "InternVL": (make_tiny_internvl, "<IMG_CONTEXT>", ["<img>", "<IMG_CONTEXT>", "</img>"]),
    "SmolVLM2": (make_tiny_smolvlm, "<image>", ["<fake_token_around_image>", "<global-img>", "<image>"]),
}
SIZES = [(32, 32), (96, 64), (50, 130), (300, 200), (400, 30), (20, 20)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def source(kind, tmp_path_factory):
    return KINDS[kind][0](tmp_path_factory.mktemp("tiles") / "model")


@pytest.fixture(scope="module")
def renderer(source):
    return make_renderer(source)


@pytest.fixture(scope="module")
def processor(kind, source):
    parts = AutoImageProcessor.from_pretrained(source, backend="torchvision"), AutoTokenizer.from_pretrained(source)
    if kind == "InternVL":
        return InternVLProcessor(*parts, InternVLVideoProcessor(), image_seq_length=4)
    return SmolVLMProcessor(*parts, SmolVLMVideoProcessor(), image_seq_len=4)


@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_is_what_the_models_own_processor_writes(kind, renderer, processor, size) -> None:
    width, height = size
    pictures = [photo(width, height, 1), photo(64, 96, 2)]
    mark = KINDS[kind][1]
    opened = [Image.open(io.BytesIO(one)) for one in pictures]
    expected = processor(text=[f"hello{mark}\nworld{mark}"], images=[opened], return_tensors="pt")
    hello, world = (processor.tokenizer(part)["input_ids"] for part in ("hello", "\nworld"))
    first, second = (ImageChunk(data=one, format="png") for one in pictures)
    rendered = renderer.render(prompt(text(*hello), first, text(*world), second), "prompt")
    assert rendered.token_ids_T.tolist() == expected["input_ids"][0].tolist()
    for span, one in zip(rendered.spans, rendered.images, strict=True):
        assert renderer.family.vision.size_bytes(span.grid) == one.tensors["pixel_values"].numel()
    pixels = torch.cat([one.tensors["pixel_values"] for one in rendered.images])
    assert torch.equal(pixels, expected["pixel_values"].reshape(pixels.shape))


@pytest.mark.parametrize("size", SIZES)
def test_an_image_with_cached_features_describes_its_tiles_as_its_pixels_do(renderer, size) -> None:
    model_input = prompt(image(*size))
    (whole,) = renderer.render(model_input, "prompt").images
    (kept,) = renderer.render(model_input, "prompt", {whole.hash}).images
    assert kept.tensors and "pixel_values" not in kept.tensors
    for name, tensor in kept.tensors.items():
        assert torch.equal(tensor, whole.tensors[name])
    assert [len(whole.tensors["pixel_values"])] in [tensor.tolist() for tensor in kept.tensors.values()]


def test_a_mark_of_an_image_in_text_is_refused_by_name(kind, renderer, source) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    for name in KINDS[kind][2]:
        token = tokenizer.convert_tokens_to_ids(name)
        message = rf"chunk 0: token {token} \({re.escape(name)}\) .*; send an image chunk"
        with pytest.raises(InvalidInput, match=message):
            renderer.layout(prompt(text(token), image(64, 64)), "datum")


def test_expected_tokens_count_the_marks_too(kind, renderer) -> None:
    tiles = {"InternVL": 5, "SmolVLM2": 10}[kind]
    chunk = ImageChunk(data=photo(64, 64), format="png", expected_tokens=tiles * 4)
    with pytest.raises(InvalidInput, match=f"chunk 1: Expected {tiles * 4} tokens, got"):
        renderer.layout(prompt(words(2), chunk), "datum")


async def test_a_chat_has_an_image_where_its_template_has_the_mark(renderer, processor) -> None:
    pictures = [photo(96, 64, 1), photo(20, 20, 2)]
    content = [{"type": "image"}, {"type": "text", "text": "hello"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}]
    written = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    ids = processor.tokenizer(written)["input_ids"]
    chat = chat_renderer(SimpleNamespace(_process_tokens_async=None), renderer)
    TASK.set(ChatTask("chat_completions", {"messages": messages}, None, "somebody"))
    sent = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures]
    made = await chat._process_tokens_async({"prompt_token_ids": ids, "multi_modal_data": {"image": sent}})
    opened = [Image.open(io.BytesIO(one)) for one in pictures]
    expected = processor(text=[written], images=[opened], return_tensors="pt")
    assert made["prompt_token_ids"] == expected["input_ids"][0].tolist()


def test_a_kind_is_covered_and_its_vision_tower_frozen(source) -> None:
    config = AutoConfig.from_pretrained(source)
    numbers = check_coverage(find_family(config, str(source)), config, str(source))
    # Of rank 1, in each of two layers: queries of two heads of 32 numbers and what brings them together, a head of
    # keys and of values, gate, up and down.
    layer = 2 * (64 + 64) + 2 * (32 + 64) + 3 * (128 + 64)
    assert numbers.adapter == 2 * layer + config.text_config.vocab_size + 64
    assert not any(one.in_tower for one in numbers.matrices) and numbers.tower > 0


def test_a_tokenizer_without_the_marks_is_refused_with_their_names(kind, tiny_vl, source) -> None:
    missing = "<img>, </img>, <IMG_CONTEXT>" if kind == "InternVL" else "<fake_token_around_image>, <global-img>"
    config = AutoConfig.from_pretrained(source)
    (tiny_vl_copy := source.parent / "other").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny_vl_copy / name).write_bytes((tiny_vl / name).read_bytes())
    (tiny_vl_copy / "preprocessor_config.json").write_bytes((source / "preprocessor_config.json").read_bytes())
    with pytest.raises(BackendFailed, match=f"the tokenizer has no {missing}"):
        find_family(config, str(tiny_vl_copy))


def test_another_placeholder_in_the_config_than_in_the_tokenizer_is_refused(source) -> None:
    config = AutoConfig.from_pretrained(source, image_token_id=7)
    with pytest.raises(BackendFailed, match="of the tokenizer, and 7 in the config"):
        find_family(config, str(source))


def test_internvl_with_features_of_another_layer_than_the_engines_is_refused(tmp_path) -> None:
    source = make_tiny_internvl(tmp_path / "model")
    config = AutoConfig.from_pretrained(source, vision_feature_layer=-2)
    with pytest.raises(BackendFailed, match="features from the tower's last layer"):
        find_family(config, str(source))


def test_smolvlm_with_tiles_of_another_size_than_its_towers_is_refused(tmp_path) -> None:
    source = make_tiny_smolvlm(tmp_path / "model")
    change(source, max_image_size={"longest_edge": 48})
    with pytest.raises(BackendFailed, match="tiles of 48 pixels, its vision tower sees 32"):
        make_renderer(source)


@pytest.mark.parametrize("settings", [{"size": {"longest_edge": 80}}, {"do_image_splitting": False}], ids=str)
def test_smolvlm_counts_tiles_as_its_processor_cuts_them(tmp_path, settings) -> None:
    source = make_tiny_smolvlm(tmp_path / "model", first=True)
    change(source, **settings)
    renderer = make_renderer(source)
    own = AutoImageProcessor.from_pretrained(source, backend="torchvision")
    processor = Idefics3Processor(own, AutoTokenizer.from_pretrained(source), image_seq_len=4)
    for width, height in [*SIZES, (81, 33), (33, 81), (7, 300), (65, 64), (64, 65), (128, 97)]:
        file = photo(width, height)
        cut = own(images=[Image.open(io.BytesIO(file))], return_row_col_info=True)
        rows, columns = cut["rows"][0][0], cut["cols"][0][0]
        assert present(renderer.family.vision).grid(width, height) == (rows, columns), (width, height)
        expected = processor(text=["<image>"], images=[[Image.open(io.BytesIO(file))]])["input_ids"][0]
        rendered = renderer.render(prompt(ImageChunk(data=file, format="png")), "prompt")
        assert rendered.token_ids_T.tolist() == expected


def change(source, **settings) -> None:
    """Settings of the image processor."""
    path = source / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
