"""Gemma 3 with images: an image's tokens are those of its own processor, and what the engine would compute otherwise is
refused by name.

pytest tests/unit/backends/families/test_gemma3.py
"""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Gemma3Processor

from tests.factories import image, make_renderer, photo, present, prompt, text, words
from tests.models import make_tiny_gemma3
from tinker_server.api_schemas.inputs import ImageChunk
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.families.coverage import check_coverage, image_token
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.distributed import ALONE
from tinker_server.backends.trainer.model.compiling import text_microbatch
from tinker_server.backends.trainer.model.packing import pack

MARKS = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gemma3(tmp_path_factory.mktemp("gemma3") / "model")


@pytest.fixture(scope="module")
def renderer(source: Path) -> Renderer:
    return make_renderer(source)


@pytest.mark.parametrize(("width", "height"), [(64, 64), (300, 200), (400, 30), (20, 20)])
def test_a_prompt_is_what_the_models_own_processor_writes(
    renderer: Renderer, source: Path, width: int, height: int
) -> None:
    pictures = [photo(width, height, 1), photo(64, 96, 2)]
    own = AutoImageProcessor.from_pretrained(source, backend="torchvision")
    processor = Gemma3Processor(own, AutoTokenizer.from_pretrained(source), image_seq_length=16)
    opened = [Image.open(io.BytesIO(one)) for one in pictures]
    expected = processor(text=[f"hello{MARKS[0]}world{MARKS[0]}"], images=[opened], return_tensors="pt")
    hello, world = (processor.tokenizer(part)["input_ids"] for part in ("hello", "world"))
    first, second = (ImageChunk(data=one, format="png") for one in pictures)
    rendered = renderer.render(prompt(text(*hello), first, text(*world), second), "prompt")
    assert rendered.token_ids_T.tolist() == expected["input_ids"][0].tolist()
    is_feature_T = torch.from_numpy(rendered.token_ids_T == present(renderer.family.vision).feature_id)
    assert torch.equal(is_feature_T.int(), expected["token_type_ids"][0])
    pixels = torch.cat([one.tensors["pixel_values"] for one in rendered.images])
    assert torch.equal(pixels, expected["pixel_values"])


def test_an_image_with_cached_features_is_described_as_its_pixels_are(renderer: Renderer) -> None:
    model_input = prompt(image(70, 30))
    (whole,) = renderer.render(model_input, "prompt").images
    (kept,) = renderer.render(model_input, "prompt", {whole.hash}).images
    assert kept.tensors.keys() == {"num_patches"} and torch.equal(kept.tensors["num_patches"], torch.tensor([1]))
    assert whole.tensors["num_patches"].tolist() == [len(whole.tensors["pixel_values"])]


def test_a_mark_of_an_image_in_text_is_refused_by_name(renderer: Renderer, source: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    for name in MARKS:
        token = tokenizer.convert_tokens_to_ids(name)
        with pytest.raises(InvalidInput, match=rf"chunk 0: token {token} \({name}\) .*; send an image chunk"):
            renderer.layout(prompt(text(token), image(64, 64)), "datum")


def test_expected_tokens_count_the_marks_and_newlines_too(renderer: Renderer) -> None:
    for expected in (16, 18):
        chunk = ImageChunk(data=photo(64, 64), format="png", expected_tokens=expected)
        with pytest.raises(InvalidInput, match=f"chunk 1: Expected {expected} tokens, got 20 from image"):
            renderer.layout(prompt(words(2), chunk), "datum")


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"do_pan_and_scan": True}, "cuts images into crops .do_pan_and_scan., which is not supported"),
        ({"size": {"height": 32, "width": 64}}, "images of 64 x 32 pixels, its vision tower sees 64 x 64"),
    ],
)
def test_an_image_processor_that_the_tower_does_not_fit_is_refused(
    tmp_path: Path, settings: dict[str, object], refusal: str
) -> None:
    source = make_tiny_gemma3(tmp_path / "model")
    path = source / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(BackendFailed, match=refusal):
        make_renderer(source)


@pytest.mark.parametrize(
    ("part", "changes", "refusal"),
    [
        ("text_config", {"sliding_window": 15}, "a sliding_window of 15 tokens, shorter than the 16 of an image"),
        ("vision_config", {"vision_use_head": True}, "a vision tower with a head of its own"),
        (None, {"mm_tokens_per_image": 9}, "9 tokens of an image .* are no square that divides the 64 patches"),
        (None, {"mm_tokens_per_image": 8}, "8 tokens of an image .* are no square"),
        (None, {"image_token_index": 7}, "of the tokenizer, and 7 in the config"),
    ],
)
def test_a_config_with_which_the_engine_would_compute_other_numbers_is_refused(
    source: Path, part: str | None, changes: dict[str, object], refusal: str
) -> None:
    config = AutoConfig.from_pretrained(source)
    for name, value in changes.items():
        setattr(config if part is None else getattr(config, part), name, value)
    with pytest.raises(BackendFailed, match=refusal):
        find_family(config, str(source))


def test_what_was_not_compared_is_refused_at_start(source: Path) -> None:
    config = BackendConfig(models={"a": str(source)}, device="cpu", train_vision=True)
    with pytest.raises(BackendFailed, match="LoRA on this kind of vision tower is not supported"):
        describe_models(config, Machine(64 << 30, (80 << 30,), ("a GPU",)))


def test_it_is_covered_and_its_vision_tower_frozen(source: Path) -> None:
    config = AutoConfig.from_pretrained(source)
    check_coverage(find_family(config, str(source)), config, str(source))
    token = present(image_token(config, 4))
    assert (token.pixels, token.features) == (4 * 3 * config.vision_config.patch_size**2, 4 * 64)  # of four patches


def test_only_its_images_are_seen_whole_each_in_its_place_of_a_packed_microbatch(
    renderer: Renderer, source: Path, tiny_vl: Path
) -> None:
    inputs = [prompt(words(5, 1), image(64, 64, 1), image(64, 64, 1)), prompt(words(3, 2)), prompt(image(64, 64, 2))]
    for one in (renderer, make_renderer(tiny_vl)):
        samples = [(found, found.token_ids_T) for found in (one.render(each, "datum") for each in inputs)]
        batches = [pack(part, one.family, torch.device("cpu")) for part in (samples, samples[1:2])]
        found = [batch.whole_images_IF for batch in batches]
        assert [images_IF is not None for images_IF in found] == [one is renderer, False]
        if one is renderer:
            whole_IF = present(found[0])
    expected = torch.tensor([7, 27, 50])[:, None] + torch.arange(16)  # two newlines are a token, and the mark
    assert torch.equal(whole_IF, expected)
    made_up = text_microbatch(renderer, ALONE, [40, 30], with_image=True)
    assert torch.equal(present(made_up.whole_images_IF), 2 + torch.arange(16)[None])
    assert not made_up.images and text_microbatch(renderer, ALONE, [40, 30]).whole_images_IF is None
