"""One copy of the base of every family: what the engine loads is what the trainer maps, and what it computes with.

pytest -m slow tests/contract/test_one_copy_families.py
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import fork_sampler
from tests.factories import present, prompt, words
from tests.models import (
    FAMILIES,
    LATENTS,
    make_tiny_deepseek_v3,
    make_tiny_text,
    make_tiny_vl,
    publish_in_fp8,
    quantise,
    quantise_in_blocks,
)
from tests.sampling import sample, sampler_config, scoring
from tests.specs import held
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.base_weights.mapped import Files, map_views
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import BasePrecision, ModelSpec
from tinker_server.backends.protocol import ignore_loading
from tinker_server.backends.sampler.engine.engine import stays_packed
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.loading import load

pytestmark = pytest.mark.slow
REFUSED = ("gpt-oss",)
ALL = {
    **{kind: make for kind, make in FAMILIES.items() if kind not in REFUSED},
    "Qwen3": make_tiny_text,
    "Qwen3-VL": make_tiny_vl,
    "Qwen3-VL, tied": lambda directory: make_tiny_vl(directory, tie=True),
}
KEEPS_LATENTS = "DeepSeek-V3, keeping latents"
MADE_FOR_LATENTS = {KEEPS_LATENTS: lambda directory: make_tiny_deepseek_v3(directory, **LATENTS)}
ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.usefixtures("holder_here")
@pytest.mark.parametrize("family", ALL)
def test_every_tensor_of_the_files_is_mapped_bitwise_and_makes_the_same_model(family: str, tmp_path: Path) -> None:
    source = ALL[family](tmp_path / "model")
    for path in source.glob("*.safetensors"):  # as models are published
        save_file({name: one.bfloat16() for name, one in load_file(path).items()}, path, {"format": "pt"})
    spec = held(replace(sampler_config(source, tmp_path / "scratch"), dtype="bfloat16"), tmp_path / "base")
    assert_mapped(spec, source, source)


@pytest.mark.usefixtures("holder_here")
def test_a_first_start_of_a_holder_starts_no_other_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry

    source = make_tiny_text(tmp_path / "model")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("subprocess.run", None)
    registry._try_inspect_model_cls.cache_clear()
    held(sampler_config(source, tmp_path / "scratch"), tmp_path / "base")
    assert [*tmp_path.glob("cache/modelinfos/*")]


@pytest.mark.usefixtures("holder_here")
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3-Next"])
def test_what_linear_attention_has_in_float32_is_rounded_by_neither(family: str, tmp_path: Path) -> None:
    source = ALL[family](tmp_path / "model")
    exact, generator = {}, torch.Generator().manual_seed(0)
    for path in source.glob("*.safetensors"):  # as models are published
        tensors = {name: one.bfloat16() for name, one in load_file(path).items()}
        for name in tensors:
            if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
                exact[name] = tensors[name] = torch.rand(tensors[name].shape, generator=generator) + 0.5
        save_file(tensors, path, {"format": "pt"})
    assert len(exact) >= 2
    spec = held(replace(sampler_config(source, tmp_path / "scratch"), dtype="bfloat16"), tmp_path / "base")
    engines = map_views(spec.base_socket(None), ALONE.device)
    kind = Renderer(str(source), image_cache_bytes=0, max_image_pixels=10**7).family
    for trainers in (spec, replace(spec, base_dir=None)):
        parameters = dict(load(trainers, kind, ALONE, is_sharded=False).model.named_parameters())
        for name, tensor in exact.items():
            assert engines[name].dtype == parameters[name].dtype == torch.float32
            assert engines[name].equal(tensor) and parameters[name].equal(tensor), name


@pytest.mark.usefixtures("holder_here")
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("Qwen3-VL", None),
        ("Qwen3-VL MoE", None),
        ("Qwen3-VL", "fp8"),
        ("Qwen3-VL MoE", "fp8"),
        ("DeepSeek-V3", "fp8"),
        ("Qwen3.5", "fp8"),
        ("Qwen3.5 MoE", "fp8"),
        ("Qwen3.5", None),
        ("Qwen3.5 MoE", None),
        ("DeepSeek-V3", None),
        ("gpt-oss", "mxfp4"),
    ],
)
def test_a_quantised_base_is_held_and_mapped_dequantised_or_as_it_stays(
    family: str, precision: BasePrecision | None, tmp_path: Path
) -> None:
    source, quantised = (FAMILIES | ALL)[family](tmp_path / "model"), tmp_path / "quantised"
    (quantise if precision == "mxfp4" else quantise_in_blocks)(source, quantised)
    for path in [*source.glob("*.safetensors"), *quantised.glob("*.safetensors")]:
        tensors = {name: one.bfloat16() if one.dtype == torch.float32 else one for name, one in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    spec = replace(sampler_config(quantised, tmp_path / "scratch"), dtype="bfloat16", is_quantised=True)
    spec = held(replace(spec, base_precision=precision), tmp_path / "base")
    assert_mapped(spec, quantised, source if precision is None else quantised)


@pytest.mark.usefixtures("holder_here")
@pytest.mark.parametrize("family", ["Qwen3-VL", "Qwen3-VL MoE", "Qwen3.5 MoE", "Qwen3-Next", "DeepSeek-V3"])
def test_a_base_that_is_quantised_at_load_is_held_as_published_files_have_it(family: str, tmp_path: Path) -> None:
    source = ALL[family](tmp_path / "model")
    for path in source.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(path).items()}, path, {"format": "pt"})
    published = publish_in_fp8(source, tmp_path / "published")
    spec = replace(sampler_config(source, tmp_path / "scratch"), dtype="bfloat16", base_precision="fp8")
    assert_mapped(held(spec, tmp_path / "base"), published, published)


def assert_mapped(spec: ModelSpec, source: Path, whole: Path) -> None:
    """What is held is what the files in `source` have, and a model of it is that of the files in `whole`."""
    mapped = map_views(spec.base_socket(None), ALONE.device)
    with Files(source, torch.bfloat16, stays_packed(spec)) as files:
        # The engine has minus the exponential of Mamba2's: the trainer reads its own.
        assert mapped.keys() == {name for name in files.names() if not name.endswith("mixer.A_log")}
        for name, tensor in mapped.items():
            assert tensor.equal(files.tensor(name).to(tensor.dtype)), name
    kind = Renderer(str(source), image_cache_bytes=0, max_image_pixels=10**7).family
    ours = load(spec, kind, ALONE, is_sharded=False).model
    wanted = load(replace(spec, directory=str(whole), base_dir=None), kind, ALONE, is_sharded=False).model
    memory = next(iter(mapped.values())).untyped_storage().data_ptr()
    parameters = dict(ours.named_parameters())
    for name, tensor in wanted.named_parameters():
        assert parameters[name].equal(tensor) and parameters[name].dtype == tensor.dtype, name
        # What the trainer has in another precision than the engine is its own, and small.
        is_mapped = parameters[name].untyped_storage().data_ptr() == memory
        assert is_mapped or tensor.numel() < 1000, name


@pytest.mark.parametrize("family", ["DeepSeek-V3", KEEPS_LATENTS, "Qwen3-VL MoE", "gpt-oss"])
async def test_an_engine_computes_with_what_it_maps(family: str, tmp_path: Path) -> None:
    """A router keeps a correction of its scores beside its module, in DeepSeek-V3's kind."""
    source = (FAMILIES | ALL | MADE_FOR_LATENTS)[family](tmp_path / "model")
    spec = sampler_config(source, tmp_path / "scratch")
    if family == KEEPS_LATENTS:  # an engine makes further matrices of a mapped one
        spec = replace(spec, latent_cache=True, expert_slots="service")
    if family in REFUSED:  # dequantised
        quantise(source, tmp_path / "quantised")
        spec = replace(spec, directory=str(tmp_path / "quantised"), is_quantised=True, base_precision="mxfp4")
    base = BaseWeights(replace(spec, base_copies=1))
    mapping = SamplerPool(base.spec, base.wrap_start(fork_sampler, they_wait=True))
    reading = SamplerPool(sampler_config(source, tmp_path / "reading"), fork_sampler)  # whole keys and values
    text = scoring(prompt(words(40, 5)))
    try:
        await asyncio.gather(base.start(ignore_loading), mapping.start(), reading.start())
        found, wanted = [present((await sample(pool, text, None)).prompt_logprobs) for pool in (mapping, reading)]
    finally:
        await asyncio.gather(mapping.stop(), reading.stop())
        await base.stop()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
