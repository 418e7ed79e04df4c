"""Saved adapters in a running engine, by the directory they were saved in: linked, loaded before their first use,
evicted.

The engine may read files again at any step, and dies where it cannot. So each version is first linked into a directory
that nobody else deletes, and its name and number, by which the engine's prefix cache knows it, are never used for
another.
"""

import asyncio
import contextlib
import itertools
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

from vllm.lora.request import LoRARequest

from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.sampler.engine.adapters import AdapterLoader, Version
from tinker_server.backends.sampler.engine.engine import MAX_ADAPTERS


class VersionCache:
    """The versions of an engine."""

    def __init__(self, scratch_dir: Path, loader: AdapterLoader) -> None:
        """Empties `scratch_dir`."""
        self._loader = loader
        self._scratch_dir = scratch_dir.absolute()
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self._scratch_dir.mkdir(parents=True)
        self._versions: OrderedDict[Path, Version] = OrderedDict()
        """The least recently used first."""
        self._numbers = itertools.count(1)
        self._evicting: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def hold(self, weights: Path | None) -> AsyncIterator[Version | None]:
        """Inside, the version can be loaded, even where its directory is deleted meanwhile; no `weights`: the base
        model.

        Raises InvalidInput where the directory is gone or cannot be sampled from, BackendFailed where its files cannot
        be read.
        """
        if weights is None:
            yield None
            return
        version = self._versions.get(weights) or self._new(weights)
        self._versions.move_to_end(weights)
        version.users += 1
        try:
            # Others may wait for the same version: one cancelled request does not stop the work.
            await asyncio.shield(version.linking)
            yield version
        finally:
            version.users -= 1
            self._evict_idle()

    def model_id(self, version: Version | None) -> str:
        """Return the model whose weights they are; empty where nothing says so."""
        load_check = None if version is None else version.load_check
        return "" if load_check is None else load_check.model_id

    async def load(self, version: Version | None) -> LoRARequest | None:
        """Load a held version for a sequence that has its slot, and return the engine's name for it.

        Raises BackendFailed where the engine cannot load it, or does not score with it as the trainer did, and
        InvalidInput where its scores are not finite.
        """
        if version is None:
            return None
        task = version.loading
        if task is None or (task.done() and not _has_failed(task)):
            if self._loader.has(version):
                return self._loader.request(version)
            task = version.loading = asyncio.create_task(self._load(version))
            task.add_done_callback(lambda done: self._note_end(version, done))
        await asyncio.shield(task)
        return self._loader.request(version)

    async def fill(self, version: Version | None) -> None:
        """Read a held version into a slot. Raises InvalidInput or BackendFailed where the engine cannot."""
        if version is None:
            return
        if version.filling is None:
            version.filling = asyncio.create_task(self._loader.fill(version))
            version.filling.add_done_callback(lambda done: self._note_end(version, done))
        await asyncio.shield(version.filling)

    async def _load(self, version: Version) -> None:
        await self.fill(version)
        await self._loader.check(version)

    def _new(self, weights: Path) -> Version:
        number = next(self._numbers)
        linked = self._scratch_dir / str(number)
        linking = asyncio.create_task(asyncio.to_thread(self._loader.link, weights, linked))
        version = self._versions[weights] = Version(weights, linked, number, linking)
        linking.add_done_callback(lambda done: self._note_end(version, done))
        return version

    def _note_end(self, version: Version, task: "asyncio.Future[None] | asyncio.Future[LoadCheck | None]") -> None:
        if _has_failed(task):
            self._evict(version)
        else:
            self._evict_idle()

    def _evict_idle(self) -> None:
        """Evict the least recently used idle versions while there are too many."""
        idle = [version for version in self._versions.values() if not version.users]
        for version in idle[: max(0, len(self._versions) - MAX_ADAPTERS)]:
            self._evict(version)

    def _evict(self, version: Version) -> None:
        if self._versions.get(version.weights) is version:
            del self._versions[version.weights]
            task = asyncio.create_task(self._remove(version))
            self._evicting.add(task)
            task.add_done_callback(self._evicting.discard)

    async def _remove(self, version: Version) -> None:
        tasks = [task for task in (version.filling, version.loading) if task is not None]
        await asyncio.gather(version.linking, *tasks, return_exceptions=True)
        if tasks:
            await self._loader.unload(version)
        await asyncio.to_thread(shutil.rmtree, version.linked, ignore_errors=True)


def _has_failed(task: "asyncio.Future[None] | asyncio.Future[LoadCheck | None]") -> bool:
    return task.cancelled() or task.exception() is not None
