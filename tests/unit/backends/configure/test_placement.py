"""Every base model's share of a machine, and the message if they do not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from backends.config import BackendConfig
from backends.configure.describe import describe_models, find
from backends.configure.placement import Machine, ModelSize, Parts, place
from backends.model_spec import Mesh, Placement
from backends.protocol import BackendFailed
from tests.models import make_tiny_vl
from tests.specs import tiny_spec
from tinker_server.embedded import DIRECTORIES, TINY_VL

GIB = 1 << 30
SMALL, LARGE = ModelSize("small", 2 * GIB, GIB, GIB // 4), ModelSize("large", 16 * GIB, GIB, GIB)


def test_memory_of_all_models_is_summed_and_refused_with_each_ones_figures() -> None:
    one = 2 * (2 * GIB + 3 * GIB // 2) + GIB
    models = [SMALL, ModelSize("other", 2 * GIB, GIB, GIB // 4)]
    place(models[:1], Machine(one), "cpu", Parts(1, 0.4))
    place(models, Machine(2 * one), "cpu", Parts(1, 0.4))
    with pytest.raises(BackendFailed, match=r"15\.\d GiB are free, 16\.0 .* needed: small 8\.0 GiB .*; other 8\.0 "):
        place(models, Machine(2 * one - GIB // 2), "cpu", Parts(1, 0.4))


def test_ranks_on_the_cpu_share_one_copy_and_each_all_gathers_a_part() -> None:
    needed = 2 * GIB + 2 * (GIB + GIB // 2) + 3 * 3 * GIB // 2 + GIB
    place([SMALL], Machine(needed), "cpu", Parts(2, 0.4))
    with pytest.raises(
        BackendFailed, match=r"small 10\.5 GiB \(5\.0 GiB of weights in sampler and trainer, 3 processes"
    ):
        place([SMALL], Machine(needed - 1), "cpu", Parts(2, 0.4))


def test_a_model_alone_on_a_gpu_gets_all_of_it() -> None:
    (found,) = place([LARGE], Machine(0, [80 * GIB]), "cuda", Parts(1, 0.4)).values()
    assert found.gpus == (0,)
    assert found.sampler_fraction == pytest.approx(0.4)
    assert found.trainer_fraction == pytest.approx(0.6 - 2 / 80)  # less what torch does not count


def test_models_on_one_gpu_share_it_and_no_byte_is_given_twice() -> None:
    found = place([SMALL, LARGE], Machine(0, [80 * GIB]), "cuda", Parts(1, 0.5))
    assert sum(one.sampler_fraction for one in found.values()) == pytest.approx(0.5)
    assert sum(one.trainer_fraction + 2 / 80 for one in found.values()) == pytest.approx(0.5)
    for model in (SMALL, LARGE):
        assert found[model.name].sampler_fraction * 80 * GIB >= model.weight_bytes + GIB
        assert found[model.name].trainer_fraction * 80 * GIB >= model.weight_bytes + GIB


def test_models_that_fit_one_by_one_but_not_together_are_refused() -> None:
    machine = Machine(0, [80 * GIB])
    twins = [ModelSize("first", 20 * GIB, GIB, GIB), ModelSize("second", 20 * GIB, GIB, GIB)]
    for model in twins:
        place([model], machine, "cuda", Parts(1, 0.5))
    with pytest.raises(
        BackendFailed, match=r"trainers on GPU 0 have 40\.0 GiB and need 46\.0 GiB: first at least 23\.0"
    ):
        place(twins, machine, "cuda", Parts(1, 0.5))


def test_models_spread_over_the_gpus_with_the_fewest_weights() -> None:
    found = place([SMALL, LARGE], Machine(0, [80 * GIB] * 2), "cuda", Parts(1, 0.4))
    assert (found["large"].gpus, found["small"].gpus) == ((0,), (1,))
    found = place([SMALL, LARGE], Machine(0, [80 * GIB] * 4), "cuda", Parts(2, 0.4))
    assert (found["large"].gpus, found["small"].gpus) == ((0, 1), (2, 3))


def test_gpus_share_a_base_that_none_of_them_could_hold_and_are_refused_where_that_is_not_enough() -> None:
    machine = Machine(0, [40 * GIB] * 2)
    with pytest.raises(BackendFailed, match=r"trainers on GPU 0 have 14\.0 GiB and need 19\.0 GiB: large"):
        place([LARGE], machine, "cuda", Parts(1, 0.65))
    place([LARGE], machine, "cuda", Parts(2, 0.65))
    with pytest.raises(BackendFailed, match=r"trainers on GPU 0 have 12\.0 GiB and need 13\.0 GiB: large"):
        place([LARGE], machine, "cuda", Parts(2, 0.7))


def test_a_rank_is_never_counted_with_more_than_the_whole_base() -> None:
    assert ModelSize("flat", 3 * GIB, GIB, 2 * GIB).rank_bytes(4) == 3 * GIB


def test_a_gpu_without_a_sampler_gives_no_memory_to_one() -> None:
    found = place([LARGE], Machine(0, [80 * GIB] * 2), "cuda", Parts(2, 0.4))
    assert found["large"].gpus == (0, 1)
    assert found["large"].trainer_fraction == pytest.approx(0.6 - 2 / 80)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(BackendFailed, match="2 ranks on CUDA need as many GPUs; torch sees 1"):
        place([SMALL], Machine(0, [80 * GIB]), "cuda", Parts(2, 0.4))


def test_training_all_weights_takes_masters_moments_and_gradients_more_and_says_so() -> None:
    """Numbers of 4 bytes: a master, two moments, a step's and a microbatch's gradient, the original, by ranks."""
    whole = ModelSize("whole", 2 * GIB, GIB, GIB // 4, training_bytes=12 * GIB)
    needed = 2 * GIB + (2 + 12) * GIB + 2 * 3 * GIB // 2 + GIB
    place([whole], Machine(needed), "cpu", Parts(1, 0.4))
    with pytest.raises(BackendFailed, match=r"whole 20\.0 GiB \(16\.0 GiB of weights .*, masters, moments and grad"):
        place([whole], Machine(needed - 1), "cpu", Parts(1, 0.4))
    assert whole.rank_bytes(2) == GIB + GIB // 2 + 3 * GIB // 4 + 6 * GIB


def test_what_training_all_weights_takes_is_counted_of_the_files_and_experts_are_refused(
    tiny_vl: Path, tmp_path: Path
) -> None:
    config = BackendConfig(models={"a": str(tiny_vl)}, device="cpu", full=True)
    machine = Machine(64 * GIB)
    size = find("a", tiny_vl, config, machine).size
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tiny_vl))
    trained = sum(one.numel() for name, one in model.named_parameters() if ".visual." not in name)
    assert size.training_bytes == trained * (4 + 8 + 4 + 4 + 4)
    with pytest.raises(BackendFailed, match="--full and --train-vision exclude each other"):
        describe_models(config.model_copy(update={"train_vision": True}), machine)
    experts = make_tiny_vl(tmp_path / "moe", moe=True)
    with pytest.raises(BackendFailed, match=r"backend\.full.* experts .*mlp\.experts\.gate_up_proj"):
        find("a", experts, config, machine)


def test_every_gpu_of_a_model_has_an_engine_where_it_has_room() -> None:
    eight = Machine(0, [80 * GIB] * 8)
    found = place([LARGE], eight, "cuda", Parts(8, 0.4))["large"]
    assert found.engines == tuple((gpu,) for gpu in range(8))
    assert found.sampler_fraction == pytest.approx(0.4)
    assert place([LARGE], eight, "cuda", Parts(1, 0.4))["large"].engines == ((0,),)
    small = Machine(0, [80 * GIB, 40 * GIB, 80 * GIB])  # 16 of the second are less than an engine's 17
    assert place([LARGE], small, "cuda", Parts(3, 0.4))["large"].engines == ((0,), (2,))


def test_an_engine_that_nobody_asked_for_takes_no_room_from_other_models() -> None:
    twins = [ModelSize("first", 16 * GIB, GIB, GIB), ModelSize("second", 16 * GIB, GIB, GIB)]
    found = place(twins, Machine(0, [160 * GIB] * 2), "cuda", Parts(2, 0.2))  # 32 GiB: one engine on each
    assert [one.engines for one in found.values()] == [((0,),), ((1,),)]


def test_engines_that_are_asked_for_are_beside_the_trainers_too_and_refused_where_they_do_not_fit() -> None:
    found = place([LARGE], Machine(0, [80 * GIB] * 4), "cuda", Parts(1, 0.4, engines=3))["large"]
    assert (found.gpus, found.engines) == ((0,), ((0,), (1,), (2,)))
    with pytest.raises(BackendFailed, match=r"5 engines \(setting backend.engines\) .* need 5 GPUs; torch sees 4"):
        place([LARGE], Machine(0, [80 * GIB] * 4), "cuda", Parts(1, 0.4, engines=5))
    with pytest.raises(BackendFailed, match=r"samplers on GPU 1 have 16\.0 GiB and need 17\.0 GiB: large"):
        place([LARGE], Machine(0, [80 * GIB, 40 * GIB]), "cuda", Parts(1, 0.4, engines=2))


def test_an_engine_is_divided_over_gpus_that_could_not_hold_it_alone() -> None:
    machine = Machine(0, [40 * GIB] * 4)
    with pytest.raises(BackendFailed, match=r"samplers on GPU 0 have 12\.0 GiB and need 17\.0 GiB"):
        place([LARGE], machine, "cuda", Parts(2, 0.3))
    found = place([LARGE], machine, "cuda", Parts(2, 0.3, tensor_parallel=2))["large"]
    assert (found.gpus, found.engines) == ((0, 1), ((0, 1),))
    found = place([LARGE], machine, "cuda", Parts(4, 0.3, tensor_parallel=2))["large"]
    assert found.engines == ((0, 1), (2, 3))
    with pytest.raises(BackendFailed, match=r"1 engines .* of 8 ranks \(setting backend.tensor_parallel\) need 8 GPUs"):
        place([LARGE], machine, "cuda", Parts(1, 0.3, tensor_parallel=8))


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
    two = 3 * 2 * GIB + 2 * GIB + 3 * 3 * GIB // 2
    found = place([SMALL], Machine(two), "cpu", Parts(1, 0.4, engines=2))["small"]
    assert found.engines == ((), ())
    with pytest.raises(BackendFailed, match=r"3 processes of 1\.5 GiB, 2\.0 GiB of KV cache.* or fewer engines"):
        place([SMALL], Machine(two - 1), "cpu", Parts(1, 0.4, engines=2))


def test_models_that_ranks_of_an_engine_would_compute_wrongly_are_refused_by_name(
    tiny_vl: Path, tmp_path: Path
) -> None:
    machine = Machine(64 * GIB)
    source = Path(DIRECTORIES[TINY_VL])
    config = BackendConfig(models={"a": str(source)}, device="cpu", tensor_parallel=2)
    assert find("a", source, config, machine).spec.tensor_parallel == 2
    with pytest.raises(BackendFailed, match=r"tensor_parallel 2 .* not supported: with backend.full"):
        find("a", source, config.model_copy(update={"full": True}), machine)
    with pytest.raises(BackendFailed, match=r"tensor_parallel 2 .* its 2 heads with 1 of keys cannot be divided"):
        find("a", tiny_vl, config, machine)
    experts = make_tiny_vl(tmp_path / "moe", moe=True)
    with pytest.raises(BackendFailed, match=r"tensor_parallel 2 .* wrong parts of a mixture's adapters"):
        find("a", experts, config, machine)


@pytest.mark.parametrize(
    ("others", "reason"),
    [({"full": True}, "the trainer changes its own copy"), ({"tensor_parallel": 2}, "no GPU has the whole base")],
)
def test_one_copy_of_a_base_is_refused_by_name_where_it_cannot_be_shared(
    others: dict[str, object], reason: str
) -> None:
    source = Path(DIRECTORIES[TINY_VL])
    config = BackendConfig(models={"a": str(source)}, device="cpu", base_copies=1)
    machine = Machine(64 * GIB)
    assert find("a", source, config, machine).spec.base_copies == 1
    with pytest.raises(BackendFailed, match=rf"base_copies 1 .* not supported: .*{reason}"):
        find("a", source, config.model_copy(update=others), machine)


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
