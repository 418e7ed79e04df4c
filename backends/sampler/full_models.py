"""Whole models in a running engine, which has the weights of one at a time: the base's, or a saved version's.

Only a row that has the engine's one slot (`turns.py`) has its version loaded, so that no row of another runs meanwhile.
What the engine keeps of the weights before, keys and values of prompts and features of images, goes with them.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from backends.formats.load_check import Canary
from backends.inputs.rendering import Renderer
from backends.model_spec import ModelSpec
from backends.protocol import ADAPTER_FILE, CANARY_FILE, BackendFailed, InvalidInput
from backends.sampler.scores import check_scores
from backends.sampler.sequences import end_process

_TRIES, _PAUSE_S = 100, 0.05
"""For rows that were cancelled to leave the engine: they hold keys and values until its next step."""


class WholeModel:
    """One version's files in the scratch directory, and how many use it."""

    def __init__(self, weights: Path, linked: Path, linking: "asyncio.Task[Canary]") -> None:
        self.weights = weights
        self.linked = linked
        self.linking = linking
        self.users = 0


class EngineModels:
    """The versions of one engine, by the directory they were saved in."""

    def __init__(self, engine: AsyncLLM, renderer: Renderer, config: ModelSpec, base: Canary) -> None:
        """Empties the scratch directory. `base` is how the engine scores with the weights it has now, the base's."""
        self._engine = engine
        self._renderer = renderer
        self._dtype = config.dtype
        self._scratch_dir = config.scratch_dir.absolute()
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self._scratch_dir.mkdir(parents=True)
        self._numbers = itertools.count(1)
        source = Path(config.directory)
        self._base = WholeModel(source, source, asyncio.create_task(_already(base)))
        self._models: dict[Path, WholeModel] = {}
        self._loaded: WholeModel | None = self._base
        """None while the engine has no weights that may be sampled from."""
        self._loading = asyncio.Lock()
        self._dropping: set[asyncio.Task[None]] = set()

    def slot(self, weights: Path | None) -> Path:
        """What takes turns: the base model is a version like the others."""
        return weights or self._base.weights

    @contextlib.asynccontextmanager
    async def hold(self, weights: Path | None) -> AsyncIterator[WholeModel]:
        """Inside, the version saved in `weights` can be loaded, even where its directory is deleted meanwhile; None
        for the base model.

        Raises InvalidInput where the directory is gone or holds no whole model, and BackendFailed where its files
        cannot be read.
        """
        if weights is None:
            yield self._base
            return
        model = self._models.get(weights) or self._new(weights)
        model.users += 1
        try:
            # Others may wait for the same version: one cancelled request does not stop the work.
            await asyncio.shield(model.linking)
            yield model
        finally:
            model.users -= 1
            self._drop_idle()

    def model_id(self, model: WholeModel) -> str:
        """As the weights' file says."""
        return model.linking.result().model_id

    async def load(self, model: WholeModel) -> None:
        """Have the engine's next rows computed with a version that is held, by one that has its slot. Raises
        BackendFailed where the engine cannot load it, or does not score with it as the trainer did."""
        if self._loaded is not model:
            await asyncio.shield(asyncio.create_task(self._load(model)))

    async def _load(self, model: WholeModel) -> None:
        async with self._loading:
            if self._loaded is model:
                return
            await self._forget_prompts()
            self._loaded = None
            try:
                (missing,) = await self._engine.collective_rpc("take_model", args=(str(model.linked),))
            except EngineDeadError:
                raise
            except Exception:
                end_process()  # half of a model is none, and the next would be put on top of it
                raise
            # The worker has forgotten them: so must the scheduler, which else counts on them.
            await self._engine.reset_mm_cache()
            await self._engine.reset_encoder_cache()
            if missing:
                raise BackendFailed(f"the sampler cannot use these weights: they lack {', '.join(missing[:5])}")
            canary = model.linking.result()
            await check_scores(self._engine, canary, None, self._renderer, self._dtype)
            self._loaded = model
            self._drop_idle()

    async def _forget_prompts(self) -> None:
        """Raises BackendFailed where the engine would go on with the keys and values of other weights."""
        for _ in range(_TRIES):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(_PAUSE_S)
        raise BackendFailed("the sampler cannot change its weights: sequences of others did not leave the engine")

    def _new(self, weights: Path) -> WholeModel:
        linked = self._scratch_dir / str(next(self._numbers))
        linking = asyncio.create_task(asyncio.to_thread(_link, weights, linked))
        linking.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waited may be gone
        model = self._models[weights] = WholeModel(weights, linked, linking)
        return model

    def _drop_idle(self) -> None:
        """Forget all versions that nobody uses, but the one that is loaded."""
        for weights, model in list(self._models.items()):
            if not model.users and model is not self._loaded:
                del self._models[weights]
                task = asyncio.create_task(_remove(model))
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)


async def _already(canary: Canary) -> Canary:
    return canary


async def _remove(model: WholeModel) -> None:
    await asyncio.gather(model.linking, return_exceptions=True)
    await asyncio.to_thread(shutil.rmtree, model.linked, ignore_errors=True)


def _link(source: Path, directory: Path) -> Canary:
    """The files of a version under a name of our own, copied only where the file systems differ; and its canary."""
    directory.mkdir()
    if (source / ADAPTER_FILE).exists():
        raise InvalidInput(
            "the sampler weights are a LoRA adapter, and this server samples from whole models (setting backend.full);"
            " start it without that setting to sample from adapters"
        )
    try:
        for file in source.iterdir():
            try:
                os.link(file, directory / file.name)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(file, directory / file.name)
        canary = Canary.from_metadata(json.loads((directory / CANARY_FILE).read_text()))
        for file in directory.glob("*.safetensors"):
            with safe_open(file, framework="pt"):
                pass  # all of it is there
    except FileNotFoundError:
        raise InvalidInput("the sampler weights no longer exist") from None
    except (SafetensorError, ValueError) as error:
        raise BackendFailed(f"the sampler cannot load these weights: {error}") from None
    assert canary is not None
    return canary
