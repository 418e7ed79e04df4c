"""The engine's weights, slots and cache are as large as the memory plan counts them, to 5 %."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from tests.models import (
    LATENTS,
    make_tiny_deepseek_v3,
    make_tiny_nemotron_h,
    make_tiny_qwen3_5,
    make_tiny_text,
    make_tiny_vl,
)
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import Machine, engine_parts
from tinker_server.backends.sampler.engine.engine import engine_args
from tinker_server.embedded import DIRECTORIES, TINY_VL

pytestmark = [pytest.mark.slow]
RANK: Literal[8] = 8
SLOTS = 2
Make = Callable[[Path], Path]


def embedded(_: Path) -> Path:
    return Path(DIRECTORIES[TINY_VL])


keeping_latents = partial(make_tiny_deepseek_v3, **LATENTS)


@pytest.mark.parametrize(
    ("make", "ranks", "train_vision"),
    [
        (make_tiny_vl, 1, True),
        (partial(make_tiny_vl, moe=True), 1, False),
        (make_tiny_qwen3_5, 1, False),
        (make_tiny_deepseek_v3, 1, False),
        (make_tiny_text, 1, False),
        (make_tiny_nemotron_h, 1, False),
        (embedded, 2, False),
        (partial(make_tiny_vl, moe=True), 2, False),
        (partial(make_tiny_qwen3_5, moe=True, linear_num_key_heads=2, linear_num_value_heads=4), 2, False),
        (make_tiny_deepseek_v3, 2, False),
        (make_tiny_nemotron_h, 2, False),
        (keeping_latents, 1, False),
        (keeping_latents, 2, False),
    ],
    ids=[
        *("qwen3-vl", "mixture", "qwen3.5", "deepseek-v3", "text", "nemotron"),
        *("embedded on two", "mixture on two", "qwen3.5 on two", "deepseek-v3 on two", "nemotron on two"),
        *("latents", "latents on two"),
    ],
)
async def test_an_engines_parts_are_as_large_as_planned(
    make: Make, ranks: int, train_vision: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BackendConfig(
        models={"a": str(make(tmp_path / "model"))},
        device="cpu",
        max_context_length=512,
        max_lora_rank=RANK,
        adapter_slots=SLOTS,
        tensor_parallel=ranks,
        train_vision=train_vision,
        kv_cache_bytes=32 << 20,
        scratch_dir=tmp_path / "scratch",
    )
    found = describe_models(config, Machine(64 << 30))["a"]
    keeps = make is keeping_latents
    found = replace(found, spec=replace(found.spec, latent_cache=keeps), size=replace(found.size, latent_cache=keeps))
    arguments = engine_args(found.spec, found.renderer.family.vision)
    arguments.worker_cls = "tests.measuring.Measures"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as the launcher starts a sampler
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_MLA_DISABLE", str(int(make is not keeping_latents)))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        measured = await engine.collective_rpc("measured_bytes")
    finally:
        engine.shutdown()
    assert found.demand is not None
    planned = engine_parts(found.size, found.demand, ranks, "cpu")
    assert len(measured) == ranks
    for of_rank in measured:
        print(of_rank, planned)
        assert of_rank["base"] == pytest.approx(planned["base"], rel=0.05)
        assert of_rank["matrices of latents"] == planned["matrices of latents"]
        assert of_rank["slots"] == pytest.approx(planned["adapter slots"], rel=0.05)
        assert of_rank["token"] * ranks == found.size.token_bytes(ranks)
        assert of_rank["state"] * ranks == pytest.approx(found.size.state_bytes, rel=0.05)
