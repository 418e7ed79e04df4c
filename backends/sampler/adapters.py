"""Saved adapters in a running engine: loaded before their first use, never changed, dropped when many.

The engine may forget an adapter and read its files again at any step, and dies where it cannot. So each
adapter is first linked into a directory that nobody else deletes, and its name and number, by which the
engine's prefix cache knows it, are never used for another.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from backends.formats.load_check import Canary
from backends.formats.stacked_adapters import other_files
from backends.inputs.rendering import Renderer
from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CANARY_FILE, BackendFailed, InvalidInput
from backends.sampler.engine import MAX_ADAPTERS
from backends.sampler.scores import check_scores

_MAX_NAMES = 5
"""In one error."""


class Adapter:
    """One adapter's files and name, and how many use it."""

    def __init__(self, weights: Path, request: LoRARequest, linking: asyncio.Task[Canary | None]) -> None:
        self.weights = weights
        self.request = request
        self.linking = linking
        self.loading: asyncio.Task[None] | None = None
        self.users = 0


class EngineAdapters:
    """The adapters of one engine, by the directory they were saved in."""

    def __init__(self, engine: AsyncLLM, renderer: Renderer, scratch_dir: Path, dtype: str) -> None:
        """Empties `scratch_dir`. The engine computes in `dtype`."""
        self._engine = engine
        self._renderer = renderer
        self._dtype = dtype
        self._scratch_dir = scratch_dir.absolute()
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self._scratch_dir.mkdir(parents=True)
        self._adapters: OrderedDict[Path, Adapter] = OrderedDict()
        self._numbers = itertools.count(1)
        self._dropping: set[asyncio.Task[None]] = set()

    def slot(self, weights: Path | None) -> Path | None:
        """What takes turns: the base model needs no slot."""
        return weights

    @contextlib.asynccontextmanager
    async def hold(self, weights: Path | None) -> AsyncIterator["Adapter | None"]:
        """Inside, the adapter saved in `weights` can be loaded, even where its directory is deleted meanwhile;
        None for the base model.

        Raises InvalidInput where the directory is gone, or holds values that are not finite, and BackendFailed
        where its files cannot be read.
        """
        if weights is None:
            yield None
            return
        adapter = self._adapters.get(weights) or self._new(weights)
        self._adapters.move_to_end(weights)
        adapter.users += 1
        try:
            # Others may wait for the same adapter: one cancelled request does not stop the work.
            await asyncio.shield(adapter.linking)
            yield adapter
        finally:
            adapter.users -= 1
            self._drop_idle()

    def model_id(self, adapter: "Adapter | None") -> str:
        """As the weights' file says."""
        canary = None if adapter is None else adapter.linking.result()
        return "" if canary is None else canary.model_id

    async def load(self, adapter: "Adapter | None") -> LoRARequest | None:
        """The engine's name for an adapter that is held. Raises BackendFailed where the engine cannot load it, or
        does not score with it as the trainer did."""
        if adapter is None:
            return None
        if adapter.loading is None:
            adapter.loading = asyncio.create_task(self._load(adapter.request, adapter.linking.result()))
            adapter.loading.add_done_callback(lambda task: self._forget_failed(adapter, task))
        await asyncio.shield(adapter.loading)
        return adapter.request

    def _new(self, weights: Path) -> Adapter:
        number = next(self._numbers)
        request = LoRARequest(f"adapter-{number}", number, str(self._scratch_dir / str(number)))
        linking = asyncio.create_task(asyncio.to_thread(_link, weights, Path(request.lora_path)))
        adapter = Adapter(weights, request, linking)
        linking.add_done_callback(lambda task: self._forget_failed(adapter, task))
        self._adapters[weights] = adapter
        return adapter

    async def _load(self, request: LoRARequest, canary: Canary | None) -> None:
        try:
            load = (request.lora_name, request.lora_int_id, request.lora_path)
            (ignored,) = await self._engine.collective_rpc("load_adapter", args=load)
        except EngineDeadError:
            raise
        except Exception as error:  # whatever vLLM meets in the files; the engine lives
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise BackendFailed(f"the sampler cannot load these weights: {reason}") from error
        if ignored:
            others = f" and {len(ignored) - _MAX_NAMES} others" if len(ignored) > _MAX_NAMES else ""
            raise BackendFailed(
                "the sampler cannot load these weights: the engine has no place for"
                f" {', '.join(ignored[:_MAX_NAMES])}{others}"
            )
        if canary is not None:
            await check_scores(self._engine, canary, request, self._renderer, self._dtype)

    def _drop_idle(self) -> None:
        """Forget the adapters least recently used while there are too many."""
        idle = [weights for weights, adapter in self._adapters.items() if not adapter.users]
        for weights in idle[: max(0, len(self._adapters) - MAX_ADAPTERS)]:
            self._forget(self._adapters[weights])

    def _forget_failed(self, adapter: Adapter, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(adapter)

    def _forget(self, adapter: Adapter) -> None:
        if self._adapters.get(adapter.weights) is adapter:
            del self._adapters[adapter.weights]
            task = asyncio.create_task(self._remove(adapter))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _remove(self, adapter: Adapter) -> None:
        tasks = [adapter.linking, *([adapter.loading] if adapter.loading else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        if adapter.loading is not None:
            with contextlib.suppress(EngineDeadError):  # which has forgotten them all
                await self._engine.remove_lora(adapter.request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, adapter.request.lora_path, ignore_errors=True)


def _link(source: Path, directory: Path) -> Canary | None:
    """An adapter's files under a name of our own, copied only where the file systems differ; and its canary."""
    directory.mkdir()
    if (source / CANARY_FILE).exists():
        raise InvalidInput(
            "the sampler weights are a whole model, and this server samples from adapters; start it with the setting"
            " backend.full to sample from whole models"
        )
    _link_each(source, directory, [ADAPTER_FILE, ADAPTER_CONFIG_FILE])
    try:
        with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
            _link_each(source, directory, other_files(file.metadata()))
            canary = Canary.from_metadata(file.metadata())
            if canary is None:  # else the trainer has seen to it
                _check_finite(file)
            return canary
    except SafetensorError as error:
        raise BackendFailed(f"the sampler cannot load these weights: {error}") from None


def _link_each(source: Path, directory: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            os.link(source / name, directory / name)
        except FileNotFoundError:
            raise InvalidInput("the sampler weights no longer exist") from None
        except OSError:
            shutil.copyfile(source / name, directory / name)


def _check_finite(file: Any) -> None:
    """Raises InvalidInput naming the first tensor with NaN or infinity in it."""
    for name in file.keys():  # noqa: SIM118 - the file is no mapping
        if not file.get_tensor(name).isfinite().all():
            raise InvalidInput(
                f"the sampler weights cannot be used: {name} holds values that are not finite; the training"
                " run has diverged, sample from a checkpoint before that"
            )
