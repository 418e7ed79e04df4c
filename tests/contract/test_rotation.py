"""Rotary positions of every rope type of transformers, alone and packed.

pytest tests/contract/test_rotation.py
"""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.factories import datum, make_renderer, prompt, words
from tests.models import make_tiny_of
from tests.trainers import LORA, logprobs, perturb, trainer
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import find
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.families.rotation import check_rotation
from tinker_server.backends.protocol import BackendFailed

CONTEXT, ORIGINAL = 128, 64
LONG_ROPE = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": ORIGINAL}
PARAMETERS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONG_ROPE,
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
"""Parameters of every rope type, for heads of 32 numbers."""


def make(directory: Path, rope_type: str) -> Path:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **PARAMETERS[rope_type]}
    return make_tiny_of("llama", directory, rope_parameters=rope, max_position_embeddings=CONTEXT)


def describe(source: Path, context: int | None = None) -> None:
    """As the server does before it loads the model. Raises BackendFailed."""
    config = BackendConfig(models={"m": str(source)}, device="cpu", max_context_length=context)
    find("m", source, config, Machine(64 << 30))


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_every_rope_type_scores_a_datum_alike_alone_and_packed_or_is_refused(rope_type: str, tmp_path: Path) -> None:
    source = make(tmp_path / "model", rope_type)
    longest = CONTEXT
    try:
        describe(source)
    except BackendFailed as refused:
        assert f"rope type {rope_type} is supported within the model's original length of 64 tokens" in str(refused)
        assert "set backend.max_context_length to 64 or less" in str(refused)
        longest = ORIGINAL
        describe(source, longest)
    rank, renderer = trainer(source), make_renderer(source)
    rank.create_model("m", LORA)
    perturb(rank, "m")
    data = [datum(prompt(words(length, length)), renderer, length) for length in (40, longest)]
    assert rank.base.packs
    for item, in_company in zip(data, logprobs(rank, data), strict=True):
        (alone,) = logprobs(rank, [item])
        np.testing.assert_allclose(in_company, alone, atol=1e-4)


def test_a_rope_type_of_one_kind_of_layer_is_refused_like_one_of_all() -> None:
    config = AutoConfig.for_model("gemma3_text", head_dim=32, num_hidden_layers=6, max_position_embeddings=CONTEXT)
    config.rope_parameters["full_attention"] = {"rope_type": "longrope", **LONG_ROPE}
    check_rotation(config, ORIGINAL, "dir")
    with pytest.raises(BackendFailed, match=r"dir: rope type longrope .* would be 65"):
        check_rotation(config, ORIGINAL + 1, "dir")


def test_phi_3_is_served_within_its_original_length_alone(tmp_path: Path) -> None:
    """Whose config names that length beside the rope's parameters, and not in them."""
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    sizes = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    AutoConfig.for_model("phi3", rope_scaling=factors, **sizes).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    check_rotation(config, 4096, "dir")
    with pytest.raises(BackendFailed, match=r"rope type longrope .* original length of 4096 tokens .* would be 4097"):
        check_rotation(config, 4097, "dir")


def test_dynamic_is_refused_beyond_the_length_from_which_it_changes() -> None:
    config = AutoConfig.for_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    config.max_position_embeddings = CONTEXT
    check_rotation(config, CONTEXT, "dir")
    with pytest.raises(BackendFailed, match=r"dir: rope type dynamic .* original length of 128 tokens .* would be 129"):
        check_rotation(config, CONTEXT + 1, "dir")
