"""vLLM's own image processors, which ours stand in for: the same tokens, and pixels to float32's rounding.

pytest tests/unit/backends/sampler/test_image_processors.py
"""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from tests.factories import image, make_renderer, present, prompt, words
from tests.models import (
    make_tiny_gemma3,
    make_tiny_internvl,
    make_tiny_qwen2_5_vl,
    make_tiny_qwen3_5,
    make_tiny_smolvlm,
    make_tiny_vl,
)
from tinker_server.backends.sampler.engine.requests import engine_input

KINDS: dict[str, Callable[[Path], Path]] = {
    "Qwen3-VL": make_tiny_vl,
    "Qwen2.5-VL": make_tiny_qwen2_5_vl,
    "Qwen3.5": make_tiny_qwen3_5,
    "InternVL": make_tiny_internvl,
    "SmolVLM2": make_tiny_smolvlm,
    "Gemma 3": make_tiny_gemma3,
}
ROUNDING = 1e-6
"""Largest difference of a normalised pixel; 6e-8 was seen."""


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_own_processor_gives_the_same_tokens_and_pixels(kind: str, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path / "model")
    renderer = make_renderer(source)
    vision = present(renderer.family.vision)
    settings = {**vision.engine_options(1), "dtype": "float32", "enforce_eager": True}
    known = {name: value for name, value in settings.items() if name in ModelConfig.__dataclass_fields__}
    theirs = MULTIMODAL_REGISTRY.create_processor(ModelConfig(model=str(source), **known))
    for size in ((64, 96), (100, 77), (31, 230)):
        before, shown, after = words(3, 1), image(*size, 1), words(4, 2)
        ours = engine_input(renderer.render(prompt(before, shown, after), "prompt"), vision, "somebody")
        items = theirs.info.parse_mm_data({"image": [Image.open(BytesIO(shown.data)).convert("RGB")]})
        marked = [*before.tokens.tolist(), vision.placeholder_id, *after.tokens.tolist()]
        found = theirs(marked, mm_items=items)
        assert found["prompt_token_ids"] == ours["prompt_token_ids"]
        (got,), (wanted,) = found["mm_kwargs"]["image"], ours["mm_kwargs"]["image"]
        assert set(vision.engine_fields) <= set(got.keys())
        for name in vision.engine_fields:
            one, other = (torch.as_tensor(item[name].data) for item in (got, wanted))
            assert one.shape == other.shape, name
            assert (one.float() - other.float()).abs().max() <= ROUNDING, name
        (there,), (here,) = found["mm_placeholders"]["image"], ours["mm_placeholders"]["image"]
        assert (there.offset, there.length) == (here.offset, here.length)
        all_of_it = torch.ones(here.length, dtype=torch.bool)
        masks = [all_of_it if one.is_embed is None else one.is_embed for one in (there, here)]
        assert torch.equal(*masks)
