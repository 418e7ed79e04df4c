"""Planned bytes are those of real tensors, to 5 %, and what a refusal suggests is accepted."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import present
from tests.models import (
    make_tiny_deepseek_v3,
    make_tiny_gemma3,
    make_tiny_internvl,
    make_tiny_of,
    make_tiny_qwen3_5,
    make_tiny_text,
    make_tiny_vl,
)
from tests.shapes import shape
from tinker_server.api_schemas.training import Layout as LoraLayout
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.gpus import cards
from tinker_server.backends.configure.memory_plan import (
    GIB,
    Demand,
    Layout,
    Machine,
    MemoryPlan,
    adapter_bytes,
    engine_parts,
    plan_parts,
    trainer_parts,
)
from tinker_server.backends.configure.nearest_fit import plan_or_suggest, suggestions
from tinker_server.backends.configure.placement import MOST_SLOTS, USUAL_SEQUENCES, USUAL_TOKENS, make_plan, placement
from tinker_server.backends.families.lora_names import find_trained_modules
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.model_spec import Device
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.command_line import parse, read_settings

RANK: Literal[16] = 16
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3-vl": make_tiny_vl,
    "mixture": partial(make_tiny_vl, moe=True),
    "qwen3.5": make_tiny_qwen3_5,
    "internvl": make_tiny_internvl,
    "gemma 3": make_tiny_gemma3,
    "deepseek-v3": make_tiny_deepseek_v3,
    "text": make_tiny_text,
}


def machine(gpus: str) -> Machine:
    names, sizes = zip(*cards(gpus), strict=True)
    return Machine(0, sizes, names)


def plan(name: str, gpus: str, **settings: object) -> MemoryPlan:
    config = BackendConfig(**settings)  # type: ignore[arg-type]
    return plan_or_suggest([shape(name, lora_layout=config.lora_layout)], config, machine(gpus), "cuda")


def part(found: MemoryPlan, process: str, name: str, gpu: int = 0) -> int:
    return sum(one.size_bytes for one in found.parts if (one.gpu, one.process, one.name) == (gpu, process, name))


def num_bytes(tensors: list[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("layout", get_args(LoraLayout))
@pytest.mark.parametrize("kind", FAMILIES)
def test_base_and_adapters_take_what_is_planned(kind: str, layout: LoraLayout, num_ranks: int, tmp_path: Path) -> None:
    source = FAMILIES[kind](tmp_path / "model")
    trains_vision = kind == "qwen3-vl"
    changes: dict[str, Any] = {"train_vision": trains_vision, "lora_layout": layout}
    settings = BackendConfig(models={"a": str(source)}, device="cpu", dtype="bfloat16", max_lora_rank=RANK, **changes)
    found = describe_models(settings, Machine(64 * GIB))["a"]
    assert found.demand is not None
    config = AutoConfig.from_pretrained(source)
    family = find_family(config, str(source))
    model = family.model_class.from_pretrained(source, dtype=torch.bfloat16)
    assert num_bytes(list(model.parameters())) == pytest.approx(found.size.base_bytes, rel=0.05)
    if family.vision is not None:
        tower = [one for name, one in model.named_parameters() if "visual" in name or "vision" in name]
        projector = [one for name, one in model.named_parameters() if "multi_modal_projector" in name]
        assert sum(one.numel() for one in (*tower, *projector)) == found.size.numbers.tower

    modules = find_trained_modules(family, model, train_vision=trains_vision)
    adapters = Adapters(model, modules, RANK, World(0, num_ranks, torch.device("cpu")))
    lora = adapters.create(Trainable(rank=RANK, seed=0, train_vision=trains_vision, layout=layout))
    weights = [half for stack in lora.stacks for half in (stack.a_LrI, stack.b_LrO)]
    for weight in {id(one): one for one in (*weights, *lora.parameters)}.values():
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype)
    lora.optimizer.step()
    held = {id(one): one for one in (*weights, *lora.parameters)}.values()
    gradients = [one.grad for one in weights if one.grad is not None]
    moments = [one for state in lora.optimizer.state.values() for one in state.values()]
    assert num_bytes([*held, *gradients, *moments]) == pytest.approx(
        adapter_bytes(found.size, RANK, num_ranks), rel=0.05
    )
    adapters.load([lora])
    planned = trainer_parts(found.size, found.demand, num_ranks, num_ranks == 1, "cpu")["adapters of microbatches"]
    buffers = [one for buffers in adapters._loaded for one in buffers._all()]
    assert num_bytes(buffers) == pytest.approx(planned, rel=0.05)


def test_activations_are_estimated_as_they_were_measured() -> None:
    """An H200, 4 billion parameters: 1.5 GiB, 2.79 MiB a token, 0.55 if all layers recompute."""
    for recomputes, token_mib in ((False, 2.79), (True, 0.55)):
        wanted = 1.5 * GIB + 16384 * token_mib * 2**20
        assert shape("4b").activation_bytes(16384, recomputes=recomputes) == pytest.approx(wanted, rel=0.05)


def test_the_adapters_of_a_mixture_are_counted_by_ranks() -> None:
    """A master, two moments and a gradient of 32 x 15.4 million numbers, or of 52.9 million if every expert has its
    own; several ranks have a working copy each."""
    wanted_gib: dict[LoraLayout, list[float]] = {"service": [7.4, 5.5, 4.1, 3.5], "own": [25.2, 18.9, 14.2, 11.8]}
    for layout, wanted in wanted_gib.items():
        size = shape("30b-a3b", lora_layout=layout)
        assert [adapter_bytes(size, 32, ranks) / GIB for ranks in (1, 2, 4, 8)] == pytest.approx(wanted, abs=0.05)


def test_the_tower_is_whole_on_every_rank_of_an_engine() -> None:
    numbers = shape("32b").numbers
    assert numbers.tower > 500e6
    for copies, process in ((2, "engine"), (1, "holder")):
        found = plan("32b", "H200:2", ranks=2, tensor_parallel=2, base_copies=copies, max_context_length=8192)
        assert part(found, process, "base") == (numbers.tower + (numbers.base - numbers.tower) // 2) * 2


def test_large_models_of_rank_32_fit_one_card_with_one_copy_of_the_base() -> None:
    for name in ("32b", "30b-a3b"):
        found = plan(name, "H200", base_copies=1, max_lora_rank=32)
        assert found.demands[name].context >= 24576
        assert part(found, "holder", "base") == shape(name).base_bytes
        assert part(found, "trainer", "base") == part(found, "engine", "base") == 0
        where = placement(found, name)
        # vLLM counts what it maps; torch does not. Contexts are neither's.
        held = (where.trainer_fraction + where.sampler_fraction) * found.totals[0]
        assert found.of(0) == pytest.approx(held + (0.6 + 0.75 + 1.25) * GIB, rel=1e-6)
    with pytest.raises(BackendFailed, match=r"trainer base .* engine base .* 32b: contexts of 8192"):
        plan("32b", "H200", base_copies=2)
    assert plan("30b-a3b", "H200", base_copies=2).demands["30b-a3b"].offloads_inputs


def test_seventy_billion_fit_four_cards_in_shards() -> None:
    found = plan("70b", "H200:4")
    layout = found.layouts["70b"]
    assert (len(layout.trainer), layout.engines, layout.replicates) == (4, ((0, 1, 2, 3),), False)
    assert found.demands["70b"].lora_rank >= 32
    assert all(found.of(gpu) <= found.totals[gpu] for gpu in range(4))


def test_trainer_and_engine_are_apart_where_they_do_not_fit_together() -> None:
    name = "Qwen/Qwen3.5-35B-A3B"
    found = plan(name, "H200:2", lora_layout="own", base_copies=2)
    assert found.demands[name].lora_rank == 32
    assert found.layouts[name] == Layout((0,), ((1,),), replicates=True)
    assert found.of(0, process="engine") == found.of(1, process="trainer") == 0
    on_one = plan(name, "H200:1")  # with experts that share factors
    assert on_one.demands[name].lora_rank >= 32


def test_a_base_is_shared_only_where_trainer_and_engine_have_it_whole_or_divided_alike() -> None:
    size = shape("8b-text")
    demand = Demand(4096, 8, 1, 1, 4096, 16, None)
    kinds = {
        "beside": (Layout((0,), ((0,),), replicates=True), [0]),
        "apart": (Layout((0,), ((1,),), replicates=True), []),
        "more ranks": (Layout((0, 1), ((1,),), replicates=True), [0, 1]),
        "divided engine": (Layout((0, 1), ((0, 1),), replicates=True), []),
        "divided alike": (Layout((0, 1), ((0, 1),), replicates=False), [0, 1]),
        "sharded": (Layout((0, 1), ((0,), (1,)), replicates=False), []),
    }
    for kind, (layout, shared) in kinds.items():
        parts = plan_parts([size], {size.name: demand}, {size.name: layout}, "cuda", base_copies=1)
        assert [one.gpu for one in parts if one.process == "holder" and one.name == "base"] == shared, kind
        copies = sum(one.size_bytes for one in parts if one.name == "base")
        if kind == "divided alike":
            assert copies < 2 * size.base_bytes
        elif kind != "sharded":
            whole = len(shared) or len(layout.trainer) + (1 if kind == "divided engine" else len(layout.engines))
            assert copies == whole * size.base_bytes, kind


def test_slots_and_models_are_as_many_as_there_is_room_for() -> None:
    found = {gpus: plan("8b-text", gpus).demands["8b-text"] for gpus in ("A100", "H200")}
    assert found["H200"].lora_rank == 128 and found["H200"].models_at_once > found["A100"].models_at_once >= 1
    asked = plan("8b-text", "H200", models_at_once=2, adapter_slots=3, max_lora_rank=16).demands["8b-text"]
    assert (asked.models_at_once, asked.adapter_slots, asked.lora_rank) == (2, 3, 16)
    assert part(plan("8b-text", "H200", adapter_slots=3, max_lora_rank=16), "engine", "adapter slots") == 4 * shape(
        "8b-text"
    ).slot_bytes(16)


@pytest.mark.parametrize(
    ("gib", "rank", "models", "slots"), [(139, 128, 7, 7), (96, 128, 2, 2), (90, 32, 1, 4), (80, 32, 1, 1)]
)
def test_the_largest_rank_is_128_where_two_models_of_it_fit_and_64_where_four_do(
    gib: int, rank: int, models: int, slots: int
) -> None:
    """Qwen3.5-9B, of which the cookbook distils with rank 128."""
    (found,) = plan_or_suggest(
        [shape("9b")], BackendConfig(base_copies=2), Machine(0, [gib * GIB], ["card"]), "cuda"
    ).demands.values()
    assert (found.lora_rank, found.models_at_once, found.adapter_slots) == (rank, models, slots)


@pytest.mark.parametrize("name", ["4b", "8b-text", "30b-a3b", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-35B-A3B"])
def test_more_models_and_slots_leave_the_cache_room_for_usual_sequences(name: str) -> None:
    size = shape(name)
    for gib in (100, 139, 180):
        machine, config = Machine(0, [gib * GIB], ["card"]), BackendConfig(max_lora_rank=32)
        (found,) = (whole := plan_or_suggest([size], config, machine, "cuda")).demands.values()
        cache = part(whole, "engine", "KV cache") + part(whole, "engine", "more KV cache")
        free = cache + part(whole, "trainer", "more for microbatches")
        if (found.models_at_once, found.adapter_slots) == (1, 1):
            continue
        assert free >= USUAL_SEQUENCES * size.context_bytes(USUAL_TOKENS, 1)
        if found.models_at_once > 1:
            assert found.adapter_slots >= MOST_SLOTS


def test_a_cache_that_is_set_is_planned_as_it_is_and_the_trainer_has_the_rest() -> None:
    found = plan("4b", "H100", kv_cache_bytes=7 * GIB)
    assert part(found, "engine", "KV cache") == 7 * GIB and part(found, "engine", "more KV cache") == 0
    assert part(found, "trainer", "more for microbatches") > 0
    assert found.of(0) == pytest.approx(found.totals[0], abs=4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_that_does_not_hold_a_context_shortens_it_or_is_refused_with_the_least_bytes(device: Device) -> None:
    size = shape("4b")
    of_8192 = size.context_bytes(8192 + 256, 1)  # with two blocks of vLLM on a CPU
    on = Machine(200 * GIB, [80 * GIB], ["card"])

    def planned(num_bytes: int, context: int | None = None) -> int:
        asked = BackendConfig(kv_cache_bytes=num_bytes, max_context_length=context)
        return plan_or_suggest([size], asked, on, device).demands["4b"].context

    assert planned(of_8192) == planned(of_8192, 8192) == 8192
    with pytest.raises(BackendFailed, match=rf"context of 8192 .* \({of_8192} bytes\).* --max-context 7168"):
        planned(of_8192 - 1)
    with pytest.raises(
        BackendFailed,
        match=r"4b: a KV cache of 1 GiB \(--kv-cache, .* what a context of 32768 tokens takes: \d",
    ):
        planned(GIB, 32768)


def test_a_part_of_a_card_is_planned_as_a_card_of_that_size_and_processes_get_fractions_of_the_whole() -> None:
    limit = int(23.5 * GIB)
    found, small = plan("4b", "H100:2", gpu_memory_bytes=limit), plan("4b", "RTX4090:2")
    assert (found.parts, found.demands, found.totals) == (small.parts, small.demands, small.totals)
    ours, theirs = placement(found, "4b"), placement(small, "4b")
    whole = machine("H100").gpu_bytes[0]
    for of_part, of_all in (
        (ours.trainer_fraction, theirs.trainer_fraction),
        (ours.sampler_fraction, theirs.sampler_fraction),
    ):
        assert of_part * whole == pytest.approx(of_all * limit)
    assert ours.gpu_fraction * whole == pytest.approx(limit)
    assert theirs.gpu_fraction == 1 and ours.trainer_bytes == theirs.trainer_bytes


@pytest.mark.parametrize("gib", [16, 23.5, 48, 80])
def test_all_processes_together_keep_to_the_part_of_a_card(gib: float) -> None:
    limit, whole = int(gib * GIB), machine("H200").gpu_bytes[0]
    for name in ("4b", "8b-text", "Qwen/Qwen3.5-4B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-1B"):
        try:
            found = plan(name, "H200", gpu_memory_bytes=limit)
        except BackendFailed as refused:
            assert re.search(r"nearest that fits: .*--gpu-memory \d+", str(refused)), name
            continue
        assert found.of(0) <= limit
        ours = placement(found, name)
        contexts = sum(one.size_bytes for one in found.parts if one.name == "context")
        taken = (ours.trainer_fraction + ours.sampler_fraction) * whole + contexts
        assert taken <= limit * 1.000001 and ours.gpu_fraction * whole == pytest.approx(limit)


def test_a_part_of_a_card_is_refused_by_name_where_there_is_none_or_cards_differ() -> None:
    config = BackendConfig(gpu_memory_bytes=30 * GIB)
    two = Machine(64 * GIB, [80 * GIB, 48 * GIB], ["a", "b"])
    for on, device, reason in (
        (two, "cuda", r"--gpu-memory, setting backend.gpu_memory_bytes\): the GPUs have 48.0 to 80.0 GiB"),
        (machine("L4"), "cuda", "a GPU has 22.0 GiB; give at most that"),
        (Machine(64 * GIB), "cpu", "30 GiB of each GPU .*: on a CPU there is no GPU; leave it out"),
    ):
        with pytest.raises(BackendFailed, match=reason) as refused:
            plan_or_suggest([shape("4b")], config, on, device)  # type: ignore[arg-type]
        assert "nearest" not in str(refused.value)


@pytest.mark.parametrize(
    ("card", "steps"),
    [
        ("L4", (2048, 64)),
        ("RTX4090", (2048, 64)),
        ("RTX5090", (8192, 256)),
        ("A100-40", (8192, 256)),
        ("H100", (8192, 256)),
        ("B200", (8192, 256)),
    ],
)
def test_an_engine_takes_smaller_steps_on_small_cards_alone(card: str, steps: tuple[int, int]) -> None:
    found = plan("Qwen/Qwen3.5-4B", card, max_context_length=4096)
    demand = found.demands["Qwen/Qwen3.5-4B"]
    assert (demand.engine_tokens, demand.max_sequences) == steps
    assert not demand.offloads_inputs
    asked = plan("Qwen/Qwen3.5-4B", card, max_context_length=4096, max_concurrent_samples=100)
    assert asked.demands["Qwen/Qwen3.5-4B"].max_sequences == 100


def test_an_engine_with_small_steps_has_room_for_the_largest_image() -> None:
    size = shape("4b")
    demand = Demand(8192, 8, 1, 1, 8192, 64, None, engine_tokens=2048)
    parts, large = (
        engine_parts(size, demand, 1, "cuda"),
        engine_parts(size, replace(demand, engine_tokens=8192), 1, "cuda"),
    )
    assert parts["step"] < large["step"] and parts["step"] + parts["images"] < large["step"] + large["images"]
    assert parts["step"] + parts["images"] == 16384 * present(size.image_token).forward


def test_a_context_of_8192_of_4_billion_with_images_fits_a_card_of_24_gib_with_inputs_in_main_memory() -> None:
    found = plan("4b", "RTX4090")
    demand, size = found.demands["4b"], shape("4b")
    assert demand.context >= 8192 and demand.lora_rank >= 32 and demand.offloads_inputs
    of_inputs = 4 * size.hidden * (size.num_layers - 2) * demand.context
    least = size.activation_bytes(demand.context, recomputes=True)
    assert size.activation_bytes(demand.context, recomputes=True, offloads=True) == least - of_inputs
    for card in ("RTX5090", "A100-40", "H100", "H200"):
        assert not plan("4b", card).demands["4b"].offloads_inputs


ONE_COPY = [("32b", "H200"), ("30b-a3b", "H200"), ("4b", "L4"), ("70b", "H100:4")]
REFUSED = [
    ("4b", "H100", 2, {"max_context_length": 262144}),
    ("4b", "L4", 2, {}),
    ("8b-text", "A100-40", 2, {}),
    ("8b-text", "H100", 2, {"models_at_once": 16, "max_lora_rank": 128}),
    ("8b-text", "H100", 2, {"kv_cache_bytes": 50 * GIB}),
    ("8b-text", "H100", 2, {"kv_cache_bytes": 1 << 50}),  # found at once
    ("32b", "H200", 1, {"max_context_length": 65536, "max_lora_rank": 64}),
    ("30b-a3b", "H200", 1, {"max_context_length": 65536, "max_lora_rank": 128}),
    ("70b", "H100:4", 2, {}),
    ("32b", "H200", 2, {"max_lora_rank": 32}),
]


def test_one_copy_of_the_base_is_suggested_where_that_is_enough() -> None:
    found = [
        suggestions([shape(name)], BackendConfig(max_lora_rank=32, base_copies=2), machine(gpus), "cuda")
        for name, gpus in ONE_COPY
    ]
    assert [one[0].flag == "--base-copies 1" for one in found] == [True, True, False, True]


@pytest.mark.parametrize(("name", "gpus", "copies", "settings"), REFUSED)
def test_what_a_refusal_suggests_is_accepted_and_one_step_less_is_not(
    name: str, gpus: str, copies: int, settings: dict[str, object]
) -> None:
    config = BackendConfig(base_copies=copies, **settings)  # type: ignore[arg-type]
    with pytest.raises(BackendFailed, match="nearest that fits: ") as refused:
        plan_or_suggest([shape(name)], config, machine(gpus), "cuda")
    found = suggestions([shape(name)], config, machine(gpus), "cuda")
    assert found
    for one in found:
        assert one.flag in str(refused.value)
        other_gpus = re.search(r"--gpu ([^)]+)", one.flag)
        arguments = [] if other_gpus else one.flag.split()
        given = read_settings(parse(["doctor", "--model", "a=org/name", *arguments])).backend
        changed = config.model_copy(update=given.model_dump(exclude_unset=True, exclude={"models"}))
        make_plan([shape(name)], changed, machine(other_gpus[1] if other_gpus else gpus), "cuda")
        if "max_context_length" in one.settings and "max_context_length" in settings:
            longer = {"max_context_length": int(one.settings["max_context_length"]) + 1024}
            with pytest.raises(BackendFailed):
                make_plan([shape(name)], config.model_copy(update=longer), machine(gpus), "cuda")


@pytest.mark.parametrize(
    ("name", "gpus", "settings", "advice"),
    [
        ("70b", "H200:4", {"tensor_parallel": 1}, "backend.tensor_parallel left out"),
        ("70b", "H200:4", {"ranks": 1}, "backend.ranks left out"),
        ("70b", "H200:4", {"trainer_gpus": (0,)}, "backend.trainer_gpus left out"),
        ("70b", "H100:8", {"engines": 4}, "backend.engines left out"),
        ("4b", "H100", {"adapter_slots": 64, "max_lora_rank": 256}, "backend.adapter_slots left out"),
        (
            "4b",
            "RTX4090",
            {"max_context_length": 32768, "max_lora_rank": 128, "models_at_once": 8, "max_images_per_prompt": 2},
            "backend.max_context_length, backend.max_lora_rank, backend.models_at_once left out",
        ),
    ],
)
def test_settings_whose_removal_alone_is_enough_are_named(
    name: str, gpus: str, settings: dict[str, Any], advice: str
) -> None:
    config = BackendConfig(**settings)
    found = suggestions([shape(name)], config, machine(gpus), "cuda")
    (removal,) = [suggestion for suggestion in found if suggestion.flag.endswith(" left out")]
    assert removal.flag == advice
    fewer = {field: value for field, value in settings.items() if field not in removal.settings}
    make_plan([shape(name)], BackendConfig(**fewer), machine(gpus), "cuda")


@pytest.mark.parametrize(
    ("gib", "context", "advice"),
    [
        (0.01, None, "--kv-cache 1.161"),
        (1, 32768, "--max-context 6144 or --kv-cache 4.536"),
        (0.01, 40960, "backend.max_context_length, backend.kv_cache_bytes left out"),
    ],
)
def test_a_cache_that_is_too_small_is_refused_with_a_cache_that_fits(
    gib: float, context: int | None, advice: str
) -> None:
    """The last context fits the card with no cache."""
    config = BackendConfig(kv_cache_bytes=int(gib * GIB), max_context_length=context)
    card = "A100-40" if context == 40960 else "H100"
    with pytest.raises(BackendFailed, match="8b-text: a KV cache of") as refused:
        plan_or_suggest([shape("8b-text")], config, machine(card), "cuda")
    assert str(refused.value).partition("nearest that fits: ")[2].startswith(advice)


def test_a_cache_that_is_too_small_hides_no_lack_of_memory() -> None:
    with pytest.raises(
        BackendFailed, match=r"too little memory on GPU 0: .*nothing nearer than a smaller model, or several changes$"
    ):
        plan_or_suggest([shape("70b")], BackendConfig(kv_cache_bytes=1 << 20), machine("L4"), "cuda")
    with pytest.raises(BackendFailed, match=r"nothing nearer than fewer or smaller models, or several changes$"):
        plan_or_suggest([shape("4b"), shape("8b-text")], BackendConfig(), Machine(GIB), "cpu")


def test_a_context_takes_of_each_gpu_a_ranks_slice_of_it() -> None:
    settings = {"max_context_length": 131_072, "max_lora_rank": 32, "models_at_once": 1}
    alone, halves = plan("4b", "H200:2", **settings), plan("4b", "H200:2", **settings, context_parallel=2)
    whole, half = (part(found, "trainer", "microbatch or optim_step") for found in (alone, halves))
    size, demand = shape("4b"), halves.demands["4b"]
    of_token = size.exchanged_token_bytes + present(size.image_token).features
    assert half == size.activation_bytes(65_536, recomputes=True) + 65_536 * of_token
    assert 0.5 < half / whole < 0.6
    assert (demand.slice_tokens, halves.layouts["4b"].trainer) == (65_536, (0, 1))
    assert part(halves, "trainer", "graphs") == 0 < part(alone, "trainer", "graphs")


def test_a_context_that_fits_no_gpu_fits_several_that_divide_it_and_the_refusal_says_so() -> None:
    settings = {"max_context_length": 262_144, "max_lora_rank": 32, "models_at_once": 1}
    size = replace(shape("4b"), context_parallels=(1, 2, 4))
    config = BackendConfig(**settings, trainer_gpus=(0, 1), sampler_gpus=(0, 1))  # type: ignore[arg-type]
    with pytest.raises(BackendFailed, match=r"nearest that fits: --context-parallel 2 or --max-context \d+"):
        plan_or_suggest([size], config, machine("H100:2"), "cuda")
    assert plan("4b", "H200:2", **settings, context_parallel=2).demands["4b"].context == 262_144
    with pytest.raises(
        BackendFailed, match=r"8 ranks \(setting backend.context_parallel\) on CUDA need as many GPUs; .* has 2"
    ):
        plan("4b", "H200:2", context_parallel=8)


def test_a_device_that_is_not_there_is_no_matter_of_size() -> None:
    nothing = Machine(64 * GIB, (), ())
    for asked in ({}, {"trainer_gpus": (0,)}, {"context_parallel": 2}):
        with pytest.raises(BackendFailed) as refused:
            plan_or_suggest([shape("4b")], BackendConfig(device="cuda", **asked), nothing, "cuda")  # type: ignore[arg-type]
        assert str(refused.value).startswith(
            "--device cuda (setting backend.device): torch sees no GPU; give --device cpu"
        )
        assert "nearest that fits" not in str(refused.value)
    with pytest.raises(BackendFailed, match=r"3 x 1 ranks of engines .* machine has 2, engines may use 2$"):
        plan_or_suggest([shape("4b")], BackendConfig(engines=3), machine("H200:2"), "cuda")


def test_a_base_that_fits_in_fp8_alone_is_refused_with_that_option(tmp_path: Path) -> None:
    source = make_tiny_of("qwen3", tmp_path / "model")
    sizes: dict[str, object] = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    }
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "layer_types": ["full_attention"] * 36}
    written = json.loads((source / "config.json").read_text()) | sizes
    (source / "config.json").write_text(json.dumps(written))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [end, end := end + tensor.nbytes]}
    encoded = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:  # sparse: 14 GiB that are nowhere
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    config = BackendConfig(models={"a": str(source)}, device="cuda", max_context_length=4096)
    card = Machine(64 * GIB, [int(23.5 * GIB)], ["card"])
    with pytest.raises(BackendFailed, match="nearest that fits: --base-precision fp8 or "):
        describe_models(config, card)
    assert describe_models(config.model_copy(update={"base_precision": "fp8"}), card)
