"""The vision tower runs once per image, and nothing else changes.

pytest tests/contract/test_vision_cache.py
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.factories import MIXED, cross_entropy, datum, image, make_renderer, present, prompt, twins, words
from tests.trainers import (
    SMOOTH,
    assert_same,
    config,
    forward_backward,
    gradients,
    logprobs,
    perturb,
    reference_logprobs,
)
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

LORA = Trainable(rank=8, seed=1)
SMALL, WIDE, TALL = image(64, 64, 1), image(160, 64, 2), image(64, 160, 3)
BATCH = {
    **MIXED,
    "the same image twice": prompt(words(2, 1), SMALL, words(1, 2), SMALL, words(3, 3)),
    "two images with nothing between": prompt(SMALL, WIDE, words(2, 4)),
    "an image seen before": prompt(words(3, 5), TALL, words(1, 6), SMALL, words(2, 7)),
}


class Tower:
    """Counts the images that the vision tower computes."""

    def __init__(self, rank: TrainerRank) -> None:
        self.images: list[int] = []
        visual = rank.base.scorer.model.base_model.visual
        self._hook = visual.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: object, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        self.images.append(len(kwargs["grid_thw"]))

    def take(self) -> int:
        total, self.images = sum(self.images), []
        return total


def trainer(source: Path, image_cache_bytes: int) -> TrainerRank:
    settings = replace(config(source, max_tokens=200), image_cache_bytes=image_cache_bytes)
    rank = TrainerRank(settings, World(0, 1, torch.device("cpu")))
    rank.create_model("m", LORA)
    perturb(rank, "m")
    return rank


@pytest.fixture(scope="module")
def keeping(tiny_vl: Path) -> TrainerRank:
    return trainer(tiny_vl, 1 << 26)


@pytest.fixture(scope="module")
def forgetting(tiny_vl: Path) -> TrainerRank:
    return trainer(tiny_vl, 0)


@pytest.fixture
def data(renderer) -> list[Datum]:
    return [datum(model_input, renderer, seed) for seed, model_input in enumerate(BATCH.values())]


def run(rank: TrainerRank, data: list[Datum]) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    rank.models["m"].clear_gradient()
    output = forward_backward(rank, "m", cross_entropy(data), True)
    found = {name: gradient.clone() for name, gradient in gradients(rank, "m").items()}
    return [row["logprobs"] for row in present(output).loss_fn_outputs], found


def assert_agree(got, wanted) -> None:
    for a, b in zip(got[0], wanted[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert_same(got[1], wanted[1])


def distinct_images(data: list[Datum]) -> int:
    return len({c.data for item in data for c in item.model_input.chunks if c.type == "image"})


def test_a_kept_image_counts_as_a_computed_one_and_is_computed_once(keeping, forgetting, data):
    tower, fresh = Tower(keeping), Tower(forgetting)
    wanted = run(forgetting, data)
    assert fresh.take() >= distinct_images(data)
    first = run(keeping, data)
    assert tower.take() == distinct_images(data)
    again = run(keeping, data[::-1])
    assert tower.take() == 0
    assert_agree(first, wanted)
    assert_agree((again[0][::-1], again[1]), wanted)


def test_photographs_whose_files_begin_and_end_alike_are_two_images(keeping, tiny_vl, renderer):
    """Each is scored as transformers scores it, with a renderer of its own that has seen no other photograph."""
    reference = AutoModelForImageTextToText.from_pretrained(tiny_vl).eval()
    keeping.create_model("fresh", LORA)
    items = [datum(prompt(words(2), one, words(8, 1)), renderer, 4) for one in twins(96, 64)]
    tower = Tower(keeping)
    together = logprobs(keeping, items, "fresh")
    assert tower.take() == 2
    later = [*logprobs(keeping, items[1:], "fresh"), *logprobs(keeping, items[:1], "fresh")]
    assert tower.take() == 0
    with torch.no_grad():
        wanted = [reference_logprobs(make_renderer(tiny_vl), item, reference)[:, 0].numpy() for item in items]
    assert np.abs(wanted[0] - wanted[1]).max() > 0.01
    for got in (together, later[::-1]):
        np.testing.assert_allclose(np.stack(got), np.stack(wanted), atol=1e-4)
    keeping.delete_model("fresh")


def test_new_and_cached_images_share_a_microbatch(keeping, forgetting, renderer):
    new = image(96, 96, 42)
    mixed = [datum(prompt(words(2), SMALL, words(1), new, words(1), SMALL, words(2)), renderer, 3)]
    tower = Tower(keeping)
    forward_backward(keeping, "m", cross_entropy([datum(prompt(words(2), SMALL, words(2)), renderer)]), False)
    tower.take()
    assert_agree(run(keeping, mixed), run(forgetting, mixed))
    assert tower.take() == 1


def test_features_do_not_depend_on_the_adapter(keeping, forgetting, data):
    """Nothing before or in the tower is trained, so a step, or another model, leaves them valid."""
    run(keeping, data)
    for rank in (keeping, forgetting):
        rank.create_model("other", Trainable(rank=16, seed=5))
        forward_backward(rank, "other", cross_entropy(data), True)
        rank.optim_step("other", SMOOTH)
    outputs = [forward_backward(rank, "other", cross_entropy(data), False) for rank in (keeping, forgetting)]
    for a, b in zip(*(present(output).loss_fn_outputs for output in outputs), strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)
    assert not [name for name in gradients(keeping, "m") if "visual" in name]
    for rank in (keeping, forgetting):
        rank.delete_model("other")


def test_what_is_kept_stays_within_its_bound_and_the_oldest_go(tiny_vl, forgetting, renderer, data):
    one = datum(prompt(words(2), SMALL, words(1)), renderer)
    probe = trainer(tiny_vl, 1 << 26)
    cache = present(probe.base.vision)._cache
    at_start = cache.size  # of the checks there
    forward_backward(probe, "m", cross_entropy([one]), False)
    kept = [one.on(torch.device("cpu")) for one in cache._values.values()]
    assert cache.size == sum(part.nbytes for features in kept for part in features)
    size = cache.size - at_start
    assert size > 0
    rank = trainer(tiny_vl, 3 * size)
    tower = Tower(rank)
    squares = [datum(prompt(words(1), image(64, 64, seed), words(1)), renderer) for seed in range(10, 15)]
    for item in squares:
        forward_backward(rank, "m", cross_entropy([item]), False)
        assert present(rank.base.vision)._cache.size <= 3 * size
    assert tower.take() == 5
    forward_backward(rank, "m", cross_entropy(squares[2:]), False)
    assert tower.take() == 0
    forward_backward(rank, "m", cross_entropy(squares[:1]), False)
    assert tower.take() == 1
    assert_agree(run(rank, data), run(forgetting, data))


def test_an_image_that_was_known_when_rendered_is_there_when_computed(tiny_vl, forgetting, data):
    """Also where the rest of its batch fills the whole room."""
    rank = trainer(tiny_vl, 1)
    run(rank, data[:2])
    assert_agree(run(rank, data + data), run(forgetting, data + data))


def test_a_broken_image_is_refused_whatever_is_kept(keeping, data):
    whole = data[1].model_input.chunks[1]
    cut = type(whole)(data=whole.data[: len(whole.data) // 2], format="png")
    broken = Datum(
        model_input=prompt(data[1].model_input.chunks[0], cut, data[1].model_input.chunks[2]),
        loss_fn_inputs=data[1].loss_fn_inputs,
    )
    run(keeping, data)
    with pytest.raises(InvalidInput, match="datum 1, chunk 1"):
        forward_backward(keeping, "m", cross_entropy([data[0], broken]), True)


def test_a_forward_that_does_not_look_at_its_images_is_an_error(keeping, data, monkeypatch):
    """As it would be, should a later transformers take image features another way."""
    monkeypatch.setattr(keeping.base.scorer.model.base_model, "get_image_features", keeping.base.vision._tower._run)
    with pytest.raises((BackendFailed, RuntimeError, AttributeError, IndexError)):
        forward_backward(keeping, "m", cross_entropy(data), False)


@pytest.fixture
async def two_ranks(tiny_vl, forked_ranks) -> AsyncIterator[TrainerClient]:
    ranked = TrainerClient(config(tiny_vl, max_tokens=60, num_ranks=2))
    await ranked.start()
    yield ranked
    await ranked.stop()


async def test_images_kept_on_one_rank_only_keep_the_ranks_together(two_ranks, tiny_vl, tmp_path, data):
    one = TrainerClient(config(tiny_vl, max_tokens=60))
    await one.start()
    try:
        for ranked, name in ((two_ranks, "two"), (one, "one")):
            model = await ranked.create_model("m", LORA, "owner")
            # In another order the shares of the ranks differ, so each meets images that it has, and that it has not.
            for batch in (data[1:2], data, data[::-1], data[3:5], data[5:]):
                await ranked.forward_backward(model, cross_entropy(batch), backward=True)
                await ranked.optim_step(model, SMOOTH)
            await ranked.save(model, tmp_path / name, "state")
    finally:
        await one.stop()
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")]
    # Ranks' products have other shapes, whose rounding depends on the processor: 1.3e-5 was seen after five steps.
    assert_same(weights[1], weights[0], rtol=2e-5)


def test_nothing_is_left_of_images_that_were_decoded_for_a_refused_request(keeping, renderer, data):
    broken, whole = image(96, 64, 77), image(64, 64, 78)
    good = datum(prompt(words(3), broken, words(3), whole), renderer)
    cut = broken.model_copy(update={"data": broken.data[: len(broken.data) // 2]})
    bad = good.model_copy(update={"model_input": prompt(words(3), cut, words(3), whole)})
    with pytest.raises(InvalidInput, match="datum 0, chunk 1: the image does not decode"):
        forward_backward(keeping, "m", cross_entropy([bad]), True)
    assert not keeping.base.renderer.prefetcher._results
    run(keeping, data)
