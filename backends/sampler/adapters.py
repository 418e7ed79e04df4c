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
from collections.abc import AsyncIterator
from pathlib import Path

from safetensors import safe_open
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, BackendFailed, InvalidInput
from backends.sampler.engine import MAX_ADAPTERS


class _LoadedAdapter:
    """One adapter, loaded or about to be, and how many use it."""

    def __init__(self, loading: asyncio.Task[LoRARequest]) -> None:
        self.loading = loading
        self.users = 0

    @property
    def is_idle(self) -> bool:
        """Loaded, and used by nobody."""
        done = self.loading.done() and not self.loading.cancelled() and self.loading.exception() is None
        return done and self.users == 0


class EngineAdapters:
    """The adapters of one engine, by the directory they were saved in."""

    def __init__(self, engine: AsyncLLM, scratch_dir: Path) -> None:
        """Empties `scratch_dir`."""
        self._engine = engine
        self._scratch_dir = scratch_dir.absolute()
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self._scratch_dir.mkdir(parents=True)
        self._loaded: OrderedDict[Path, _LoadedAdapter] = OrderedDict()
        self._numbers = itertools.count(1)
        self._dropping: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def use(self, weights: Path | None) -> AsyncIterator[LoRARequest | None]:
        """The engine's name for the adapter saved in `weights`, which stays loadable inside; None for the base.

        Raises InvalidInput where the directory is gone, BackendFailed where the engine cannot load it.
        """
        if weights is None:
            yield None
            return
        adapter = self._loaded.get(weights)
        if adapter is None:
            adapter = _LoadedAdapter(asyncio.create_task(self._load(weights)))
            adapter.loading.add_done_callback(lambda task: self._forget_failed(weights, task))
            self._loaded[weights] = adapter
        self._loaded.move_to_end(weights)
        adapter.users += 1
        try:
            # Others may wait for the same adapter: one cancelled request does not stop the loading.
            yield await asyncio.shield(adapter.loading)
        finally:
            adapter.users -= 1
            self._drop_idle()

    def _forget_failed(self, weights: Path, task: asyncio.Task[LoRARequest]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._loaded.pop(weights, None)

    async def _load(self, weights: Path) -> LoRARequest:
        number = next(self._numbers)
        request = LoRARequest(f"adapter-{number}", number, str(self._scratch_dir / str(number)))
        try:
            await asyncio.to_thread(_link, weights, Path(request.lora_path))
            await asyncio.to_thread(_check_finite, Path(request.lora_path))
            await self._engine.add_lora(request)
            (ignored,) = await self._engine.collective_rpc("ignored_modules", args=(number,))
            if ignored:
                raise BackendFailed(f"the engine has no place for {', '.join(ignored)}")
        except FileNotFoundError:
            await self._remove(request)
            raise InvalidInput("the sampler weights no longer exist") from None
        except EngineDeadError:
            raise
        except InvalidInput:
            await self._remove(request)
            raise
        except Exception as error:  # whatever vLLM meets in the files; the engine lives
            await self._remove(request)
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise BackendFailed(f"the sampler cannot load these weights: {reason}") from error
        return request

    def _drop_idle(self) -> None:
        """Forget the adapters least recently used while there are too many."""
        idle = [weights for weights, adapter in self._loaded.items() if adapter.is_idle]
        for weights in idle[: max(0, len(self._loaded) - MAX_ADAPTERS)]:
            task = asyncio.create_task(self._remove(self._loaded.pop(weights).loading.result()))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _remove(self, request: LoRARequest) -> None:
        await self._engine.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)


def _link(source: Path, directory: Path) -> None:
    """Both files of an adapter under a name of our own, copied only where the file systems differ."""
    directory.mkdir()
    for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
        try:
            os.link(source / name, directory / name)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source / name, directory / name)


def _check_finite(directory: Path) -> None:
    """Raises InvalidInput naming the first tensor with NaN or infinity in it."""
    with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            if not file.get_tensor(name).isfinite().all():
                raise InvalidInput(
                    f"the sampler weights cannot be used: {name} holds values that are not finite; the training"
                    " run has diverged, sample from a checkpoint before that"
                )
