"""Several base models in one server.

pytest tests/contract/test_several_models.py
"""

import logging
import re
from pathlib import Path

import pytest

from tests.engines import fork_sampler
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure import create, placement
from tinker_server.backends.configure.create import LocalBackend
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.protocol import BackendFailed

KV_CACHE = 64 << 20


def config(directory: Path, **models: Path) -> BackendConfig:
    return BackendConfig(
        models={name: str(source) for name, source in models.items()},
        device="cpu",
        kv_cache_bytes=KV_CACHE,
        max_context_length=512,
        scratch_dir=directory,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
async def test_several_models_load_side_by_side_with_a_line_each(
    tiny_vl: Path, tiny_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "launch_sampler", fork_sampler)
    # What other tests take just then would decide how many slots there are.
    monkeypatch.setattr(placement, "free_main_bytes", lambda: 16 << 30)
    backend = LocalBackend(config(tmp_path, seeing=tiny_vl, blind=tiny_text, alias=tiny_text))
    caplog.set_level(logging.INFO, "tinker_server.backends.configure.create")
    await backend.start()
    try:
        lines = [
            record.getMessage() for record in caplog.records if record.name == "tinker_server.backends.configure.create"
        ]
        for line, name in zip(lines[:2], ("seeing", "blind"), strict=True):  # before one of them is ready
            assert re.fullmatch(
                rf"{name}: loading trainer and sampler, 0.00 GiB of weights each, .*ranks up to 128, 8 slots", line
            )
        assert set(re.findall(r"(\w+): ready after \d+ s", "\n".join(lines[2:]))) == {"seeing", "blind"}
        assert backend.models["alias"].trainer is backend.models["blind"].trainer
        assert backend.models["alias"].sampler is backend.models["blind"].sampler
        for name, takes_images in (("seeing", True), ("blind", False), ("alias", False)):
            info = backend.models[name].info
            assert (info.name, info.takes_images) == (name, takes_images)
            await backend.models[name].trainer.create_model(f"{name}:model", Trainable(rank=4, seed=1), "owner")
    finally:
        await backend.stop()


def test_models_that_do_not_fit_together_are_refused_with_figures(
    tiny_vl: Path, tiny_text: Path, tmp_path: Path
) -> None:
    one = config(tmp_path, seeing=tiny_vl)
    both = config(tmp_path, seeing=tiny_vl, blind=tiny_text)
    room_for_one = Machine(4 << 30)
    assert describe_models(one, room_for_one).keys() == {"seeing"}
    with pytest.raises(BackendFailed, match=r"4\.0 GiB are free, 6\.1 GiB are needed: seeing 3\.1 GiB .*; blind 3\.1 "):
        describe_models(both, room_for_one)


def test_the_size_of_a_kv_cache_holds_on_cuda_too_within_the_samplers_part(tiny_vl: Path, tmp_path: Path) -> None:
    machine = Machine(0, [80 << 30])
    cuda = config(tmp_path, seeing=tiny_vl).model_copy(update={"device": "cuda"})
    described = describe_models(cuda, machine)["seeing"].spec
    assert described.kv_cache_bytes == KV_CACHE
    unset = describe_models(cuda.model_copy(update={"kv_cache_bytes": None}), machine)["seeing"].spec
    assert unset.kv_cache_bytes is None
    assert unset.placement.sampler_fraction > 0.3 > described.placement.sampler_fraction
    with pytest.raises(
        BackendFailed, match=r"GPU 0: 80\.0 GiB are there, 8\d\.\d .*engine KV cache 78\.0 .*--kv-cache 7\d"
    ):
        describe_models(cuda.model_copy(update={"kv_cache_bytes": 78 << 30}), machine)


def test_names_that_share_a_directory_are_counted_once(tiny_text: Path, tmp_path: Path) -> None:
    assert describe_models(config(tmp_path, first=tiny_text, second=tiny_text), Machine(4 << 30)).keys() == {
        "first",
        "second",
    }
