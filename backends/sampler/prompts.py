"""Prompts in the engine's terms, rendered when their turn comes."""

import asyncio

from vllm.inputs import EngineInput

from api_schemas.inputs import ImageChunk, ModelInput
from backends.inputs.rendering import Rendered, Renderer
from backends.sampler.requests import engine_input


class Prompt:
    """A prompt rendered when its first sequence gets its turn, so that waiting requests hold no pixels."""

    def __init__(self, renderer: Renderer, model_input: ModelInput, owner: str) -> None:
        self._renderer, self._model_input, self._owner = renderer, model_input, owner
        self._lock = asyncio.Lock()
        self._result: tuple[Rendered, EngineInput] | None = None

    async def render(self) -> tuple[Rendered, EngineInput]:
        """The prompt in our terms and in the engine's. Raises InvalidInput for pixels that do not decode."""
        async with self._lock:
            if self._result is None:
                has_images = any(isinstance(chunk, ImageChunk) for chunk in self._model_input.chunks)
                self._result = await asyncio.to_thread(self._render) if has_images else self._render()
            return self._result

    def _render(self) -> tuple[Rendered, EngineInput]:
        rendered = self._renderer.render(self._model_input, "prompt")
        return rendered, engine_input(rendered, self._renderer.family.vision, self._owner)
