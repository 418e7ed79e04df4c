"""Ranks that compute slices of packed microbatches give what one rank does: log probabilities, each model's gradient.

pytest tests/contract/test_context_parallel.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.attention import PlainKernel
from tests.double_precision import in_float64
from tests.factories import MIXED, batch_for, cross_entropy, datum, image, make_renderer, prompt, words
from tests.models import FAMILIES, make_tiny_of, make_tiny_vl
from tests.ranks import Stepped, on_all, on_slices, two_steps
from tests.recovery import RealTrainer, create, logprobs_of, server, train
from tests.trainers import (
    LORA,
    assert_same,
    assert_same_gradients,
    config,
    forward_backward,
    gradients,
    perturb,
    together,
)
from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.api_schemas.training import ForwardBackwardOutput, Trainable
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import GIB, Machine
from tinker_server.backends.families.family import RenderedImage, Vision
from tinker_server.backends.kernels import varlen_attention
from tinker_server.backends.model_spec import Mesh
from tinker_server.backends.protocol import BackendFailed, EncodedBatch
from tinker_server.backends.trainer.distributed import ALONE, World
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.recompute import Recomputation
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.backends.trainer.step.batch_request import Members
from tinker_server.backends.trainer.step.step import Failures

Kind = Literal["replicate", "shard"]
LORAS = {
    "a": Trainable(rank=8, seed=1),
    "b": Trainable(rank=3, seed=2, train_unembed=False),
    "c": Trainable(rank=5, seed=3, train_attn=False),
}
TEXTS = [prompt(words(length, length)) for length in (23, 1, 5, 2, 11)]
LONE_IMAGE = prompt(words(2, 1), image(300, 200, 1), words(3, 2))
"""Of its 59 tokens 54 are the image's: every slice has some of them."""
INPUTS: dict[str, list[ModelInput]] = {
    "text": TEXTS,
    "images": [*MIXED.values()],
    "one image over all slices": [LONE_IMAGE],
    "fewer tokens than ranks": [prompt(words(1, 4))],
    "images of one token": [prompt(image(32, 32, seed)) for seed in range(4)],
}


class Computed(NamedTuple):
    logprobs: list[list[np.ndarray]]
    """Of each model's datums, on rank 0."""
    metrics: list[dict[str, float]]
    """Of each model, on rank 0."""
    gradients: dict[str, dict[str, Tensor]]
    """Of each model, this rank's."""
    num_microbatches: int


Found = dict[str, Computed]


def rank_of(world: World, source: Path, kind: Kind = "shard", *, trains_vision: bool = False) -> TrainerRank:
    """Ranks of a machine have the base between them, or each all of it."""
    mesh = Mesh(**{kind: world.machine.size}, context=world.num_slices)
    return TrainerRank(replace(config(source), mesh=mesh, trains_vision=trains_vision), world)


def with_models(rank: TrainerRank, loras: Mapping[str, Trainable]) -> TrainerRank:
    for name, lora in loras.items():
        rank.create_model(name, lora)
        perturb(rank, name)
    return rank


def computed(rank: TrainerRank, batches: Sequence[tuple[str, EncodedBatch]]) -> Computed:
    """Train models together, from no gradient on."""
    counted, compute = 0, rank._training_step.compute

    def count(chosen: Sequence[Members]) -> Failures:
        nonlocal counted
        counted += 1
        return compute(chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank._training_step, "compute", count)
        outputs = [one for one in together(rank, batches) if one is not None]
    answers = [one for one in outputs if isinstance(one, ForwardBackwardOutput)]
    assert answers == outputs
    found = {name: gradients(rank, name) for name, _ in batches}
    for name, _ in batches:
        rank.models[name].clear_gradient()
    logprobs = [[row["logprobs"] for row in one.loss_fn_outputs] for one in answers]
    return Computed(logprobs, [one.metrics for one in answers], found, counted)


def shared(rank: TrainerRank, source: Path, inputs: Sequence[ModelInput]) -> Computed:
    """Each of several models computes the same inputs, with targets of its own."""
    renderer = make_renderer(source)
    data = {
        name: [datum(one, renderer, 10 * place + index) for index, one in enumerate(inputs)]
        for place, name in enumerate(rank.models)
    }
    return computed(rank, [(name, cross_entropy(of_model)) for name, of_model in data.items()])


def of_models(world: World, source: Path, kind: Kind, names: Sequence[str]) -> Found:
    rank = with_models(rank_of(world, source, kind), LORAS)
    return {name: shared(rank, source, INPUTS[name]) for name in names}


def check_as_one(found: Sequence[Found], wanted: Found, bound: float = 1e-4) -> None:
    """The first rank's answers, and the sum of all ranks' gradients, are those of one rank alone, up to `bound`: nats,
    and of a tensor's size."""
    for name, alone in wanted.items():
        first, *others = (of_rank[name] for of_rank in found)
        assert not any(one.logprobs for one in others)
        for pair in zip(first.logprobs, alone.logprobs, strict=True):
            for one, other in zip(*pair, strict=True):
                np.testing.assert_allclose(one, other, atol=bound, err_msg=name)
        for metrics, other_metrics in zip(first.metrics, alone.metrics, strict=True):
            assert metrics == pytest.approx(other_metrics, rel=bound, abs=bound), name
        for model, wanted_of_model in alone.gradients.items():
            parts = [one.gradients[model] for one in (first, *others) if one.gradients[model]]
            assert len(parts) > 1, "more than one rank has a part of the gradient"
            sums = {key: torch.stack([one[key] for one in parts]).sum(0) for key in wanted_of_model}
            assert_same_gradients(sums, wanted_of_model, rtol=bound, noise=bound / 100)


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_two_ranks_compute_slices_as_one_rank_the_whole(kind: Kind, tiny_vl: Path) -> None:
    """Two query heads share one key head: both ranks have it."""
    found = on_slices(2, 2, of_models, tiny_vl, kind, [*INPUTS])
    assert {one.num_microbatches for one in found[0].values()} == {1}, "all models share one"
    check_as_one(found, of_models(ALONE, tiny_vl, kind, [*INPUTS]))


@pytest.mark.slow
@pytest.mark.parametrize("num_slices", [2, 4])
def test_four_ranks_compute_slices_of_two_microbatches_or_of_one(num_slices: int, tmp_path: Path) -> None:
    """Two ranks share each key head."""
    source = make_tiny_vl(tmp_path / "model", heads=(4, 2))
    names = ["images", "one image over all slices", "fewer tokens than ranks"]
    found = on_slices(num_slices, 4, of_models, source, "shard", names)
    check_as_one(found, of_models(ALONE, source, "shard", names))


def two_steps_of_one(world: World, source: Path) -> Stepped:
    rank, renderer = rank_of(world, source), make_renderer(source)
    rank.create_model("m", LORA)
    return two_steps(rank, "m", cross_entropy([datum(one, renderer, 1) for one in MIXED.values()]))


@pytest.mark.slow
def test_machines_with_two_ranks_for_each_microbatch_step_as_one_rank(tiny_vl: Path) -> None:
    wanted_logprobs, wanted = two_steps_of_one(ALONE, tiny_vl)
    (logprobs, weights), *_ = on_all((4, 2, "float32", 2), two_steps_of_one, tiny_vl)
    for of_step, wanted_of_step in zip(logprobs, wanted_logprobs, strict=True):
        for one, other in zip(of_step, wanted_of_step, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert_same(weights, wanted)


def of_losses(world: World, source: Path) -> Found:
    """Losses of whole datums, of several targets for a token, and none; a head whose gradient is known in forward."""
    rank, renderer = with_models(rank_of(world, source), {"a": LORA}), make_renderer(source)
    inputs = [*MIXED.values()]
    batches = {
        **{loss: batch_for(loss, inputs, renderer, 1) for loss in ("gspo", "ppo")},
        "soft targets": cross_entropy([datum(one, renderer, 2, k=3) for one in inputs]),
    }
    found = {name: computed(rank, [("a", one)]) for name, one in batches.items()}
    scored = forward_backward(rank, "a", batches["ppo"], backward=False)
    rows = [] if scored is None else [[row["logprobs"] for row in scored.loss_fn_outputs]]
    return {**found, "scored": Computed(rows, [] if scored is None else [scored.metrics], {}, 0)}


def test_losses_see_the_whole_microbatch(tiny_vl: Path) -> None:
    check_as_one(on_slices(2, 2, of_losses, tiny_vl), of_losses(ALONE, tiny_vl))


def of_towers(world: World, source: Path) -> Found:
    """Two models that train the tower, of which one sees an image twice, and one that does not."""
    trained = {"a": Trainable(rank=8, seed=1, train_vision=True), "b": Trainable(rank=4, seed=2, train_vision=True)}
    rank = with_models(rank_of(world, source, trains_vision=True), {**trained, "c": LORAS["c"]})
    twice = prompt(image(64, 64, 1), words(40, 2), image(64, 64, 1))
    return {"images": shared(rank, source, [*MIXED.values(), twice]), "one": shared(rank, source, [LONE_IMAGE])}


def test_a_trained_tower_gets_its_gradient_from_all_slices(tiny_vl: Path) -> None:
    found = on_slices(2, 2, of_towers, tiny_vl)
    assert any("visual" in name for name in found[0]["one"].gradients["a"])
    check_as_one(found, of_towers(ALONE, tiny_vl))


KINDS: dict[str, Callable[[Path], Path]] = {
    "key heads that divide unevenly": partial(
        make_tiny_of, "qwen3", num_attention_heads=6, num_key_value_heads=3, head_dim=32
    ),
    "windows": FAMILIES["Mistral"],
    "capped scores": FAMILIES["Gemma 2"],
    "sinks and experts": FAMILIES["gpt-oss"],
    "latent attention": FAMILIES["DeepSeek-V3"],
    "linear attention": FAMILIES["Qwen3-Next"],
    "Mamba2": FAMILIES["Nemotron-3"],
    "linear attention and images": FAMILIES["Qwen3.5"],
    "tiles": FAMILIES["InternVL"],
    "tiles with text between them": FAMILIES["SmolVLM2"],
    "images whose tokens see each other": FAMILIES["Gemma 3 with images"],
}


def of_kinds(world: World, sources: Mapping[str, Path]) -> Found:
    found = {}
    for name, source in sources.items():
        rank = with_models(rank_of(world, source), LORAS)
        found[name] = shared(rank, source, TEXTS + ([*MIXED.values()] if rank.base.renderer.takes_images else []))
    return found


def test_every_kind_of_attention_and_of_images_is_computed_in_slices(tmp_path: Path) -> None:
    sources = {name: make(tmp_path / name) for name, make in KINDS.items()}
    check_as_one(on_slices(2, 2, of_kinds, sources), of_kinds(ALONE, sources))


WITH_LAYOUTS = ("sinks and experts", "latent attention", "linear attention", "linear attention and images")


def of_the_service(world: World, sources: Mapping[str, Path]) -> Found:
    loras = {
        **LORAS,
        **{name: lora.model_copy(update={"layout": "service"}) for name, lora in LORAS.items() if name != "b"},
    }
    return {name: shared(with_models(rank_of(world, source), loras), source, TEXTS) for name, source in sources.items()}


def test_models_of_both_layouts_are_computed_in_slices(tmp_path: Path) -> None:
    sources = {name: KINDS[name](tmp_path / name) for name in WITH_LAYOUTS}
    check_as_one(on_slices(2, 2, of_the_service, sources), of_the_service(ALONE, sources))


def of_kinds_in_float64(world: World, sources: Mapping[str, Path]) -> Found:
    with in_float64():
        found = {}
        for name, source in sources.items():
            mesh = Mesh(replicate=world.machine.size, context=world.num_slices)
            spec = replace(config(source), mesh=mesh, dtype="float64")  # type: ignore[arg-type] # for tests alone
            rank = with_models(TrainerRank(spec, world), LORAS)
            images = [*MIXED.values()] if rank.base.renderer.takes_images else []
            found[name] = shared(rank, source, TEXTS + images)
        return found


@pytest.mark.slow
def test_slices_compute_the_same_sums_in_float64(tmp_path: Path) -> None:
    """So where slices in float32 differ by more, as after three steps of a Nemotron-3, all of it is rounding
    that training has amplified."""
    sources = {name: make(tmp_path / name) for name, make in KINDS.items()}
    found, wanted = on_slices(2, 2, of_kinds_in_float64, sources), of_kinds_in_float64(ALONE, sources)
    check_as_one(found, wanted, bound=1e-11)


def on_the_operator(world: World, sources: Mapping[str, Path]) -> Found:
    """As on CUDA: the packed operator, here on a plain kernel, in compiled layers, some of which recompute."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_attention, "_flash", PlainKernel())
        patch.setattr(attention, "implementation", partial(operator, attention.implementation))
        for name, source in sources.items():
            rank = with_models(rank_of(world, source), LORAS)
            layers = rank.base.scorer.model.get_decoder().layers
            Recomputation(layers).use(1)
            for layer in layers:
                layer.self_attn.compile(dynamic=True, backend="aot_eager")
            found[name] = shared(rank, source, TEXTS)
    return found


def operator(implementation: Callable[..., str], *_: object, **__: object) -> str:
    return implementation(torch.device("cuda"), torch.bfloat16, by_heads=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt-oss", "DeepSeek-V3"])  # windows and sinks; values that are narrower than keys
def test_the_operator_of_cuda_computes_slices_in_compiled_and_recomputed_layers(kind: str, tmp_path: Path) -> None:
    sources = {kind: FAMILIES[kind](tmp_path / "model")}
    check_as_one(on_slices(2, 2, on_the_operator, sources), of_kinds(ALONE, sources))


def with_troubles(world: World, source: Path) -> tuple[int, str, bool]:
    """Two images, one for each rank; then one rank alone runs out of memory. Return the images that this rank has
    decoded, the error, and whether the model trains on."""
    rank, renderer = with_models(rank_of(world, source), {"m": LORA}), make_renderer(source)
    apart = cross_entropy([datum(prompt(image(64, 64, 1), words(40, 2), image(64, 64, 3)), renderer)])
    decoded = set[str]()
    decode = rank.base.renderer._decode

    def noted(vision: Vision, key: str, data: bytes) -> RenderedImage:
        decoded.add(key)
        return decode(vision, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.base.renderer, "_decode", noted)
        forward_backward(rank, "m", apart)
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("tinker_server.backends.trainer.step.parts.pack", out_of_memory)
        try:
            forward_backward(rank, "m", apart)
        except BackendFailed as found:
            error = str(found)
    rank.models["m"].clear_gradient()
    forward_backward(rank, "m", apart)
    return len(decoded), error, rank.models["m"].gradient == "whole"


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_a_rank_decodes_the_images_of_its_slice_and_all_ranks_learn_of_ones_error(tiny_vl: Path) -> None:
    expected = (1, "out of memory; send shorter or fewer datums at once", True)
    assert on_slices(2, 2, with_troubles, tiny_vl) == [expected] * 2


@pytest.mark.usefixtures("forked_ranks")
async def test_a_server_with_two_ranks_for_each_microbatch_answers_as_with_one(tiny_vl: Path, tmp_path: Path) -> None:
    settings = BackendConfig(models={"a": str(tiny_vl)}, device="cpu", context_parallel=2)
    spec = describe_models(settings, Machine(64 * GIB))["a"].spec
    answers: list[list[list[bytes]]] = []
    alone: dict[str, int] = {}
    for sizes in (alone, {"num_ranks": spec.mesh.size, "num_slices": spec.mesh.context}):
        async with server(tmp_path / str(len(answers)), RealTrainer(tiny_vl, **sizes)) as client:
            await create(client)
            answers.append([await train(client, first) for first in (1, 4)])
    assert spec.mesh == Mesh(shard=2, context=2)
    for one, other in zip(*answers, strict=True):
        for body, wanted in zip(one[:2], other[:2], strict=True):
            np.testing.assert_allclose(logprobs_of(body), logprobs_of(wanted), atol=1e-4)
