"""Prompts of many owners are rendered in turn."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.factories import image, prompt
from tinker_server.backends.inputs.rendering import Rendered, Renderer


class Slow(Renderer):
    """A renderer whose images take until they may be done."""

    may_end = threading.Event()

    def render(self, *asked: Any, **named: Any) -> Rendered:
        assert self.may_end.wait(60)
        return super().render(*asked, **named)


@pytest.mark.heavy
async def test_a_flood_of_large_images_leaves_threads_for_the_images_of_others(tiny_vl: Path) -> None:
    from tinker_server.backends.sampler.engine.requests import Prompt

    slow, quick = (kind(str(tiny_vl), image_cache_bytes=0, max_image_pixels=10**7) for kind in (Slow, Renderer))
    flood = [asyncio.create_task(Prompt(slow, prompt(image(64, 64)), "evil").render()) for _ in range(100)]
    try:
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            rendered, _ = await Prompt(quick, prompt(image(64, 64)), "good").render()
        assert len(rendered.images) == 1 and not any(task.done() for task in flood)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(int, "1") == 1, "the event loop's own threads are free"
    finally:
        Slow.may_end.set()
    assert len(await asyncio.gather(*flood)) == 100
