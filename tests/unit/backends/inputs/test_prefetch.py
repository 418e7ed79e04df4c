"""Images are decoded on threads before they are rendered, which changes nothing but the time."""

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from tests.factories import image, make_renderer, present, prompt, words
from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.backends.inputs.prefetch import Prefetcher
from tinker_server.backends.inputs.rendering import Layout, Rendered, Renderer
from tinker_server.backends.protocol import InvalidInput


@pytest.fixture
def renderer(tiny_vl) -> Renderer:
    """A renderer that caches no pixels, as the trainer's."""
    return Renderer(str(tiny_vl), image_cache_bytes=0, max_image_pixels=10**7)


@pytest.fixture
def decoded(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each decoding."""
    threads, process = [], present(renderer.family.vision).process

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return process(*arguments)

    monkeypatch.setattr(renderer.family.vision, "process", noted)
    return threads


INPUTS = [prompt(words(3, i), image(96, 64, i), words(2, i), image(64, 64, i % 2), words(4, i)) for i in range(6)]


def with_layouts(renderer: Renderer, inputs: list[ModelInput]) -> list[tuple[ModelInput, Layout]]:
    return [(one, renderer.layout(one, "datum")) for one in inputs]


def assert_same(one: Rendered, other: Rendered) -> None:
    assert (one.token_ids_T == other.token_ids_T).all() and one.spans == other.spans
    for got, expected in zip(one.images, other.images, strict=True):
        assert got.hash == expected.hash and got.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(got.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_prefetched_inputs_are_rendered_as_others_and_every_image_is_decoded_once(renderer, decoded, tiny_vl):
    expected = [make_renderer(tiny_vl).render(one, "datum") for one in INPUTS]
    num_threads = torch.get_num_threads()
    renderer.prefetch(with_layouts(renderer, INPUTS))
    rendered = [renderer.render(one, "datum") for one in INPUTS]
    for one, other in zip(rendered, expected, strict=True):
        assert_same(one, other)
    assert len(decoded) == 8 and all(name.startswith("prefetch") for name in decoded)
    assert torch.get_num_threads() == num_threads


def test_known_images_are_not_decoded_and_prefetched_ones_not_left_over(renderer):
    hashes = {one.hash for one in renderer.render(INPUTS[0], "datum").images}
    renderer.prefetch(with_layouts(renderer, INPUTS[:1]), hashes)
    renderer.prefetch(with_layouts(renderer, INPUTS[1:2]))
    for one in INPUTS[:2]:
        known = hashes | {one.hash for one in renderer.render(INPUTS[1], "datum").images}
        assert not any("pixel_values" in one.tensors for one in renderer.render(one, "datum", known).images)
    assert not renderer.prefetcher._results


def test_a_broken_image_is_refused_by_its_position_when_it_is_rendered(renderer):
    broken = image(96, 64)
    cut = broken.model_copy(update={"data": broken.data[: len(broken.data) // 2]})
    inputs = with_layouts(renderer, [prompt(words(3)), prompt(words(3), cut)])
    renderer.prefetch(inputs)
    with pytest.raises(InvalidInput, match="datum 1, chunk 1: the image does not decode"):
        renderer.render(inputs[1][0], "datum 1", layout=inputs[1][1])


def test_prefetched_work_is_bounded_and_cancelling_makes_room():
    prefetcher: Prefetcher[int] = Prefetcher(100)
    began: list[int] = []

    def note(number: int) -> int:
        began.append(number)
        return number

    for number in range(5):
        prefetcher.start(str(number), 40, partial(note, number))
    assert [prefetcher.take(str(number)) for number in range(5)] == [0, 1, None, None, None]
    assert sorted(began) == [0, 1]
    prefetcher.start("a", 100, lambda: 1)
    prefetcher.cancel()
    prefetcher.start("b", 100, lambda: 2)
    assert (prefetcher.take("a"), prefetcher.take("b")) == (None, 2)


def test_prefetched_work_runs_beside_the_caller():
    prefetcher: Prefetcher[float] = Prefetcher(100)
    released = threading.Event()
    prefetcher.start("a", 1, lambda: released.wait(20) and time.monotonic())
    began = time.monotonic()
    released.set()
    ended = prefetcher.take("a")
    assert ended is not None and ended >= began


def test_nothing_starts_while_paused_and_everything_afterwards():
    prefetcher: Prefetcher[None] = Prefetcher(100)
    started = threading.Event()
    with prefetcher.pause():
        prefetcher.start("a", 1, started.set)
        assert not started.wait(0.2)
    assert prefetcher.take("a") is None and started.is_set()
