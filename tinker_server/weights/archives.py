"""Archives of saved weights to download: a tar.gz each, packed at the first request.

They are deleted with the weights, and an hour after they were packed.
"""

import asyncio
import tarfile
import tempfile
from pathlib import Path

from tinker_server.backends.files import write_aside
from tinker_server.backends.processes.fair_threads import FairThreads
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinker_server.errors import DiskFull
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.weights import export
from tinker_server.weights.peft_form import write_expanded

PACKED_AT_ONCE = 2
"""Archives, each of an owner. Packing takes a processor for seconds, so it has threads of its own: other work in
threads must not wait for it."""


class Archives:
    """Packs each archive once, however many requests ask for it."""

    def __init__(self, storage: Storage, holdings: Holdings) -> None:
        self._storage = storage
        self._holdings = holdings
        self._threads = FairThreads(PACKED_AT_ONCE, "packing")
        self._packing: dict[str, asyncio.Task[None]] = {}

    async def get(self, directory: str, owner: str) -> Path:
        """Return the archive of a directory's weights, which are the owner's.

        Raises FileNotFoundError if they were deleted meanwhile, LimitReached if the owner's part of the disk is taken,
        DiskFull.
        """
        archive = self._storage.archive_of(directory)
        if not archive.exists():
            self._storage.lease.require()
            if directory not in self._packing:
                packing = asyncio.create_task(self._pack(directory, archive, owner), name=f"packing of {directory}")
                packing.add_done_callback(lambda _: self._packing.pop(directory))
                self._packing[directory] = packing
            await asyncio.shield(self._packing[directory])
        return archive

    async def _pack(self, directory: str, archive: Path, owner: str) -> None:
        async with self._holdings.asking[owner]:
            await self._holdings.require_room(owner, await self._storage.size_bytes(directory))
            try:
                await self._threads.run(owner, _pack, self._storage.path(directory), archive)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise DiskFull(f"the archive cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Start no more packing; running packing ends by itself."""
        for packing in self._packing.values():
            packing.cancel()
        self._threads.close()


def _pack(directory: Path, archive: Path) -> None:
    """Pack a directory; an adapter like its export: under the tinker names, with PEFT's form in `peft/`."""
    with write_aside(archive) as aside, tarfile.open(aside, "w:gz", compresslevel=1) as tar:
        if (directory / ADAPTER_CONFIG_FILE).exists() and not (directory / export.PEFT).exists():
            # A server that starts deletes what begins with a dot.
            with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".") as exported:
                export.write_tinker_form(directory, Path(exported))
                is_expanded = write_expanded(directory, Path(exported) / export.PEFT)
                tar.add(exported, "")
            expanded = (ADAPTER_FILE, ADAPTER_CONFIG_FILE) if is_expanded else ()
            tar.add(directory, export.PEFT, filter=lambda file: None if Path(file.name).name in expanded else file)
        else:
            tar.add(directory, "")
    if not directory.exists():
        archive.unlink()
        raise FileNotFoundError(directory)
