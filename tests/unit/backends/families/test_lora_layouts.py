"""Whether the experts of new models share factors as at the hosted service, and how many numbers these train.

pytest tests/unit/backends/families/test_lora_layouts.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tests.fakes import FakeBaseModel
from tests.models import FAMILIES, LATENTS, make_tiny_deepseek_v3
from tests.published import SERVICE_COUNTS
from tests.shapes import shape
from tests.submitting import server
from tinker_server.api_schemas.training import Layout, LoraConfig
from tinker_server.api_schemas.weights import LoadWeightsRequest
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models, with_slots_for
from tinker_server.backends.configure.memory_plan import GIB, Machine
from tinker_server.backends.families.coverage import Numbers
from tinker_server.backends.protocol import NO_RUNS, OwnLayout
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
    own = replace(size, lora_layout="own")
    assert own.adapter_numbers(32) - size.adapter_numbers(32) == 32 * (51_904_512 - 14_450_688)


def test_the_memory_of_slots_is_planned_by_their_form() -> None:
    size = replace(shape("Qwen/Qwen3-30B-A3B"), expert_slots="own")
    shared = replace(size, expert_slots="service")
    others = 835_584 + 153_984  # of attention and head
    assert size.slot_bytes(32) == 2 * 32 * (51_904_512 + others)
    assert shared.slot_bytes(32) == 2 * 32 * (14_450_688 + others)
    # Ranks divide the inner side; each has the whole factors that are shared.
    hidden, inner, layers = 2048, 768, 48
    of_experts = [
        half.slot_bytes(1, 2) - replace(half, numbers=_without(half.numbers, "experts")).slot_bytes(1, 2)
        for half in (size, shared)
    ]
    assert of_experts == [2 * 3 * layers * (128 * (hidden + inner // 2)), 2 * 3 * layers * (hidden + 128 * inner // 2)]


def _without(numbers: Numbers, name: str) -> Numbers:
    return replace(numbers, matrices=tuple(one for one in numbers.matrices if one.name != name))


def test_slots_of_a_linear_that_goes_by_heads_are_planned_with_an_a_for_each_part(tmp_path: Path) -> None:
    source = FAMILIES["Qwen3-Next"](tmp_path / "model")
    settings = BackendConfig(models={"a": str(source)}, device="cpu", scratch_dir=tmp_path / "scratch")
    size = describe_models(settings)["a"].size
    outputs = 2 * (2 * 128 + 4 * 128)  # queries, keys, values and gate
    for num_ranks in (1, 2):
        rest = replace(size, numbers=_without(size.numbers, "in_proj_qkvz")).slot_bytes(3, num_ranks)
        of_linear = 3 * size.number_bytes * (4 * size.hidden + outputs // num_ranks)
        assert size.slot_bytes(3, num_ranks) - rest == of_linear


def test_the_environment_sets_the_layout_of_new_models(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ["serve", "--model", "a=org/name"]
    assert read_settings(parse(serve)).backend.lora_layout == "service"
    monkeypatch.setenv("TINKER_SERVER_BACKEND__LORA_LAYOUT", "own")
    assert read_settings(parse(serve)).backend.lora_layout == "own"


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


@pytest.mark.parametrize(("train_mlp", "slots"), [(True, "service"), (False, "service"), (True, "own")])
async def test_a_model_that_no_engine_has_slots_for_is_refused_by_name(
    tmp_path: Path, train_mlp: bool, slots: Layout
) -> None:
    async with server(tmp_path) as client:
        base = client.services.models.base("tiny")
        assert isinstance(base, FakeBaseModel)
        base.info = replace(base.info, lora_layout="service", expert_slots=slots)
        lora = LoraConfig(rank=8, seed=1, train_mlp=train_mlp)
        result = await client.result(await client.create_model(lora_config=lora, user_metadata={"experts": "own"}))
        assert result.failed == (train_mlp and slots == "service")
        if result.failed:
            error = json.loads(result.body)["error"]
            assert "user_metadata.experts is 'own', but this server's engines have slots for tiny in which" in error
            assert "setting backend.lora_layout service; own takes both" in error


@pytest.mark.parametrize("into", ["a model", "a new model"])
@pytest.mark.parametrize("slots", ["own", "service"])
async def test_weights_that_no_engine_has_slots_for_are_not_loaded(tmp_path: Path, slots: Layout, into: str) -> None:
    async with server(tmp_path) as client:
        base = client.services.models.base("tiny")
        assert isinstance(base, FakeBaseModel)
        base.info = replace(base.info, lora_layout="service")
        await client.result(await client.create_model(user_metadata={"experts": "own"}))
        await client.result(await client.save(1, "first"))
        path = f"tinker://{client.model_id}/weights/first"
        await client.result(await client.create_model(1))
        model_id = f"{client.session_id}:train:1"
        base.info = replace(base.info, expert_slots=slots)
        request = LoadWeightsRequest(model_id=model_id, seq_id=1, path=path, optimizer=True)
        if into == "a model":
            result = await client.result(await client.submit("load_weights", request, 1, model_id))
        else:
            result = await client.result(await client.load_as(2, path, optimizer=True))
        assert result.failed == (slots == "service")
        if result.failed:
            error = json.loads(result.body)["error"]
            assert f"{path} has the LoRA layout own, but this server's engines have slots for tiny in which" in error
            assert "load weights with train_mlp false" in error


@pytest.mark.parametrize("said", ["shared", 1, None, ["own"]])
async def test_an_unknown_layout_is_refused(tmp_path: Path, said: object) -> None:
    async with server(tmp_path) as client:
        result = await client.result(await client.create_model(user_metadata={"experts": said}))
        error = json.loads(result.body)["error"]
        assert result.failed and f"user_metadata.experts is {said!r}: it must be 'own' or 'service'" in error


@pytest.mark.parametrize("kind", ["Qwen3 MoE", "Qwen3.5"])
def test_slots_have_the_form_of_new_models_unless_older_ones_have_experts_of_their_own(
    kind: str, tmp_path: Path
) -> None:
    source = FAMILIES[kind](tmp_path / "model")

    def slots(layout: Layout, *names: str) -> Layout:
        models = {"a": str(source), "b": str(source)}
        settings = BackendConfig(models=models, lora_layout=layout, device="cpu", scratch_dir=tmp_path / "scratch")
        found = describe_models(settings, own=OwnLayout(experts=set(names), attention={"a", "b"}))
        [form] = {form for model in found.values() for form in (model.spec.expert_slots, model.size.expert_slots)}
        return form

    shared = "service" if kind == "Qwen3 MoE" else "own"
    assert [slots("service"), slots("service", "another"), slots("service", "b")] == [shared, shared, "own"]
    assert slots("own") == "own"


def test_whole_keys_and_values_are_kept_for_runs_that_adapt_them_alone(tmp_path: Path) -> None:
    source = make_tiny_deepseek_v3(tmp_path / "model", **LATENTS)
    settings = BackendConfig(models={"a": str(source)}, scratch_dir=tmp_path / "scratch")
    card = Machine(64 * GIB, [80 * GIB], ["card"])
    without: list[dict[str, object]] = [{"device": "cpu"}, {"lora_layout": "own"}, {"base_precision": "fp8"}]
    for changed in without:
        found = describe_models(settings.model_copy(update=changed), card)["a"]
        assert not found.spec.latent_cache and not found.size.latent_cache
    keeping = describe_models(settings, card)["a"]

    def has_latents(own: OwnLayout) -> bool:
        model = with_slots_for(keeping, "a", own)
        assert model.spec.latent_cache == model.size.latent_cache
        return model.spec.latent_cache

    assert has_latents(NO_RUNS) and has_latents(OwnLayout({"a"}, {"b"})) and not has_latents(OwnLayout(set(), {"a"}))


def test_latents_take_a_fraction_of_whole_keys_and_values() -> None:
    keeping = shape("deepseek-ai/DeepSeek-V3.1")
    size = replace(keeping, latent_cache=False)
    assert keeping.latent_cache
    layers, heads = 61, 128
    assert size.token_bytes() == size.token_bytes(8) == 2 * layers * 2 * heads * 192  # 5.7 MiB
    assert keeping.token_bytes() == 2 * layers * (512 + 64)  # 69 KiB
    assert keeping.token_bytes(8) == 8 * keeping.token_bytes()  # whole on every rank
    assert not size.latent_matrix_bytes(8)
    assert keeping.latent_matrix_bytes(8) == 2 * layers * 512 * heads * (128 + 128) // 8
    out_of_latents = layers * (1536 + heads * 192 + 512 + heads * 256)
    assert size.slot_bytes(32) - keeping.slot_bytes(32) == 2 * 32 * out_of_latents


@pytest.mark.parametrize(("train_attn", "latents"), [(True, True), (False, True), (True, False)])
async def test_a_model_that_adapts_keys_out_of_latents_is_refused_where_engines_keep_these(
    tmp_path: Path, train_attn: bool, latents: bool
) -> None:
    async with server(tmp_path) as client:
        base = client.services.models.base("tiny")
        assert isinstance(base, FakeBaseModel)
        base.info = replace(base.info, lora_layout="service", latent_cache=latents)
        lora = LoraConfig(rank=8, seed=1, train_attn=train_attn)
        result = await client.result(await client.create_model(lora_config=lora, user_metadata={"experts": "own"}))
        assert result.failed == (train_attn and latents)
        if result.failed:
            error = json.loads(result.body)["error"]
            assert "this server's engines keep latents of tiny" in error and "or make train_attn false" in error


WITH_LAYOUTS = (
    *("gpt-oss", "DeepSeek-V3", "Qwen3 MoE", "Qwen3-Next", "Qwen2 MoE", "Mixtral", "Qwen3-VL MoE"),
    *("Nemotron-H", "Nemotron-3", "Qwen3.5", "Qwen3.5 MoE"),
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_new_models_have_the_services_layout_where_it_differs(kind: str, tmp_path: Path) -> None:
    source = FAMILIES[kind](tmp_path / "model")
    models, found = {"a": str(source)}, {}
    for layout in get_args(Layout):
        settings = BackendConfig(models=models, lora_layout=layout, device="cpu", scratch_dir=tmp_path / "scratch")
        found[layout] = describe_models(settings)["a"].spec.lora_layout
    has_layouts = kind in WITH_LAYOUTS
    assert found == {"own": "own", "service": "service" if has_layouts else "own"}
