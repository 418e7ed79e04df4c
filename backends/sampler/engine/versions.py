"""Saved weights in a running engine, by the directory they were saved in: linked, loaded before their first use,
evicted.

The engine may read files again at any step, and dies where it cannot. So each version is first linked into a directory
that nobody else deletes, and its name and number, by which the engine's prefix cache knows it, are never used for
another.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol

from vllm.lora.request import LoRARequest

from backends.formats.load_check import LoadCheck
from backends.protocol import InvalidInput


class Version:
    """One version's files, and how many use it."""

    def __init__(self, weights: Path, linked: Path, number: int, linking: "asyncio.Future[LoadCheck | None]") -> None:
        """`linked` is the directory of the links, and `linking` ends when they are there."""
        self.weights, self.linked, self.number = weights, linked, number
        self.linking = linking
        self.loading: asyncio.Task[None] | None = None
        self.users = 0

    @property
    def load_check(self) -> LoadCheck | None:
        """The trainer's scores with it, if its files have them."""
        return self.linking.result()


class Loader(Protocol):
    """Loads one kind of weights: adapters into the engine's slots, or full models one at a time."""

    max_versions: int
    """Versions kept; more only while in use or pinned."""

    @property
    def pinned(self) -> Version | None:
        """The version that stays though nobody uses it."""

    @property
    def base(self) -> Version | None:
        """The base model, where it is a version like the others."""

    def link(self, source: Path, directory: Path) -> LoadCheck | None:
        """Link a version's files, in a thread. Raises InvalidInput and BackendFailed as `VersionCache.hold`."""

    def request(self, version: Version) -> LoRARequest | None:
        """Return the engine's name for it, where that needs one."""

    def has(self, version: Version) -> bool:
        """Return whether the engine has it loaded."""

    async def load(self, version: Version) -> None:
        """Load it. Raises BackendFailed as `VersionCache.load`."""

    async def unload(self, version: Version) -> None:
        """Have the engine forget it."""


class VersionCache:
    """The versions of one engine."""

    def __init__(self, scratch_dir: Path, loader: Loader) -> None:
        """Empties `scratch_dir`."""
        self._loader = loader
        self._scratch_dir = scratch_dir.absolute()
        shutil.rmtree(self._scratch_dir, ignore_errors=True)
        self._scratch_dir.mkdir(parents=True)
        self._versions: OrderedDict[Path, Version] = OrderedDict()
        """The least recently used first."""
        self._numbers = itertools.count(1)
        self._evicting: set[asyncio.Task[None]] = set()

    def slot(self, weights: Path | None) -> Path | None:
        """Return the key by which versions are admitted to the engine; None needs no slot."""
        base = self._loader.base
        return weights or (None if base is None else base.weights)

    @contextlib.asynccontextmanager
    async def hold(self, weights: Path | None) -> AsyncIterator[Version | None]:
        """Inside, the version can be loaded, even where its directory is deleted meanwhile; no `weights`: the base
        model.

        Raises InvalidInput where the directory is gone or cannot be sampled from, BackendFailed where its files cannot
        be read.
        """
        if weights is None:
            yield self._loader.base
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

        Raises BackendFailed where the engine cannot load it, or does not score with it as the trainer did.
        """
        if version is None:
            return None
        task = version.loading
        if task is None or (task.done() and not _failed(task)):
            if self._loader.has(version):
                return self._loader.request(version)
            task = version.loading = asyncio.create_task(self._loader.load(version))
            task.add_done_callback(lambda done: self._ended(version, done))
        await asyncio.shield(task)
        return self._loader.request(version)

    def _new(self, weights: Path) -> Version:
        number = next(self._numbers)
        linked = self._scratch_dir / str(number)
        linking = asyncio.create_task(asyncio.to_thread(self._loader.link, weights, linked))
        version = self._versions[weights] = Version(weights, linked, number, linking)
        linking.add_done_callback(lambda done: self._ended(version, done))
        return version

    def _ended(self, version: Version, task: "asyncio.Future[None] | asyncio.Future[LoadCheck | None]") -> None:
        if _failed(task):
            self._evict(version)
            if version is self._loader.base:
                version.loading = None  # it is never evicted: the next to load it tries again
        else:
            self._evict_idle()

    def _evict_idle(self) -> None:
        """Evict the least recently used idle versions while there are too many."""
        idle = [one for one in self._versions.values() if not one.users and one is not self._loader.pinned]
        for version in idle[: max(0, len(self._versions) - self._loader.max_versions)]:
            self._evict(version)

    def _evict(self, version: Version) -> None:
        if self._versions.get(version.weights) is version:
            del self._versions[version.weights]
            task = asyncio.create_task(self._remove(version))
            self._evicting.add(task)
            task.add_done_callback(self._evicting.discard)

    async def _remove(self, version: Version) -> None:
        await asyncio.gather(version.linking, *filter(None, [version.loading]), return_exceptions=True)
        if version.loading is not None:
            await self._loader.unload(version)
        await asyncio.to_thread(shutil.rmtree, version.linked, ignore_errors=True)


def link_each(source: Path, directory: Path, names: Iterable[str]) -> None:
    """Link files, or copy them where the file systems differ. Raises InvalidInput where one is gone."""
    for name in names:
        try:
            os.link(source / name, directory / name)
        except FileNotFoundError:
            raise InvalidInput("the sampler weights no longer exist") from None
        except OSError:
            shutil.copyfile(source / name, directory / name)


def _failed(task: "asyncio.Future[None] | asyncio.Future[LoadCheck | None]") -> bool:
    return task.cancelled() or task.exception() is not None
