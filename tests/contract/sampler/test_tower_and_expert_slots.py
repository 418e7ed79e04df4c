"""Adapters of a mixture's experts and of a vision tower: slots are compared with the files, and images are scored.

pytest tests/contract/sampler/test_tower_and_expert_slots.py
"""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from vllm.v1.engine.async_llm import AsyncLLM

from tests.factories import cross_entropy, datum, make_renderer, present
from tests.models import make_tiny_vl
from tests.slots import BFLOAT16_NATS, running_engine, seeing_trainer, trained_scores
from tests.trainers import forward_backward
from tinker_server.api_schemas.training import Layout
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.formats.stacked_adapters import open_adapter
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, BackendFailed, InvalidInput
from tinker_server.backends.sampler.engine.adapters import AdapterLoader
from tinker_server.backends.sampler.engine.sequences import score
from tinker_server.backends.sampler.engine.versions import VersionCache
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.weights.export import PEFT
from tinker_server.weights.peft_form import write_expanded

pytestmark = pytest.mark.asyncio(loop_scope="module")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture that sees."""
    return make_tiny_vl(tmp_path_factory.mktemp("models") / "experts", moe=True)


@pytest.fixture(scope="module")
def seeing(source: Path) -> Renderer:
    return make_renderer(source)


@pytest.fixture(scope="module", params=get_args(Layout))
def slots(request: pytest.FixtureRequest) -> Layout:
    """The form of the engine's."""
    form: Layout = request.param
    return form


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    slots: Layout, source: Path, seeing: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncLLM]:
    async with running_engine(source, seeing, tmp_path_factory.mktemp("scratch"), expert_slots=slots) as running:
        yield running


@pytest.fixture(scope="module")
def rank(slots: Layout, source: Path) -> TrainerRank:
    """`m0` and `m1` as after a few steps, `m2` and `m3` as after many, of the layouts that have a place."""
    layouts: tuple[Layout, ...] = ("own", "service") if slots == "own" else ("service",)
    return seeing_trainer(source, 1e-4, 1e-4, 0.05, 0.05, layouts=layouts)


@pytest.fixture(scope="module")
def saved(rank: TrainerRank, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    for name in rank.models:
        rank.save_sampler_weights(name, root / name, for_elsewhere=False)
    return {name: root / name for name in rank.models}


@pytest.fixture(scope="module")
def adapters(engine: AsyncLLM, seeing: Renderer, tmp_path_factory: pytest.TempPathFactory) -> VersionCache:
    return VersionCache(tmp_path_factory.mktemp("scratch"), AdapterLoader(engine, seeing, "bfloat16"))


TEXT = list(range(10, 40))


async def load(adapters: VersionCache, weights: Path) -> None:
    async with adapters.hold(weights) as held:
        await adapters.load(held)


async def scores(engine: AsyncLLM, adapters: VersionCache, weights: Path) -> list[float]:
    """Of `TEXT` with these weights, nats."""
    async with adapters.hold(weights) as held:
        found: list[float] = (await score(engine, TEXT, await adapters.load(held))).tolist()
        return found


async def test_what_was_trained_and_saved_is_what_the_slots_hold(engine, adapters, saved, rank):
    for _ in range(2):  # more than there are slots, so that each is filled again
        for name, weights in saved.items():
            wanted = trained_scores(rank, name, TEXT)
            np.testing.assert_allclose(await scores(engine, adapters, weights), wanted, rtol=0, atol=BFLOAT16_NATS)


async def test_experts_with_factors_of_their_own_are_the_same_from_each_form_or_refused(
    engine, adapters, slots, source, tmp_path
):
    own = seeing_trainer(source, 1e-4, layouts=("own",))
    own.save_sampler_weights("m0", tmp_path / "stacks", for_elsewhere=False)
    own.save_sampler_weights("m0", tmp_path / "apart", for_elsewhere=True)
    with safe_open(tmp_path / "apart" / ADAPTER_FILE, "pt") as file:
        assert any("experts.7.up_proj" in name for name in file.keys())  # noqa: SIM118 - the file is no mapping
    if slots == "own":
        apart = await scores(engine, adapters, tmp_path / "apart")
        assert apart == await scores(engine, adapters, tmp_path / "stacks")
        return
    for form in ("stacks", "apart"):
        with pytest.raises(InvalidInput, match=r"their experts have factors of their own .* those of .*experts differ"):
            await load(adapters, tmp_path / form)


async def test_slots_have_factors_that_experts_share_once(engine, slots):
    shapes = (await engine.collective_rpc("expert_slots"))[0]
    once = 1 if slots == "service" else 8
    assert {shape[1] for shape in shapes["hidden"]} == {once} and {shape[1] for shape in shapes["inner"]} == {8}


async def test_factors_that_experts_share_are_the_same_from_each_form(engine, adapters, saved, rank, tmp_path):
    rank.save_sampler_weights("m1", tmp_path / "m1" / PEFT, for_elsewhere=True)
    with safe_open(tmp_path / "m1" / PEFT / ADAPTER_FILE, "pt") as file:
        shapes = {tuple(file.get_slice(name).get_shape()) for name in file.keys() if ".experts.w1." in name}  # noqa: SIM118
    assert {shape[0] for shape in shapes} == {1, 8}
    wanted = await scores(engine, adapters, saved["m1"])
    assert await scores(engine, adapters, tmp_path / "m1" / PEFT) == wanted
    assert write_expanded(tmp_path / "m1" / PEFT, tmp_path / "expanded")
    assert await scores(engine, adapters, tmp_path / "expanded") == wanted


@pytest.mark.parametrize("form", ["stacks", "apart"])
@pytest.mark.parametrize(
    "how", ["missing", "doubled", "another layer's", "experts turned", "gate and up swapped", "left from before"]
)
async def test_experts_that_are_put_wrongly_into_their_slot_are_not_sampled_from(
    engine, adapters, rank, how, form, tmp_path
):
    weights = tmp_path / "never loaded"
    rank.save_sampler_weights("m0", weights, for_elsewhere=form == "apart")
    (names,) = await engine.collective_rpc("fill_wrongly", args=(how, "mlp.experts", 2))
    assert len(names) == 2
    with pytest.raises(BackendFailed, match=f"in the engine's slot .*{names[0]}.* hold other values than the file"):
        await load(adapters, weights)
    await load(adapters, weights)


def tower(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "visual" in name}


def scaled_by(factor: float) -> Callable[[Tensors, Tensors], Tensors]:
    """The tower's B times a factor."""
    return lambda own, other: {name: one * factor for name, one in tower(own).items() if ".lora_B." in name}


CHANGES: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "three times": scaled_by(3),
    "none": scaled_by(0),
    "negated": scaled_by(-1),
    "another model's": lambda own, other: tower(other),
}


def read(directory: Path) -> tuple[Tensors, LoadCheck]:
    with safe_open(directory / ADAPTER_FILE, "pt") as file:
        canary = LoadCheck.from_metadata(file.metadata())
    assert canary is not None
    with open_adapter(str(directory / ADAPTER_FILE), "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, canary  # noqa: SIM118


@pytest.mark.parametrize("change", CHANGES)
async def test_another_tower_than_the_trainers_is_not_sampled_from(adapters, saved, change, tmp_path):
    """The file is as wrong as the slot, so that only an image shows it."""
    (own, canary), (other, _) = read(saved["m2"]), read(saved["m3"])
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    save_file(own | CHANGES[change](own, other), wrong / ADAPTER_FILE, canary.to_metadata())
    config = json.loads((saved["m2"] / ADAPTER_CONFIG_FILE).read_text())
    (wrong / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(BackendFailed, match="of a text behind a test image are not the trainer's: with these weights"):
        await load(adapters, wrong)
    await load(adapters, saved["m2"])


async def test_an_image_is_scored_as_a_datum_of_the_same_model_is(rank, saved, seeing):
    _, canary = read(saved["m2"])
    rendered = seeing.render(canary.behind_image, "image")
    own = datum(canary.behind_image, seeing)
    following = torch.from_numpy(rendered.token_ids_T).roll(-1).numpy()
    own = own.model_copy(update={"loss_fn_inputs": {**own.loss_fn_inputs, "target_tokens": following}})
    (output,) = present(forward_backward(rank, "m2", cross_entropy([own]), False)).loss_fn_outputs
    assert output["logprobs"][-len(canary.token_ids) - 1 : -1].tolist() == canary.logprobs_behind_image


async def test_a_model_that_trains_no_tower_scores_no_image_and_is_loaded(rank, adapters, tmp_path):
    rank.create_model("frozen", rank.models["m0"].config.model_copy(update={"train_vision": False}))
    rank.save_sampler_weights("frozen", tmp_path / "frozen", for_elsewhere=False)
    assert read(tmp_path / "frozen")[1].image == b""
    await load(adapters, tmp_path / "frozen")
