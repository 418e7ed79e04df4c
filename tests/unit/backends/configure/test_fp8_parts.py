"""Bases in fp8 that the ranks of an engine can divide, and refusals of others by a matrix's name.

pytest tests/unit/backends/configure/test_fp8_parts.py
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.models import DIVIDED_IN_FP8, EXPERTS, make_tiny_of, make_tiny_qwen3_5, quantise_in_blocks
from tests.shapes import shape
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models, find
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.protocol import BackendFailed

MACHINE = Machine(64 << 30)


@pytest.mark.parametrize("kind", DIVIDED_IN_FP8)
def test_a_mixture_in_fp8_has_ranks_of_trainer_and_engine(kind: str, tmp_path: Path) -> None:
    make, num_ranks = DIVIDED_IN_FP8[kind]
    source = quantise_in_blocks(make(tmp_path / "whole"), tmp_path / "quantised")
    config = BackendConfig(models={"a": str(source)}, device="cpu", base_precision="fp8", ranks=2)
    found = describe_models(config.model_copy(update={"tensor_parallel": num_ranks}), MACHINE)["a"].spec
    assert (found.tensor_parallel, found.mesh.shard, found.base_precision) == (num_ranks, 2, "fp8")


def test_matrices_whose_blocks_ranks_would_divide_are_refused_by_name(tmp_path: Path) -> None:
    wide = partial(make_tiny_of, "qwen3_moe", **{**EXPERTS, "moe_intermediate_size": 384})
    sizes: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    linear = partial(make_tiny_qwen3_5, moe=True, **sizes, moe_intermediate_size=256)
    makers: dict[str, Callable[[Path], Path]] = {
        r"mlp\.experts\.\d\.(gate|up|down)_proj": wide,
        r"linear_attn\.in_proj_qkv": linear,
    }
    for number, (name, make) in enumerate(makers.items()):
        source = quantise_in_blocks(make(tmp_path / f"{number} whole"), tmp_path / f"{number} quantised")
        config = BackendConfig(models={"a": str(source)}, device="cpu", base_precision="fp8", tensor_parallel=2)
        with pytest.raises(BackendFailed, match=rf"tensor_parallel 2 .* base_precision fp8: .* blocks of .*{name}"):
            find("a", source, config, MACHINE)
        whole = config.model_copy(update={"base_precision": None})
        assert find("a", source, whole, MACHINE).spec.tensor_parallel == 2


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("235b-a22b", (1, 2, 4)),
        ("30b-a3b", (1, 2)),
        ("Qwen/Qwen3.5-397B-A17B", (1, 2, 4, 8)),
        ("70b", (1, 2, 4, 8, 16, 32)),
    ],
)
def test_published_mixtures_have_these_numbers_of_ranks_in_fp8(name: str, numbers: tuple[int, ...]) -> None:
    found = shape(name, precision="fp8").tensor_parallels
    assert found[: len(numbers)] == numbers
