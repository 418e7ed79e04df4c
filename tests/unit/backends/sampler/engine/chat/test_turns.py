"""Conversations are rendered in their owners' turns."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tinker_server.backends.protocol import ChatTask


@pytest.mark.heavy
async def test_an_owners_conversations_are_rendered_one_after_the_other_and_others_need_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.renderers.online_renderer import OnlineRenderer

    from tinker_server.backends.sampler.engine.chat.handlers import _InTurns
    from tinker_server.backends.sampler.engine.chat.prompts import TASK

    running: list[str] = []
    may_end = asyncio.Event()

    async def render_chat(_: object, name: str) -> str:
        running.append(name)
        await may_end.wait()
        return name

    monkeypatch.setattr(OnlineRenderer, "__init__", lambda _: None)
    monkeypatch.setattr(OnlineRenderer, "render_chat", render_chat)
    renderer: Any = _InTurns()

    async def render(name: str, owner: str) -> str:
        TASK.set(ChatTask("chat_completions", {}, Path(), owner))
        rendered: str = await renderer.render_chat(name)
        return rendered

    asked = [("a1", "a"), ("a2", "a"), ("b1", "b")]
    rendered = [asyncio.create_task(render(*each)) for each in asked]
    await asyncio.sleep(0.05)
    assert running == ["a1", "b1"]
    may_end.set()
    assert await asyncio.gather(*rendered) == ["a1", "a2", "b1"]
    assert running == ["a1", "b1", "a2"]
