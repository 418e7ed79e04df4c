"""The folder of uploads: `uploads/<upload_id>/`, the files of an adapter until they become saved weights.

An upload is what its `upload.json` says; there is no row of it. It is deleted some time after its links have expired.
"""

import asyncio
import logging
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict

from tinker_server.api_schemas.training import LoraConfig
from tinker_server.backends.files import write_aside, write_private
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinker_server.errors import BodyTooLarge, Busy, DiskFull, UnknownUpload, shorten

log = logging.getLogger(__name__)
FILES = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
CONFIG_BYTES = 64 << 10
"""Largest `adapter_config.json`."""
COMING = 8
"""Files of an upload that may come at once: each connection has some 256 KiB in memory while its file waits."""
KEPT_S = 3600
"""An upload is kept so long after its links have expired: its files may just have come."""
DAMAGED_KEPT_S = 24 * 3600
"""An upload whose record cannot be read is kept so long after its directory was changed."""
_ID = re.compile(r"[0-9a-f]{32}")
_ABOUT = "upload.json"
_ADAPTER_ALONE = ": send the tensors of the adapter alone (PEFT: save_pretrained(..., save_embedding_layers=False))"
_WRITTEN_BYTES = 1 << 20
"""Bytes that are written at once, by a thread."""


class Upload(BaseModel):
    """An upload that has been started."""

    model_config = ConfigDict(frozen=True)

    upload_id: str
    owner: str
    base_model: str
    lora_config: LoraConfig
    project_id: str | None
    max_bytes: int
    """Largest `adapter_model.safetensors`."""
    max_header_bytes: int
    """Largest header of that file."""
    expires: int
    """End of its links, in Unix seconds."""
    is_finished: bool = False
    """True once its weights are saved."""
    refused_at: float | None = None
    """Time in Unix seconds at which its files were refused; None once another file has come."""


class UploadFolder:
    """Reads and writes uploads. Calls for an upload do not overlap, apart from the files that come."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir.resolve() / "uploads"
        self._coming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num_coming: Counter[str] = Counter()
        """Files that come or wait until another has come, by upload."""
        self._damaged: set[str] = set()
        """Uploads whose records cannot be read, each named once in the log."""

    def path(self, upload_id: str) -> Path:
        """Return the directory of an upload's files. Raises UnknownUpload for what is no id."""
        if _ID.fullmatch(upload_id) is None:
            raise UnknownUpload(f"{upload_id!r} is no upload_id, which has 32 hexadecimal digits")
        return self._root / upload_id

    def find(self, upload_id: str) -> Upload | None:
        """Return an upload, whoever owns it; None if there is none, or if its record is damaged."""
        about = self.path(upload_id) / _ABOUT
        try:
            return Upload.model_validate_json(about.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:  # must not stop the uploads of others
            if upload_id not in self._damaged:
                self._damaged.add(upload_id)
                log.warning("%s cannot be read, so this upload is unknown: %s", about, shorten(str(error)))
            return None

    def require(self, upload_id: str, owner: str | None = None) -> Upload:
        """Return an upload, of this owner if given. Raises UnknownUpload."""
        upload = self.find(upload_id)
        if upload is None or owner not in (None, upload.owner):
            raise UnknownUpload(f"no upload has the id {upload_id!r}; one is kept for {KEPT_S} s after its links end")
        return upload

    def all(self) -> list[Upload]:
        """Return all uploads that are kept."""
        ids = [path.name for path in self._root.glob("*") if _ID.fullmatch(path.name)]
        return [upload for upload in map(self.find, ids) if upload is not None]

    def open_of(self, owner: str, now: float) -> list[Upload]:
        """Return the uploads of an owner that are not finished, and have files or may still get them."""
        mine = [upload for upload in self.all() if upload.owner == owner and not upload.is_finished]
        return [upload for upload in mine if upload.expires > now or self._has_files(upload.upload_id)]

    async def held_bytes(self, owner: str) -> int:
        """Return the bytes of the files that an owner's uploads have or may still get."""
        return sum(upload.max_bytes for upload in await asyncio.to_thread(self.open_of, owner, time.time()))

    def _has_files(self, upload_id: str) -> bool:
        return any((self.path(upload_id) / name).exists() for name in FILES)

    def put(self, upload: Upload) -> None:
        """Record an upload, or what has become of it. Raises DiskFull."""
        directory = self.path(upload.upload_id)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(directory / _ABOUT, upload.model_dump_json().encode())
        except OSError as error:
            raise _not_written(error) from None

    async def receive(self, upload: Upload, name: str, parts: AsyncIterator[bytes]) -> int:
        """Write or replace a file, which is there whole or not at all, and return its bytes.

        Raises BodyTooLarge, Busy, DiskFull, UnknownUpload.
        """
        upload_id, limit = upload.upload_id, CONFIG_BYTES if name == ADAPTER_CONFIG_FILE else upload.max_bytes
        if self._num_coming[upload_id] >= COMING:
            raise Busy(f"{COMING} files of the upload {upload_id} come already, in turn; send this one later")
        self._num_coming[upload_id] += 1
        try:
            async with self.lock_of(upload_id):
                upload = self.require(upload_id)  # it may have been deleted, or refused, meanwhile
                if upload.refused_at is not None:
                    self.put(upload.model_copy(update={"refused_at": None}))
                with write_aside(self.path(upload_id) / name, durable=False) as aside:
                    return await _write(aside, name, parts, limit)
        except OSError as error:
            raise _not_written(error) from None
        finally:
            self._num_coming[upload_id] -= 1
            if not self._num_coming[upload_id]:
                del self._num_coming[upload_id]

    async def release_refused(self, uploads: list[Upload]) -> bool:
        """Delete the upload among these that was refused first, unless a file comes for it. Return whether it
        existed."""
        idle = (upload for upload in uploads if not self.lock_of(upload.upload_id).locked())
        refused = (upload for upload in idle if upload.refused_at is not None)
        first = min(refused, key=lambda upload: upload.refused_at or 0, default=None)
        if first is None:
            return False
        async with self.lock_of(first.upload_id):
            await asyncio.to_thread(shutil.rmtree, self.path(first.upload_id), ignore_errors=True)
        return True

    def lock_of(self, upload_id: str) -> asyncio.Lock:
        """Return the lock of an upload's files, which are received in succession."""
        return self._coming.setdefault(upload_id, asyncio.Lock())

    async def finish(self, upload: Upload) -> None:
        """Delete an upload's files. It stays known, so that a repeat gets the same answer."""
        for name in FILES:
            await asyncio.to_thread((self.path(upload.upload_id) / name).unlink, missing_ok=True)
        self.put(upload.model_copy(update={"is_finished": True}))

    async def delete_expired(self, now: float) -> None:
        """Delete the uploads whose links have ended long ago, unless files of them come or are read."""
        kept = await asyncio.to_thread(self.all)
        expired = [upload.upload_id for upload in kept if upload.expires + KEPT_S < now]
        for upload_id in expired + [name for name in tuple(self._damaged) if self._age_s(name, now) > DAMAGED_KEPT_S]:
            if self.lock_of(upload_id).locked():
                continue
            async with self.lock_of(upload_id):
                await asyncio.to_thread(shutil.rmtree, self.path(upload_id), ignore_errors=True)
            self._damaged.discard(upload_id)

    def _age_s(self, upload_id: str, now: float) -> float:
        directory = self.path(upload_id)
        return now - directory.stat().st_mtime if directory.exists() else math.inf


async def _write(path: Path, name: str, parts: AsyncIterator[bytes], limit: int) -> int:
    num_bytes, held = 0, bytearray()
    remedy = _ADAPTER_ALONE if name == ADAPTER_FILE else ""
    with path.open("wb") as file:
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > limit:
                raise BodyTooLarge(f"{name} is larger than {limit} bytes, the most that this upload may have{remedy}")
            held += part
            if len(held) >= _WRITTEN_BYTES:
                await asyncio.to_thread(file.write, held)
                held = bytearray()
        await asyncio.to_thread(file.write, held)
    return num_bytes


def _not_written(error: OSError) -> DiskFull:
    return DiskFull(f"the upload cannot be written: {error.strerror}")
