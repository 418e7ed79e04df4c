"""Every base model's share of a machine, and the message if they do not fit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.models import (
    EXPERTS,
    make_tiny_gpt_oss,
    make_tiny_internvl,
    make_tiny_nemotron_h,
    make_tiny_of,
    make_tiny_qwen3_5,
    make_tiny_smolvlm,
    make_tiny_vl,
    quantise,
)
from tests.specs import tiny_spec
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.asked_gpus import Contradiction
from tinker_server.backends.configure.describe import describe_models, find
from tinker_server.backends.configure.memory_plan import Layout, Machine, MemoryPlan
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.nearest_fit import idle_gpus, plan_or_suggest, suggestions
from tinker_server.backends.configure.placement import make_plan, placement
from tinker_server.backends.families.coverage import LoraMatrices, Numbers
from tinker_server.backends.formats.mxfp4 import row_bytes
from tinker_server.backends.model_spec import BasePrecision, Device, Mesh, Placement
from tinker_server.backends.protocol import BackendFailed
from tinker_server.embedded import DIRECTORIES, TINY_VL

GIB = 1 << 30


def model(name: str, base_gib: int, gathered_gib: float = 0.25, **more: Any) -> ModelSize:
    """Of bfloat16, with next to no activations; its cache is the least, 512 MiB on the CPU and a GiB on a GPU."""
    numbers = Numbers(base_gib * GIB // 2, 0, (LoraMatrices("q_proj", 1, 512, 512),), int(gathered_gib * GIB) // 2)
    shape: dict[str, Any] = {"hidden": 64, "num_layers": 1, "vocab_size": 1000, "layer_token_bytes": 1.0}
    return ModelSize(name, 2, replace(numbers, **more), **shape, kv_token_bytes=1, tensor_parallels=(1, 2, 4))


SMALL, LARGE = model("small", 2), model("large", 16, 1)


def plan(
    sizes: list[ModelSize],
    machine: Machine,
    device: Device = "cuda",
    base_copies: Literal[1, 2] | None = 2,
    **settings: Any,
) -> MemoryPlan:
    return make_plan(sizes, BackendConfig(base_copies=base_copies, **settings), machine, device)


def gpus(size_gib: int, count: int = 1) -> Machine:
    return Machine(0, [size_gib * GIB] * count)


ADAPTERS = 1024 * (2 * 128 + 16 * 16 + 6 * 16 + 2 * 16)
"""More than the adapters of one model of rank 8 of these shapes take on the CPU."""


def test_memory_of_all_models_is_summed_and_refused_with_each_ones_figures() -> None:
    one = 2 * (2 * GIB + 3 * GIB // 2) + GIB // 2 + ADAPTERS
    models = [SMALL, model("other", 2)]
    plan(models[:1], Machine(one), "cpu")
    plan(models, Machine(2 * one), "cpu")
    with pytest.raises(BackendFailed, match=r"14\.5 GiB are free, 15\.0 .* needed: small 7\.5 GiB .*; other 7\.5 "):
        plan(models, Machine(2 * one - GIB // 2), "cpu")


def test_ranks_on_the_cpu_share_one_copy_and_each_all_gathers_a_part() -> None:
    needed = 2 * GIB + 2 * (GIB + GIB // 2) + 3 * 3 * GIB // 2 + GIB // 2
    plan([SMALL], Machine(needed + ADAPTERS), "cpu", ranks=2)
    with pytest.raises(BackendFailed, match=r"small 10\.0 GiB \(trainer base 3\.0 GiB, .* trainer process 3\.0 GiB"):
        plan([SMALL], Machine(needed - 1), "cpu", ranks=2)


def test_a_model_alone_on_a_gpu_gets_all_of_it() -> None:
    found = plan([LARGE], gpus(80))
    assert found.of(0) == pytest.approx(80 * GIB, abs=4)
    (where,) = [placement(found, "large")]
    assert where.gpus == (0,) and where.engines == ((0,),)
    # All but what neither torch nor vLLM counts.
    assert where.sampler_fraction + where.trainer_fraction == pytest.approx(1 - 2 / 80)


def test_models_on_one_gpu_share_it_and_no_byte_is_given_twice() -> None:
    found = plan([SMALL, LARGE], gpus(80))
    assert found.of(0) == pytest.approx(80 * GIB, abs=4)
    where = {name: placement(found, name) for name in ("small", "large")}
    fractions = [one.sampler_fraction + one.trainer_fraction for one in where.values()]
    assert sum(fractions) == pytest.approx(1 - 4 / 80)
    for size in (SMALL, LARGE):
        assert where[size.name].sampler_fraction * 80 * GIB >= size.base_bytes + GIB
        assert where[size.name].trainer_fraction * 80 * GIB >= size.base_bytes + GIB


def test_models_that_fit_one_by_one_but_not_together_are_refused() -> None:
    twins = [model("first", 20), model("second", 20)]
    for one in twins:
        plan([one], gpus(80))
    with pytest.raises(BackendFailed, match=r"GPU 0: 80\.0 GiB are there, 9\d\.\d .*: first 4\d\.\d .* second 4\d\.\d"):
        plan(twins, gpus(80))


def test_models_spread_over_the_gpus_with_the_fewest_weights() -> None:
    found = plan([SMALL, LARGE], gpus(80, 2)).layouts
    assert (found["large"].trainer, found["small"].trainer) == ((0,), (1,))
    found = plan([SMALL, LARGE], gpus(80, 4), ranks=2).layouts
    assert (found["large"].trainer, found["small"].trainer) == ((0, 1), (2, 3))


def test_gpus_share_a_base_that_none_of_them_could_hold_and_are_refused_where_that_is_not_enough() -> None:
    with pytest.raises(BackendFailed, match=r"GPU 0: 30\.0 GiB are there, \d\d\.\d GiB are needed: large"):
        plan([LARGE], gpus(30), ranks=1)
    found = plan([LARGE], gpus(30, 2), ranks=2, tensor_parallel=2).layouts["large"]
    assert not found.replicates and found.trainer == (0, 1)
    with pytest.raises(BackendFailed, match=r"GPU 0: 22\.0 GiB are there, 2\d\.\d GiB are needed: large"):
        plan([LARGE], gpus(22, 2), ranks=2, tensor_parallel=2)


def test_each_rank_has_the_whole_base_where_microbatches_then_need_not_recompute() -> None:
    assert plan([LARGE], gpus(80, 2), ranks=2).layouts["large"].replicates
    busy = replace(LARGE, num_layers=30, layer_token_bytes=100_000.0)  # 46 GiB for 16,384 tokens
    assert not plan([busy], gpus(80, 2), ranks=2).layouts["large"].replicates
    assert plan([busy], gpus(140, 2), ranks=2).layouts["large"].replicates


def test_one_copy_of_a_base_is_chosen_where_trainer_and_engine_can_share_it() -> None:
    found = plan([LARGE], gpus(32), base_copies=None)
    assert found.holds("large") and sum(one.size_bytes for one in found.parts if one.name == "base") == 16 * GIB
    with pytest.raises(BackendFailed, match=r"32\.0 GiB are there"):
        plan([LARGE], gpus(32), base_copies=2)
    assert not plan([replace(LARGE, can_be_shared=False)], gpus(80), base_copies=None).holds("large")
    assert not plan([LARGE], gpus(80, 2), base_copies=None, trainer_gpus=(0,), sampler_gpus=(1,)).holds("large")
    shards = plan([model("huge", 100, 4)], gpus(80, 4), base_copies=2)
    assert not shards.holds("huge") and len(shards.layouts["huge"].engines[0]) == 4
    both = plan([LARGE, replace(SMALL, can_be_shared=False)], gpus(80), base_copies=None)
    assert both.holds("large") and not both.holds("small")


def test_one_copy_that_is_asked_for_is_divided_where_no_gpu_has_room_for_the_whole() -> None:
    huge = model("huge", 100, 4)
    assert len(plan([huge], gpus(140, 2), base_copies=1).layouts["huge"].engines[0]) == 1
    assert not plan([huge], gpus(80, 4), base_copies=None).holds("huge")
    found = plan([huge], gpus(80, 4), base_copies=1)
    assert found.layouts["huge"] == Layout((0, 1), ((0, 1),), replicates=False)

    def base(process: str) -> list[int]:
        return [one.size_bytes for one in found.parts if (one.process, one.name) == (process, "base")]

    # A gathered layer as received and as used, and nothing of its own.
    assert base("holder") == [50 * GIB] * 2 and base("trainer") == [8 * GIB] * 2 and base("engine") == []
    (where,) = [placement(found, "huge")]
    assert where.gpus == where.engines[0]


@pytest.mark.parametrize(
    "settings",
    [{"engines": 2}, {"ranks": 2, "tensor_parallel": 4}, {"trainer_gpus": (0, 1), "sampler_gpus": (2, 3)}],
)
def test_one_copy_is_not_divided_where_ranks_or_gpus_are_not_alike(settings: dict[str, Any]) -> None:
    found = plan([model("large", 60, 1)], gpus(100, 4), base_copies=None, **settings)
    assert found.layouts["large"].replicates or not found.holds("large")


def test_a_rank_is_never_counted_with_more_than_the_whole_base() -> None:
    found = plan([model("flat", 3, 2)], Machine(64 * GIB), "cpu", ranks=4)
    assert next(one.size_bytes for one in found.parts if (one.process, one.name) == ("trainer", "base")) == 12 * GIB


def test_a_gpu_without_a_sampler_gives_all_its_memory_to_the_trainer() -> None:
    found = plan([LARGE], gpus(80, 2), ranks=2, engines=1)
    assert found.layouts["large"].engines == ((0,),)
    assert found.of(1, process="engine") == 0 and found.of(1) == pytest.approx(80 * GIB, abs=4)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(
        BackendFailed, match=r"2 ranks \(setting backend.ranks\) on CUDA need as many GPUs; the machine has 1"
    ):
        plan([SMALL], gpus(80), ranks=2)


def test_ranks_and_engines_that_are_left_open_are_on_all_gpus() -> None:
    def of(*sizes: ModelSize, size_gib: int = 80, count: int, **settings: Any) -> list[tuple[object, object]]:
        found = plan(list(sizes), gpus(size_gib, count), **settings)
        return [(one.trainer, one.engines) for one in found.layouts.values()]

    each = tuple((gpu,) for gpu in range(8))
    assert of(LARGE, count=8) == [((0, 1, 2, 3, 4, 5, 6, 7), each)]
    assert of(LARGE, count=4, engines=1) == [((0, 1, 2, 3), ((0,),))]
    assert of(LARGE, count=5, context_parallel=2) == [((0, 1, 2, 3), each[:5])]
    assert of(LARGE, count=3, base_precision="fp8") == [((0,), each[:3])]
    assert of(LARGE, SMALL, count=5) == [((0, 1), (*each[:2], (4,))), ((2, 3), (*each[2:4], (4,)))]
    assert of(LARGE, SMALL, model("other", 2), count=2)[0] == ((0,), ((0,),))
    huge = plan([model("huge", 100, 4)], gpus(80, 4)).layouts["huge"]
    assert len(huge.trainer) == len(huge.engines[0]) == 4 and not huge.replicates
    # Fewer GPUs than there are would be enough: two that divide trainer and engine, or one each.
    divided = plan([LARGE], gpus(30, 4)).layouts["large"]
    assert (divided.trainer, divided.engines, divided.replicates) == ((0, 1, 2, 3), ((0, 1), (2, 3)), False)
    assert of(LARGE, size_gib=28, count=4, tensor_parallel=1) == [((0, 1), ((2,), (3,)))]
    assert of(LARGE, size_gib=28, count=5, tensor_parallel=1) == [((0, 1), ((2,), (3,), (4,)))]


def test_trainers_and_engines_stay_on_the_gpus_that_they_may_use() -> None:
    found = plan([LARGE], gpus(80, 4), trainer_gpus=(2, 3), sampler_gpus=(0, 1)).layouts["large"]
    assert (found.trainer, found.engines) == ((2, 3), ((0,), (1,)))
    found = plan([LARGE], gpus(80, 4), trainer_gpus=(1,), sampler_gpus=(1, 3)).layouts["large"]
    assert (found.trainer, found.engines) == ((1,), ((1,), (3,)))
    with pytest.raises(BackendFailed, match=r"1,4 \(setting backend.trainer_gpus\): .* numbers from 0 to 3"):
        plan([LARGE], gpus(80, 4), trainer_gpus=(1, 4))
    with pytest.raises(BackendFailed, match=r"2,2 \(setting backend.sampler_gpus\): give different numbers"):
        plan([LARGE], gpus(80, 4), sampler_gpus=(2, 2))
    with pytest.raises(BackendFailed, match=r"ranks is 1, and backend.trainer_gpus names GPUs for 2: give only one"):
        plan([LARGE], gpus(80, 4), trainer_gpus=(1, 2), ranks=1)


def test_every_gpu_of_a_model_has_an_engine_where_it_has_room() -> None:
    found = plan([LARGE], gpus(80, 8), ranks=8)
    assert found.layouts["large"].engines == tuple((gpu,) for gpu in range(8))
    small = Machine(0, [80 * GIB, 20 * GIB, 80 * GIB])  # the second has no room for a copy
    assert plan([LARGE], small, trainer_gpus=(0, 2)).layouts["large"].engines == ((0,), (2,))
    assert plan([LARGE], small, ranks=2).layouts["large"] == Layout((0, 2), ((0,), (2,)), replicates=True)


def test_gpus_without_a_trainer_have_engines_unless_its_gpus_are_named() -> None:
    together = plan([LARGE], gpus(80, 4), ranks=2).layouts["large"]
    assert (together.trainer, together.engines) == ((0, 1), ((0,), (1,), (2,), (3,)))
    apart = plan([LARGE], gpus(28, 4), ranks=2, tensor_parallel=1).layouts["large"]
    assert (apart.trainer, apart.engines) == ((0, 1), ((2,), (3,)))
    two = plan([LARGE, model("other", 16, 1)], gpus(80, 5), ranks=2).layouts
    assert (two["large"].trainer, two["other"].trainer) == ((0, 1), (2, 3))
    assert two["large"].engines == ((0,), (1,), (4,)) and (2,) in two["other"].engines
    named = plan([LARGE], gpus(80, 4), trainer_gpus=(1, 2)).layouts["large"]
    assert (named.trainer, named.engines) == ((1, 2), ((1,), (2,)))


def test_gpus_that_would_be_idle_are_named() -> None:
    def said(count: int, sizes: Sequence[ModelSize] = (LARGE,), **settings: Any) -> str | None:
        config = BackendConfig(base_copies=2, **settings)
        return idle_gpus(make_plan(sizes, config, gpus(80, count), "cuda"), config)

    assert said(4) is None and said(5, (LARGE, SMALL)) is None and said(4, engines=1) is None
    assert said(4, ranks=1, engines=1) is None and said(2, trainer_gpus=(1,)) is None, "as asked"
    assert said(5, (LARGE, SMALL), engines=1) == "GPU 4 will be idle"
    assert said(7, engines=1, context_parallel=4) == "GPUs 4, 5, 6 will be idle"


def test_an_engine_that_nobody_asked_for_takes_no_room_from_other_models() -> None:
    twins = [model("first", 16, 1), model("second", 16, 1)]
    found = plan(twins, gpus(72, 2), ranks=2)  # room for both trainers and one engine on each
    assert [one.engines for one in found.layouts.values()] == [((0,),), ((1,),)]


def test_engines_that_are_asked_for_are_beside_the_trainers_too_and_refused_where_they_do_not_fit() -> None:
    found = plan([LARGE], gpus(80, 4), engines=3).layouts["large"]
    assert (found.trainer, found.engines) == ((0, 1, 2, 3), ((0,), (1,), (2,)))
    with pytest.raises(BackendFailed, match=r"5 x 1 ranks of engines \(.*\) need 5 GPUs; the machine has 4"):
        plan([LARGE], gpus(80, 4), engines=5)
    match = r"GPU 0: 16\.0 GiB are usable, as on the smallest GPU of its models, 33\.6 GiB are needed: large"
    with pytest.raises(BackendFailed, match=match):
        plan([LARGE], Machine(0, [80 * GIB, 16 * GIB]), engines=2)


def test_an_engine_is_divided_over_gpus_that_could_not_hold_it_alone() -> None:
    with pytest.raises(BackendFailed, match=r"on GPU \d: 30\.0 GiB are there, 3\d\.\d GiB are needed"):
        plan([LARGE], gpus(30, 2), ranks=2, tensor_parallel=1)
    found = plan([LARGE], gpus(30, 2), ranks=2).layouts["large"]
    assert (found.trainer, found.engines) == ((0, 1), ((0, 1),))
    found = plan([LARGE], gpus(30, 4), ranks=4, tensor_parallel=2).layouts["large"]
    assert found.engines == ((0, 1), (2, 3))
    with pytest.raises(BackendFailed, match=r"1 x 8 ranks of engines \(.*backend.tensor_parallel\) need 8 GPUs"):
        plan([LARGE], gpus(40, 4), tensor_parallel=8)


def test_each_engine_has_its_own_gpus_and_scratch_directory(tmp_path: Path) -> None:
    placement = Placement((0, 1), engines=((0, 1), (2, 3)))
    spec = replace(tiny_spec(tmp_path), placement=placement, scratch_dir=tmp_path / "scratch")
    first, second = spec.of_engine(0), spec.of_engine(1)
    assert (first.placement.engines, second.placement.engines) == (((0, 1),), ((2, 3),))
    assert (first.engine, second.engine) == (0, 1)
    assert first.scratch_dir != second.scratch_dir and first.scratch_dir.parent == second.scratch_dir.parent
    alone = replace(spec, placement=Placement((0,), engines=((0,),)))
    assert alone.of_engine(0) is alone


def test_engines_on_the_cpu_are_counted_with_their_caches_and_processes() -> None:
    two = 3 * 2 * GIB + GIB + 3 * 3 * GIB // 2
    found = plan([SMALL], Machine(two + 2 * ADAPTERS), "cpu", engines=2)
    assert placement(found, "small").engines == ((), ())
    with pytest.raises(BackendFailed, match=r"engine KV cache 1\.0 GiB, engine process 3\.0 GiB"):
        plan([SMALL], Machine(two - 1), "cpu", engines=2)


def test_models_that_ranks_of_an_engine_would_compute_wrongly_are_refused_by_name(
    tiny_vl: Path, tmp_path: Path
) -> None:
    machine = Machine(64 * GIB)
    source = Path(DIRECTORIES[TINY_VL])
    config = BackendConfig(models={"a": str(source)}, device="cpu", tensor_parallel=2)
    assert find("a", source, config, machine).spec.tensor_parallel == 2
    assert find("a", tiny_vl, config, machine).spec.tensor_parallel == 2, "its only head of keys is repeated"
    with pytest.raises(BackendFailed, match=r"tensor_parallel 3 .* its 2 heads cannot be divided evenly"):
        find("a", tiny_vl, config.model_copy(update={"tensor_parallel": 3}), machine)
    shared = partial(
        make_tiny_of, "qwen2_moe", mlp_only_layers=[0], **{**EXPERTS, "shared_expert_intermediate_size": 33}
    )
    for name, make, reason in (
        (
            "keys",
            partial(make_tiny_vl, heads=(12, 3)),
            "its key heads .3. can be neither divided nor repeated evenly",
        ),
        ("sinks", make_tiny_gpt_oss, "its key heads .1. can be neither divided nor repeated evenly"),
        ("experts", partial(make_tiny_of, "mixtral", intermediate_size=97), "its 97 inner numbers of an MLP cannot be"),
        ("linear", make_tiny_qwen3_5, "its 1 heads of keys in linear attention cannot be divided evenly"),
        ("shared", shared, "its 33 inner numbers of a shared expert cannot be divided evenly"),
    ):
        with pytest.raises(BackendFailed, match=f"tensor_parallel 2 .* {reason}"):
            find("a", make(tmp_path / name), config, machine)


def test_adapters_of_towers_and_towers_that_do_not_divide_are_refused_on_several_ranks(tmp_path: Path) -> None:
    config = BackendConfig(models={"a": TINY_VL}, device="cpu", tensor_parallel=2, train_vision=True)
    reason = "with backend.train_vision the engine's ranks would map a tower's adapters to other images"
    with pytest.raises(BackendFailed, match=f"tensor_parallel 2 .* not supported: {reason}"):
        find("a", Path(DIRECTORIES[TINY_VL]), config, Machine(64 * GIB))
    machine = gpus(64, 2)
    on_gpus = BackendConfig(models={"a": TINY_VL}, device="cuda", train_vision=True)
    assert find("a", Path(DIRECTORIES[TINY_VL]), on_gpus, machine).size.tensor_parallels == (1,)
    for make, divides in ((make_tiny_smolvlm, True), (make_tiny_internvl, False)):
        source = make(tmp_path / make.__name__)
        described = json.loads((source / "config.json").read_text())
        described["vision_config"]["num_attention_heads"] = 1
        (source / "config.json").write_text(json.dumps(described))
        parallels = find("a", source, BackendConfig(models={"a": str(source)}), machine).size.tensor_parallels
        assert (2 not in parallels) == divides


def test_of_gpus_of_different_sizes_each_counts_as_the_smallest() -> None:
    """A process has one part of its GPUs, a fraction, which is enough on the smallest of them."""
    for config in (BackendConfig(), BackendConfig(kv_cache_bytes=4 * GIB), BackendConfig(max_context_length=16384)):
        unequal = make_plan([LARGE], config, Machine(0, [140 * GIB, 80 * GIB]), "cuda")
        assert unequal == make_plan([LARGE], config, gpus(80, 2), "cuda")


def test_a_divided_copy_is_on_the_gpus_that_engines_may_use() -> None:
    found = plan([LARGE], gpus(80, 4), base_copies=1, tensor_parallel=2, sampler_gpus=(2, 3))
    layout = found.layouts["large"]
    assert (layout.trainer, layout.engines) == ((2, 3), ((2, 3),))


def test_a_divided_copy_and_slices_that_do_not_divide_its_ranks_are_refused() -> None:
    """And not suggested where a divided copy does not fit."""
    with pytest.raises(BackendFailed, match=r"the trainer of one divided copy .* has 2 ranks, .* groups of 4 "):
        plan([LARGE], gpus(80, 4), base_copies=1, tensor_parallel=2, context_parallel=4)
    with pytest.raises(BackendFailed, match=r"the trainer of one divided copy .* has 2 ranks, .* groups of 4 "):
        on_cpu = BackendConfig(device="cpu", base_copies=1, tensor_parallel=2, context_parallel=4)
        make_plan([LARGE], on_cpu, Machine(640 * GIB), "cpu")
    config = BackendConfig(base_copies=1, tensor_parallel=2)
    with pytest.raises(BackendFailed, match="too little memory on GPU 0"):
        plan_or_suggest([LARGE], config, gpus(8, 4), "cuda")


def test_several_ranks_for_experts_in_mxfp4_are_refused_before_anything_is_suggested() -> None:
    config = BackendConfig(ranks=2, base_precision="mxfp4")
    with pytest.raises(Contradiction, match=r"mxfp4 .* is not supported on 2 ranks; set backend.ranks to 1"):
        plan_or_suggest([LARGE], config, gpus(80, 2), "cuda")
    config = BackendConfig(trainer_gpus=(0, 1), base_precision="mxfp4")
    with pytest.raises(Contradiction, match=r"mxfp4 .* is not supported on 2 ranks; give a single GPU in "):
        plan_or_suggest([LARGE], config, gpus(80, 2), "cuda")


@pytest.mark.parametrize("name", ["H100", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "A100"])
def test_more_cards_are_suggested_of_the_kind_that_is_there(name: str) -> None:
    """An A100 of 80 GiB has as much memory as an H100 but for 0.1 GiB."""
    machine = Machine(640 * GIB, [int(79.15 * GIB)], [name])
    with pytest.raises(BackendFailed, match=r"GPUs \(--gpu " + ("H100" if "H100" in name else "A100") + r":\d\)"):
        plan_or_suggest([LARGE], BackendConfig(kv_cache_bytes=79 * GIB), machine, "cuda")


def test_a_copy_is_divided_by_default_only_where_nothing_else_fits() -> None:
    huge = replace(model("huge", 40, 1), can_be_shared=True)
    shared, apart, divided = ((0, 1), ((0,), (1,))), ((0,), ((1,),)), ((0, 1), ((0, 1),))
    for size_gib, wanted in ((80, shared), (48, apart), (44, divided), (30, divided)):
        found = make_plan([huge], BackendConfig(), gpus(size_gib, 2), "cuda")
        layout = found.layouts["huge"]
        assert (layout.trainer, layout.engines) == wanted
        assert found.holds("huge") == (wanted != apart)
    for settings in ({"base_copies": 2}, {"base_precision": "fp8"}, {"cluster": True, "trainer_gpus": (0, 1)}):
        with pytest.raises(BackendFailed, match="too little memory on GPU"):
            make_plan([huge], BackendConfig(**settings), gpus(44, 2), "cuda")
    nearest = suggestions([huge], BackendConfig(base_precision="fp8"), gpus(44, 2), "cuda")
    assert nearest[0].flag == "--base-copies 1"


def test_one_copy_is_suggested_with_a_cluster_whose_default_is_two() -> None:
    def resize(changed: BackendConfig) -> list[ModelSize]:
        return [replace(LARGE, can_be_shared=changed.base_copies == 1)]

    config = BackendConfig(cluster=True)
    found = suggestions(resize(config), config, gpus(32), "cuda", resize)
    assert found[0].flag == "--base-copies 1"


@pytest.mark.parametrize(("ranks", "slices"), [(1, 2), (3, 2), (2, 4)])
def test_a_mesh_has_a_whole_number_of_groups_that_compute_slices(ranks: int, slices: int) -> None:
    with pytest.raises(ValueError, match=f"{ranks} ranks are no groups of {slices} that compute a slice each"):
        Mesh(shard=ranks, context=slices)


def test_slices_of_microbatches_are_refused_by_name_where_ranks_cannot_compute_them(
    tiny_vl: Path, tmp_path: Path
) -> None:
    machine = Machine(64 * GIB)
    config = BackendConfig(models={"a": str(tiny_vl)}, device="cpu", context_parallel=2)
    mesh = describe_models(config, machine)["a"].spec.mesh
    assert mesh == Mesh(shard=2, context=2)
    four = describe_models(config.model_copy(update={"ranks": 4, "base_copies": 1}), machine)["a"].spec
    assert four.mesh == Mesh(replicate=4, context=2) and four.numerics["context_parallel"] == "2"
    for settings, reason in (
        (
            {"context_parallel": 4},
            r"context_parallel 4 .* its 2 heads cannot be divided evenly; set it to 1",
        ),
        ({"ranks": 3}, r"3 ranks .* cannot be divided into groups of 2 \(setting backend.context_parallel\)"),
    ):
        with pytest.raises(BackendFailed, match=reason):
            describe_models(config.model_copy(update=settings), machine)
    linear = config.model_copy(update={"models": {"a": str(make_tiny_qwen3_5(tmp_path / "model"))}})
    assert describe_models(linear, machine)["a"].spec.mesh.context == 2


def test_mamba2_is_divided_by_heads_alone_and_refused_by_name_where_nothing_was_compared(tmp_path: Path) -> None:
    source = make_tiny_nemotron_h(tmp_path / "model")
    config = BackendConfig(models={"a": str(source)}, device="cpu", context_parallel=2)
    machine = Machine(64 * GIB)
    found = describe_models(config, machine)["a"].spec
    assert (found.mesh.context, found.dtype) == (2, "float32")
    for settings, reason in (
        ({"context_parallel": 4}, r"context_parallel 4 .* its 2 heads cannot be divided evenly"),
        ({"context_parallel": 1, "base_copies": 1}, r"base_copies 1 .* packs the weights of linear attention anew"),
        ({"context_parallel": 1, "tensor_parallel": 4}, r"tensor_parallel 4 .* its 2 heads cannot be divided evenly"),
    ):
        with pytest.raises(BackendFailed, match=reason):
            describe_models(config.model_copy(update=settings), machine)
    odd = json.loads((source / "config.json").read_text()) | {"mamba_num_heads": 3, "n_groups": 1}
    (source / "config.json").write_text(json.dumps(odd))
    with pytest.raises(BackendFailed, match=r"context_parallel 2 .* its 3 heads of linear attention cannot be divided"):
        describe_models(config, machine)


def test_one_copy_of_a_base_is_refused_by_name_where_it_cannot_be_shared() -> None:
    source = Path(DIRECTORIES[TINY_VL])
    config = BackendConfig(models={"a": str(source)}, device="cpu", base_copies=1)
    machine = Machine(64 * GIB)
    assert describe_models(config, machine)["a"].spec.base_copies == 1
    divided = config.model_copy(update={"tensor_parallel": 2})
    spec = describe_models(divided, machine)["a"].spec
    assert spec.divides_base and spec.mesh == Mesh(shard=2) and spec.base_gpus == (0, 1)
    for settings, reason in (
        ({"engines": 2}, "which has no second engine"),
        ({"cluster": True}, "on the same GPUs of one machine"),
        ({"ranks": 3}, "each of 3 ranks of the trainer would map what one of 2 of the engine has"),
    ):
        with pytest.raises(BackendFailed, match=f"base_copies 1 .* not supported: .*{reason}.*; set it to 2"):
            find("a", source, divided.model_copy(update=settings), machine)


def test_numbers_of_gpus_are_nothing_to_a_plan_on_the_cpu() -> None:
    found = make_plan([SMALL], BackendConfig(sampler_gpus=(2, 3)), Machine(64 * GIB), "cpu")
    assert found.layouts["small"].engines == ((0,),) and found.demands["small"].max_sequences == 256


def test_one_copy_of_gpt_oss_is_refused_by_name(tmp_path: Path) -> None:
    source = make_tiny_gpt_oss(tmp_path / "model")
    config = BackendConfig(models={"a": str(source)}, device="cpu", base_copies=1)
    with pytest.raises(BackendFailed, match=r"base_copies 1 .* not supported: trainer and engine lay out gpt-oss's"):
        find("a", source, config, Machine(64 * GIB))


def test_experts_in_mxfp4_are_counted_packed_and_share_one_copy(tmp_path: Path) -> None:
    quantise(make_tiny_gpt_oss(tmp_path / "model"), tmp_path / "quantised")
    config, machine = BackendConfig(models={"a": str(tmp_path / "quantised")}, device="cpu"), Machine(64 * GIB)
    packed = config.model_copy(update={"base_precision": "mxfp4", "base_copies": 1})
    whole, found = (find("a", tmp_path / "quantised", settings, machine).size for settings in (config, packed))
    layers, experts, hidden, inner = 2, 8, whole.hidden, 96
    numbers = layers * experts * 3 * hidden * inner
    of_rows = layers * experts * (2 * inner * row_bytes(hidden) + hidden * row_bytes(inner))
    assert whole.base_bytes - found.base_bytes == 4 * numbers - of_rows
    assert found.can_be_shared and not whole.can_be_shared


@pytest.mark.parametrize(
    ("precision", "reason"),
    [("fp8", "GptOssForCausalLM has not been compared in fp8"), ("mxfp4", "its files are not in mxfp4")],
)
def test_a_precision_that_gpt_oss_or_its_files_do_not_have_is_refused(
    precision: BasePrecision, reason: str, tmp_path: Path
) -> None:
    source = make_tiny_gpt_oss(tmp_path / "model")
    if precision == "fp8":
        quantise(source, tmp_path / "quantised")
        source = tmp_path / "quantised"
    config = BackendConfig(models={"a": str(source)}, device="cpu", base_precision=precision)
    with pytest.raises(BackendFailed, match=f"base_precision {precision} .* not supported: {reason}"):
        find("a", source, config, Machine(64 * GIB))


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("ranks", 2, "base_precision mxfp4 .* not supported on 2 ranks; set backend.ranks to 1"),
        ("tensor_parallel", 2, "tensor_parallel 2 .* not supported: experts that stay in mxfp4 .* on several ranks"),
        ("context_parallel", 2, "context_parallel 2 .* not supported: experts that stay in mxfp4 .* on several ranks"),
        ("cluster", True, "base_precision mxfp4 .* not supported: it has not been compared on several machines"),
    ],
)
def test_experts_in_mxfp4_are_refused_on_several_ranks(
    setting: str, value: object, reason: str, tmp_path: Path
) -> None:
    quantise(make_tiny_gpt_oss(tmp_path / "model"), tmp_path / "quantised")
    config = BackendConfig(models={"a": str(tmp_path / "quantised")}, device="cpu", base_precision="mxfp4")
    with pytest.raises(BackendFailed, match=reason):
        describe_models(config.model_copy(update={setting: value}), Machine(64 * GIB))


@pytest.mark.parametrize("setting", [{"replay_routing": True}, {"gpu_memory_bytes": GIB}])
def test_settings_that_need_one_machine_are_refused_with_a_cluster_before_files_are_read(
    setting: dict[str, Any],
) -> None:
    config = BackendConfig(models={"a": "/nowhere"}, cluster=True, **setting)
    with pytest.raises(Contradiction, match=f"setting backend.{next(iter(setting))} does not go with backend.cluster"):
        describe_models(config, gpus(80))


def test_experts_in_mxfp4_share_one_copy_and_a_gpu_has_them_so_only_if_asked(tmp_path: Path) -> None:
    quantise(make_tiny_gpt_oss(tmp_path / "model"), tmp_path / "quantised")
    machine = Machine(64 * GIB, (80 * GIB, 80 * GIB))
    config = BackendConfig(models={"a": str(tmp_path / "quantised")}, device="cuda")
    asked = config.model_copy(update={"base_precision": "mxfp4"})
    specs = [
        describe_models(each, machine)["a"].spec
        for each in (config, asked, asked.model_copy(update={"base_copies": 1}))
    ]
    assert [spec.base_precision for spec in specs] == [None, "mxfp4", "mxfp4"]
    assert [spec.base_copies for spec in specs] == [2, 1, 1]
    assert [spec.mesh.size for spec in specs[1:]] == [1, 1]


def test_ranks_that_map_one_copy_have_the_whole_base_each() -> None:
    config = BackendConfig(models={"a": str(DIRECTORIES[TINY_VL])}, device="cpu", ranks=2)
    meshes = [
        describe_models(config.model_copy(update={"base_copies": copies}), Machine(64 * GIB))["a"].spec.mesh
        for copies in (1, 2)
    ]
    assert meshes == [Mesh(replicate=2), Mesh(shard=2)]


def test_every_gpu_of_a_model_has_its_own_holder(tmp_path: Path) -> None:
    spec = replace(tiny_spec(tmp_path), base_dir=tmp_path, placement=Placement((0, 2), engines=((2,), (3,))))
    assert spec.base_gpus == (0, 2, 3)
    assert len({spec.base_socket(gpu) for gpu in spec.base_gpus}) == 3
    assert tiny_spec(tmp_path).base_gpus == (None,)
