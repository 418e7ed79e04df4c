"""Models that train the vision tower and its mergers, beside models that do not.

pytest tests/contract/test_trained_vision.py
"""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from tests.engines import fork_sampler
from tests.factories import MIXED, cross_entropy, datum, image, make_renderer, present, prompt, succeeded, words
from tests.models import make_tiny_qwen2_5_vl, make_tiny_qwen3_5, make_tiny_vl
from tests.ranks import Stepped, check_two_are_as_one, two_steps
from tests.sampling import ATOL, sample, sampler_config, scoring
from tests.trainers import (
    SMOOTH,
    assert_same,
    config,
    forward_backward,
    gradients,
    logprobs,
    lora_model,
    perturb,
    reference_logprobs,
    together,
)
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import ForwardBackwardOutput, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.weights.export import write_tinker_form

TRAINED = Trainable(rank=8, seed=1, train_vision=True)
FROZEN = Trainable(rank=4, seed=2)
KINDS = {
    "Qwen3-VL": make_tiny_vl,
    "Qwen3-VL MoE": lambda directory: make_tiny_vl(directory, moe=True),
    "Qwen2.5-VL": make_tiny_qwen2_5_vl,
    "Qwen3.5": make_tiny_qwen3_5,
}


def trainer(source: Path, *, max_tokens: int = 1024, train_vision: bool = True) -> TrainerRank:
    settings = replace(config(source, max_tokens), trains_vision=train_vision)
    return TrainerRank(settings, World(0, 1, torch.device("cpu")))


@pytest.fixture(
    scope="module",
    params=[kind if kind == "Qwen3-VL" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("trained") / "model")


@pytest.fixture(scope="module")
def renderer(source: Path) -> Renderer:
    return make_renderer(source)


@pytest.fixture(scope="module")
def data(renderer) -> list[Datum]:
    twice = image(64, 64, 1)
    inputs = [*MIXED.values(), prompt(words(2, 1), twice, words(1, 2), twice, words(3, 3))]
    return [datum(model_input, renderer, seed) for seed, model_input in enumerate(inputs)]


@pytest.fixture
def rank(source: Path) -> TrainerRank:
    return with_model(trainer(source))


def with_model(rank: TrainerRank, name: str = "m", lora: Trainable = TRAINED) -> TrainerRank:
    rank.create_model(name, lora)
    perturb(rank, name)
    return rank


def step(rank: TrainerRank, name: str, data: list[Datum]) -> list[np.ndarray]:
    """The log probabilities before it."""
    output = forward_backward(rank, name, cross_entropy(data), True)
    rank.optim_step(name, SMOOTH)
    return [one["logprobs"] for one in present(output).loss_fn_outputs]


def test_gradients_are_those_of_transformers_and_peft(rank, source, renderer, data, tmp_path) -> None:
    # PEFT reads only a part of Qwen3-VL's experts.
    has_experts = any("experts" in name for name in lora_model(rank, "m").tensors)
    rank.create_model("m", TRAINED.model_copy(update={"train_mlp": not has_experts}))
    perturb(rank, "m")
    rank.save_sampler_weights("m", tmp_path / "m", for_elsewhere=True)
    got = forward_backward(rank, "m", cross_entropy(data), True)
    found = gradients(rank, "m")
    wanted, exact = (
        reference_gradients(source, tmp_path / "m", renderer, data, got if dtype == torch.float32 else None, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert sum("visual" in name for name in found) > 16
    assert found.keys() == wanted.keys()
    for name, tensor in exact.items():
        # Float32 itself is off, by how much depends on the processor's kernels: no nearer can be asked for.
        scale = tensor.abs().max().item()
        rounding = (wanted[name] - tensor).abs().max().item()
        assert (found[name] - tensor).abs().max().item() <= max(1e-4 * scale, 3 * rounding) + 1e-7, name


def reference_gradients(
    source: Path,
    adapter: Path,
    renderer: Renderer,
    data: list[Datum],
    got: ForwardBackwardOutput | None,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Gradients of transformers + PEFT; log probabilities are held against those of `got`."""
    kernels = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped products are float32's
    base = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype, **kernels).eval()
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True, autocast_adapter_dtype=False).to(dtype)
    for index, item in enumerate(data):
        logprobs = reference_logprobs(renderer, item, model)[:, 0]
        if got is not None:
            np.testing.assert_allclose(got.loss_fn_outputs[index]["logprobs"], logprobs.detach(), atol=1e-4)
        (-logprobs * torch.from_numpy(item.loss_fn_inputs["weights"])).sum().backward()
    return {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_packed_samples_are_as_one_by_one(rank, source, data) -> None:
    alone = with_model(trainer(source, max_tokens=1))
    for one, other in zip(step(rank, "m", data), step(alone, "m", data), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert_same(lora_model(rank, "m").tensors, lora_model(alone, "m").tensors)


def test_models_in_one_microbatch_see_with_their_own_towers(rank, source, data) -> None:
    models = {"m": TRAINED, "other": Trainable(rank=3, seed=5, train_vision=True), "frozen": FROZEN}
    together_rank, apart = with_model(trainer(source)), rank
    for one in (together_rank, apart):
        with_model(one, "other", models["other"])
        with_model(one, "frozen", FROZEN)
    outputs = together(together_rank, [(name, cross_entropy(data[:3])) for name in models])
    for name, output in zip(models, outputs, strict=True):
        alone = forward_backward(apart, name, cross_entropy(data[:3]), True)
        for got, wanted in zip(succeeded(output).loss_fn_outputs, present(alone).loss_fn_outputs, strict=True):
            np.testing.assert_allclose(got["logprobs"], wanted["logprobs"], atol=1e-4)
        assert_same(gradients(together_rank, name), gradients(apart, name))


def test_a_model_with_the_frozen_tower_is_to_the_bit_what_it_is_on_a_server_that_trains_none(
    rank, source, data
) -> None:
    plain = with_model(trainer(source, train_vision=False), "frozen", FROZEN)
    with_model(rank, "frozen", FROZEN)
    for _ in range(2):
        step(rank, "m", data)
        for got, wanted in zip(step(rank, "frozen", data), step(plain, "frozen", data), strict=True):
            assert np.array_equal(got, wanted)
    for name, tensor in lora_model(plain, "frozen").tensors.items():
        assert torch.equal(lora_model(rank, "frozen").tensors[name], tensor), name


def test_what_is_saved_goes_on_as_it_was(rank, source, data, tmp_path) -> None:
    step(rank, "m", data)
    rank.save_state("m", tmp_path / "state")
    forward_backward(rank, "m", cross_entropy(data), True)
    rank.snapshot("m", tmp_path / "snapshot")
    rank.base.snapshots.written(tmp_path / "snapshot").result(timeout=60)
    other = trainer(source)
    other.create_model("loaded", Trainable(rank=8, seed=9, train_vision=True))
    other.load_state("loaded", tmp_path / "state", with_optimizer=True)
    forward_backward(other, "loaded", cross_entropy(data), True)
    other.create_model("resumed", TRAINED, tmp_path / "snapshot")
    rank.optim_step("m", SMOOTH)
    for name in ("loaded", "resumed"):
        other.optim_step(name, SMOOTH)
        for key, tensor in lora_model(rank, "m").tensors.items():
            assert torch.equal(lora_model(other, name).tensors[key], tensor), key


def test_a_tower_is_exported_in_pefts_form_alone(rank, tmp_path) -> None:
    """The cookbook's tools have no names for it."""
    rank.create_model("frozen", FROZEN)
    for name, files in (("m", []), ("frozen", [ADAPTER_CONFIG_FILE, ADAPTER_FILE])):
        (tmp_path / name).mkdir()
        rank.save_sampler_weights(name, tmp_path / name / "peft", for_elsewhere=True)
        write_tinker_form(tmp_path / name / "peft", tmp_path / name)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["README.txt", *files, "peft"]


def test_a_server_that_trains_no_tower_refuses_a_model_that_does(source) -> None:
    with pytest.raises(InvalidInput, match=r"trains its vision tower; this server does not \(setting backend\.train_v"):
        trainer(source, train_vision=False).create_model("m", TRAINED)


def on_ranks(world: World, source: Path) -> Stepped:
    """Outputs of two steps on mixed samples, and the adapter after them, of rank 0."""
    renderer = make_renderer(source)
    batch = cross_entropy([datum(model_input, renderer, seed) for seed, model_input in enumerate(MIXED.values())])
    rank = with_model(TrainerRank(replace(config(source, 60, num_ranks=world.size), trains_vision=True), world))
    return two_steps(rank, "m", batch)


@pytest.mark.slow
def test_two_ranks_are_as_one(tiny_vl: Path) -> None:
    check_two_are_as_one(on_ranks, tiny_vl)


def next_tokens(item: Datum, renderer: Renderer) -> Datum:
    """The same input, with the tokens that follow as targets; weights are 0 where that is an image's."""
    token_ids = renderer.render(item.model_input, "datum").token_ids_T
    following = np.append(token_ids[1:], 0)
    is_text = np.append(~np.isin(following[:-1], list(renderer.family.placeholders)), False)
    return Datum(
        model_input=item.model_input,
        loss_fn_inputs={"target_tokens": following, "weights": is_text.astype(np.float32)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["Qwen3-VL", "Qwen3-VL MoE", "Qwen2.5-VL"], indirect=True)
async def test_the_sampler_sees_an_image_with_each_models_own_tower(source, renderer, data, tmp_path) -> None:
    """One engine, the same images: two models that train the tower, one that does not, and the base; at once, then one
    after the other. The engine caches features of an image."""
    rank = trainer(source)
    models = {"a": TRAINED, "b": Trainable(rank=3, seed=5, train_vision=True), "frozen": FROZEN}
    weights: dict[str | None, Path | None] = {None: None}
    for name, lora in models.items():
        rank.create_model(name, lora)
        for _ in range(3):
            forward_backward(rank, name, cross_entropy(data), True)
            rank.optim_step(name, SMOOTH.model_copy(update={"learning_rate": 0.02, "eps": 1e-3}))
        weights[name] = tmp_path / name
        rank.save_sampler_weights(name, tmp_path / name, for_elsewhere=False)
    rank.create_model("fresh", FROZEN)  # adds nothing
    following = [next_tokens(item, renderer) for item in data]
    expected = {name: logprobs(rank, following, name or "fresh") for name in weights}
    for one, other in itertools.combinations(expected.values(), 2):
        assert max(np.abs(a - b).max() for a, b in zip(one, other, strict=True)) > 0.1
    works = list(itertools.product(range(len(data)), weights))
    running = SamplerPool(replace(sampler_config(source, tmp_path / "scratch"), trains_vision=True), fork_sampler)
    await running.start()
    try:
        scores = [sample(running, scoring(data[index].model_input), weights[one]) for index, one in works]
        responses = await asyncio.wait_for(asyncio.gather(*scores), 300)
        for index, adapter in works:
            responses.append(await sample(running, scoring(data[index].model_input), weights[adapter]))
    finally:
        await running.stop()
    for (index, adapter), response in zip([*works, *works], responses, strict=True):
        is_text = following[index].loss_fn_inputs["weights"][:-1] == 1
        got, wanted = present(response.prompt_logprobs)[1:], expected[adapter][index][:-1]
        np.testing.assert_allclose(got[is_text], wanted[is_text], rtol=0, atol=ATOL)
