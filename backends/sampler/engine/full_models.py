"""Full models in a running engine, which has the weights of one at a time: the base's, or a saved version's.

Only a sequence that has the engine's one slot (`fair_admission.py`) has its version loaded, so no sequence of another
runs meanwhile. The engine's caches of the weights before, keys and values of prompts and features of images, are
cleared.
"""

import asyncio
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from backends.formats.load_check import LoadCheck
from backends.inputs.rendering import Renderer
from backends.model_spec import ModelSpec
from backends.protocol import ADAPTER_FILE, LOAD_CHECK_FILE, BackendFailed, InvalidInput
from backends.sampler.engine.sequences import check_scores, end_process
from backends.sampler.engine.versions import Version, link_each

_TRIES, _PAUSE_S = 100, 0.05
"""For cancelled sequences to leave the engine: they hold keys and values until its next step."""


class FullModelLoader:
    """`Loader` of full models; the base model is a version like the others."""

    max_versions = 0

    def __init__(self, engine: AsyncLLM, renderer: Renderer, config: ModelSpec, base: LoadCheck) -> None:
        """`base` has the engine's scores with the weights it has now."""
        self._engine = engine
        self._renderer = renderer
        self._dtype = config.dtype
        source = Path(config.directory)
        linked: asyncio.Future[LoadCheck | None] = asyncio.get_running_loop().create_future()
        linked.set_result(base)
        self.base = Version(source, source, 0, linked)
        self._loaded: Version | None = self.base
        """None while the engine has no weights that may be sampled from."""
        self._loading = asyncio.Lock()

    def link(self, source: Path, directory: Path) -> LoadCheck | None:
        """Link the files of a version, and check that all of them are whole."""
        directory.mkdir()
        if (source / ADAPTER_FILE).exists():
            raise InvalidInput(
                "the sampler weights are a LoRA adapter, and this server samples from whole models (setting"
                " backend.full); start it without that setting to sample from adapters"
            )
        try:
            link_each(source, directory, [file.name for file in source.iterdir()])
            load_check = LoadCheck.from_metadata(json.loads((directory / LOAD_CHECK_FILE).read_text()))
            for file in directory.glob("*.safetensors"):
                with safe_open(file, framework="pt"):
                    pass  # all of it is there
        except FileNotFoundError:
            raise InvalidInput("the sampler weights no longer exist") from None
        except (SafetensorError, ValueError) as error:
            raise BackendFailed(f"the sampler cannot load these weights: {error}") from None
        assert load_check is not None
        return load_check

    @property
    def pinned(self) -> Version | None:
        """The version whose weights the engine has."""
        return self._loaded

    def request(self, version: Version) -> None:
        """Return None: the engine has no names for full models."""

    def has(self, version: Version) -> bool:
        """Return whether the engine's weights are this version's."""
        return version is self._loaded

    async def load(self, version: Version) -> None:
        """Replace the engine's weights, and check how it scores with them."""
        async with self._loading:
            if self._loaded is version:
                return
            await self._clear_prompts()
            self._loaded = None
            try:
                (missing,) = await self._engine.collective_rpc("take_model", args=(str(version.linked),))
            except EngineDeadError:
                raise
            except Exception:
                end_process()  # the engine has half of a model, and the next would be put on top of it
                raise
            # The worker has cleared them: so must the scheduler, which else counts on them.
            await self._engine.reset_mm_cache()
            await self._engine.reset_encoder_cache()
            if missing:
                raise BackendFailed(f"the sampler cannot use these weights: they lack {', '.join(missing[:5])}")
            load_check = version.load_check
            assert load_check is not None
            await check_scores(self._engine, load_check, None, self._renderer, self._dtype)
            self._loaded = version

    async def unload(self, version: Version) -> None:
        """Do nothing: the next version replaces the weights."""

    async def _clear_prompts(self) -> None:
        """Raise BackendFailed where the engine would go on with the keys and values of other weights."""
        for _ in range(_TRIES):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(_PAUSE_S)
        raise BackendFailed("the sampler cannot change its weights: sequences of others did not leave the engine")
