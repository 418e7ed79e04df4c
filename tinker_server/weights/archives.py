"""Saved weights as one file to download: a tar.gz, packed when it is first asked for and deleted with them."""

import asyncio
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backends.files import written_aside
from backends.protocol import ADAPTER_CONFIG_FILE
from tinker_server.store.directories import Storage
from tinker_server.weights import export
from tinker_server.weights.saving import PEFT

PACKED_AT_ONCE = 2
"""Packing takes a processor for seconds; what else the server does in threads must not wait for it."""


class Archives:
    """Packs each archive once, however many ask for it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = ThreadPoolExecutor(PACKED_AT_ONCE, thread_name_prefix="packing")
        self._packing: dict[str, asyncio.Future[None]] = {}

    async def get(self, directory: str) -> Path:
        """The archive of the weights in a directory. Raises FileNotFoundError where they were deleted meanwhile."""
        archive = self._storage.archive_of(directory)
        if not archive.exists():
            self._storage.require_lease()
            if directory not in self._packing:
                loop = asyncio.get_running_loop()
                packing = loop.run_in_executor(self._threads, _pack, self._storage.path(directory), archive)
                packing.add_done_callback(lambda _: self._packing.pop(directory))
                self._packing[directory] = packing
            await asyncio.shield(self._packing[directory])
        return archive

    def close(self) -> None:
        """Begin nothing more; what is being packed ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pack(directory: Path, archive: Path) -> None:
    """An adapter is packed as it is exported: under the tinker names, PEFT's form in `peft/`."""
    with written_aside(archive) as aside, tarfile.open(aside, "w:gz", compresslevel=1) as tar:
        if (directory / ADAPTER_CONFIG_FILE).exists() and not (directory / PEFT).exists():
            with tempfile.TemporaryDirectory(dir=archive.parent) as exported:
                export.write_tinker_form(directory, Path(exported))
                tar.add(exported, "")
            tar.add(directory, PEFT)
        else:
            tar.add(directory, "")
    if not directory.exists():
        archive.unlink()
        raise FileNotFoundError(directory)
