"""Whether the experts of new models share factors as at the hosted service, and how many numbers these train.

pytest tests/unit/backends/families/test_lora_layouts.py
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from api_schemas.training import Layout
from backends.config import BackendConfig
from backends.configure.describe import describe_models
from backends.protocol import BackendFailed
from tests.fakes import FakeBaseModel
from tests.models import FAMILIES
from tests.published import SERVICE_COUNTS
from tests.shapes import shape
from tests.submitting import server
from tinker_server.command_line import parse, read_settings

PLANNED = (
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen3-235B-A22B-Instruct-2507",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-397B-A17B",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "deepseek-ai/DeepSeek-V3.1",
)
"""Models whose memory is planned by these numbers, of each kind that the service has."""


@pytest.mark.parametrize("name", PLANNED)
def test_a_model_trains_as_many_numbers_as_at_the_hosted_service(name: str) -> None:
    assert shape(name).numbers.of_layout("service") == sum(SERVICE_COUNTS[name])


def test_the_memory_of_a_mixtures_models_is_planned_by_their_layout() -> None:
    size = shape("Qwen/Qwen3-30B-A3B")
    service = replace(size, lora_layout="service")
    assert size.adapter_numbers(32) - service.adapter_numbers(32) == 32 * (51_904_512 - 14_450_688)
    assert size.slot_bytes(32) == service.slot_bytes(32)  # the engine's slots have the factor of each expert


def test_the_environment_sets_the_layout_of_new_models(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ["serve", "--model", "a=org/name"]
    assert read_settings(parse(serve)).backend.lora_layout == "own"
    monkeypatch.setenv("TINKER_SERVER_BACKEND__LORA_LAYOUT", "service")
    assert read_settings(parse(serve)).backend.lora_layout == "service"


@pytest.mark.parametrize("of_server", ["own", "service"])
@pytest.mark.parametrize(
    ("said", "layout"),
    [(None, None), ({"x": 1}, None), ({"experts": "own"}, "own"), ({"experts": "service"}, "service")],
)
async def test_a_model_has_the_layout_that_its_metadata_or_else_the_server_names(
    tmp_path: Path, of_server: Layout, said: dict[str, object] | None, layout: Layout | None
) -> None:
    async with server(tmp_path) as client:
        base = client.services.models.base("tiny")
        assert isinstance(base, FakeBaseModel)
        base.info = replace(base.info, lora_layout=of_server)
        await client.result(await client.create_model(user_metadata=said))
        run = await client.services.runs.get(client.model_id)
        assert run.trainable.layout == (layout or of_server)


@pytest.mark.parametrize("said", ["shared", 1, None, ["own"]])
async def test_an_unknown_layout_is_refused(tmp_path: Path, said: object) -> None:
    async with server(tmp_path) as client:
        result = await client.result(await client.create_model(user_metadata={"experts": said}))
        error = json.loads(result.body)["error"]
        assert result.failed and f"user_metadata.experts is {said!r}: it must be 'own' or 'service' for tiny" in error


async def test_a_kind_without_the_services_layout_refuses_it(tmp_path: Path) -> None:
    """That would train some rows of its linears, which its engine has not been compared with."""
    async with server(tmp_path) as client:
        base = client.services.models.base("tiny")
        assert isinstance(base, FakeBaseModel)
        base.info = replace(base.info, lora_layouts=("own",))
        result = await client.result(await client.create_model(user_metadata={"experts": "service"}))
        assert result.failed and "experts is 'service': it must be 'own' for tiny" in json.loads(result.body)["error"]


@pytest.mark.parametrize("kind", ["Qwen3 MoE", "Qwen3.5"])
def test_the_setting_is_refused_for_kinds_without_the_services_layout(kind: str, tmp_path: Path) -> None:
    source = FAMILIES[kind](tmp_path / "model")
    settings = BackendConfig(models={"a": str(source)}, lora_layout="service", device="cpu", scratch_dir=tmp_path / "s")
    if kind == "Qwen3 MoE":
        assert describe_models(settings)["a"].spec.lora_layouts == ("own", "service")
    else:
        with pytest.raises(BackendFailed, match=r"lora_layout service .* not been compared with adapters"):
            describe_models(settings)
