"""Adapters of other programs, or of other servers, as saved weights of this server.

A client starts an upload, puts two files to signed links, and finishes it. The trainer reads the adapter into a model
of the given shape and saves it. So the weights that are recorded are its own: every tensor was found and is finite, and
the engine scores a test text as the trainer does.
"""

import asyncio
import hashlib
import struct
import time
import uuid
from collections import Counter
from pathlib import Path

from tinker_server.api_schemas import ids
from tinker_server.api_schemas.checkpoints import UploadStartRequest
from tinker_server.api_schemas.training import Trainable
from tinker_server.api_schemas.weights import TinkerPath
from tinker_server.auth.links import VALID_S
from tinker_server.backends.protocol import (
    ADAPTER_FILE,
    BackendFailed,
    BaseModelInfo,
    InvalidInput,
    ModelLost,
    ProcessDied,
)
from tinker_server.errors import BadRequest, DiskFull, LimitReached, UploadFailed, failure
from tinker_server.offload import on_files
from tinker_server.store.records import Checkpoint
from tinker_server.store.runs import RunStore
from tinker_server.store.sessions import SessionStore
from tinker_server.store.uploads import FILES, Upload, UploadFolder
from tinker_server.weights import export
from tinker_server.weights.base_names import require_same_base
from tinker_server.weights.copying import make_finished_session, run_of_weights
from tinker_server.weights.lookup import WeightStores

NAME = "uploaded"
"""Name of the saved weights in the training run that each upload gets."""
UPLOADS_OF_OWNER = 4
"""Uploads of an owner whose files are still to come, or there."""
DEATHS = 2
"""Ends of the trainer under an upload, after which it is refused."""
_TENSOR_BYTES, _HEADER_BYTES = 512, 64 << 10
"""Room in a file's header for each tensor, and for all else."""


class Uploads:
    """Starts uploads, and turns finished uploads into saved weights, each once however often a client asks."""

    def __init__(self, folder: UploadFolder, sessions: SessionStore, runs: RunStore, stores: WeightStores) -> None:
        self.folder = folder
        self._sessions = sessions
        self._runs = runs
        self._stores = stores
        self._finishing: dict[str, asyncio.Task[TinkerPath]] = {}
        self._deaths: Counter[str] = Counter()

    async def start(self, request: UploadStartRequest, idempotency_key: str | None, owner: str) -> Upload:
        """Start an upload, or return the upload that was started with the same key.

        Raises BadRequest, LimitReached, UnknownBaseModel, DiskFull.
        """
        info = self._stores.bases.base(request.base_model).info
        upload = _new(request, info, idempotency_key, owner)
        async with self._stores.holdings.asking[owner]:
            if (first := self.folder.find(upload.upload_id)) is not None:
                return first
            unfinished = await asyncio.to_thread(self.folder.open_of, owner, time.time())
            if len(unfinished) >= UPLOADS_OF_OWNER and not await self.folder.release_refused(unfinished):
                raise LimitReached(
                    f"{len(unfinished)} uploads of {owner} are not finished; {UPLOADS_OF_OWNER} are allowed: finish"
                    " some, or wait until their links have expired"
                )
            await self._stores.holdings.require_room(owner, upload.max_bytes)
            self._stores.storage.lease.require()
            self.folder.put(upload)
        return upload

    def require_open(self, upload_id: str, name: str) -> Upload:
        """Return an upload that takes files. Raises UnknownUpload, BadRequest."""
        upload = self.folder.require(upload_id)
        if name not in FILES:
            raise BadRequest(f"{name!r} is no file of an upload; {' and '.join(FILES)} are")
        if upload.is_finished or upload_id in self._finishing:
            raise BadRequest(f"the upload {upload_id} is finished, or being finished, and takes no more files")
        self._stores.storage.lease.require()
        return upload

    async def finish(self, upload_id: str, owner: str) -> TinkerPath:
        """Turn an upload into saved weights and return their path; a repeat gets the same.

        Raises UnknownUpload, BadRequest, LimitReached, InvalidInput, UploadFailed, DiskFull.
        """
        upload = self.folder.require(upload_id, owner)
        if upload_id not in self._finishing:
            finishing = asyncio.create_task(self._finish(upload), name=f"finishing upload {upload_id}")
            finishing.add_done_callback(lambda _: self._finishing.pop(upload_id))
            self._finishing[upload_id] = finishing
        return await asyncio.shield(self._finishing[upload_id])

    def close(self) -> None:
        """Finish no more uploads. Their files stay, for a client that asks again."""
        for finishing in self._finishing.values():
            finishing.cancel()

    async def _finish(self, upload: Upload) -> TinkerPath:
        session_id = await make_finished_session(
            self._sessions, "external_weights_upload", upload.project_id, upload.upload_id, upload.owner
        )
        path = TinkerPath(ids.model_id(session_id, 0), "external_weights", NAME)
        if upload.is_finished or await self._stores.checkpoints.find(path) is not None:
            return path
        directory = self.folder.path(upload.upload_id)
        async with self.folder.lock_of(upload.upload_id):  # a file may still come, which was begun before
            await on_files(upload.owner, _require_files, directory)
            try:
                await self._read(upload, directory, path, session_id)
            except (BadRequest, InvalidInput):
                self.folder.put(upload.model_copy(update={"refused_at": time.time()}))
                raise
            await self.folder.finish(upload)
        return path

    async def _read(self, upload: Upload, directory: Path, path: TinkerPath, session_id: str) -> None:
        """Check the files and save them as weights. Raises BadRequest, InvalidInput, UploadFailed, DiskFull."""
        await on_files(upload.owner, _check_header, directory, upload)
        await on_files(upload.owner, require_same_base, directory, self._names(upload.base_model))
        if self._deaths[upload.upload_id] >= DEATHS:
            raise BadRequest(f"the trainer ended {DEATHS} times while it read the upload {upload.upload_id}")
        try:
            await self._save(upload, directory, path, session_id)
        except (ModelLost, BackendFailed) as error:
            self._deaths[upload.upload_id] += isinstance(error, ModelLost | ProcessDied)
            raise UploadFailed(failure(error).error) from None
        except OSError as error:
            raise DiskFull(f"the uploaded weights cannot be written: {error.strerror}") from error

    def _names(self, base_model: str) -> list[str]:
        """Return a base's name, those of the same directory, and the directory or hub id."""
        served = self._stores.bases.served
        source = self._stores.bases.base(base_model).info.source
        return [base_model, *(name for name, base in served.items() if base.info.source == source), source]

    async def _save(self, upload: Upload, source: Path, path: TinkerPath, session_id: str) -> None:
        """Have the trainer read the adapter and save it, and record the weights with the run that they belong to."""
        stores, base, now = self._stores, self._stores.bases.base(upload.base_model), time.time()
        trainable = await on_files(upload.owner, _trainable, upload, source, base.info)
        run = run_of_weights(upload.owner, (session_id, 0), (base.info.name, base.info.fingerprint), trainable, now)
        async with stores.storage.writing(*path) as directory:
            target = stores.storage.path(directory)
            async with stores.holdings.model(run.owner, run.model_id):
                model = await base.trainer.create_model(run.model_id, run.trainable, run.owner)
                try:
                    await base.trainer.load_state(model, source, with_optimizer=False)
                    await base.trainer.save(model, target / export.PEFT, "export")
                finally:
                    await base.trainer.delete_model(model)
            await on_files(run.owner, export.write_both_forms, target)
            async with stores.holdings.weights(run.owner, directory) as size_bytes:
                await stores.storage.flush(directory)
                await base.sampler.publish(target / export.PEFT, run.owner)
                await self._runs.add(run, Checkpoint.of_run(run, path, directory, size_bytes, now))


def _new(request: UploadStartRequest, info: BaseModelInfo, idempotency_key: str | None, owner: str) -> Upload:
    """Return the upload that a request starts. Raises BadRequest for an upload that could not be finished."""
    rank = request.lora_config.rank
    if not 1 <= rank <= info.max_lora_rank:
        raise BadRequest(
            f"lora_config.rank is {rank}; this server takes 1 to {info.max_lora_rank} (setting backend.max_lora_rank)"
        )
    key = uuid.uuid4().hex if idempotency_key is None else f"{owner}/{idempotency_key}"
    header_bytes = _HEADER_BYTES + 2 * info.adapter_matrices * _TENSOR_BYTES
    return Upload(
        upload_id=hashlib.sha256(key.encode()).hexdigest()[:32],
        owner=owner,
        base_model=request.base_model,
        lora_config=request.lora_config,
        project_id=request.destination_project_id,
        max_bytes=rank * info.adapter_bytes + header_bytes,
        max_header_bytes=header_bytes,
        expires=int(time.time()) + VALID_S,
    )


def _require_files(directory: Path) -> None:
    """Raise BadRequest if a file is missing."""
    if missing := [name for name in FILES if not (directory / name).exists()]:
        raise BadRequest(f"{' and '.join(missing)} did not come: put each file to its url before you finish the upload")


def _check_header(directory: Path, upload: Upload) -> None:
    """Raise BadRequest if the header of the tensors is longer than an adapter's. Looks at no tensor."""
    with (directory / ADAPTER_FILE).open("rb") as file:
        begin = file.read(8)
    if len(begin) < 8 or struct.unpack("<Q", begin)[0] > upload.max_header_bytes:
        raise BadRequest(
            f"{ADAPTER_FILE} is no safetensors file, or its header is longer than the {upload.max_header_bytes} bytes"
            " that an adapter of this base model needs"
        )


def _trainable(upload: Upload, source: Path, info: BaseModelInfo) -> Trainable:
    """Return the shape of the adapter. A vision tower is one that the file has: a client has no field for it. On a
    server that trains none, the tensors of a tower are refused by their names.

    Raises BadRequest.
    """
    lora = upload.lora_config
    try:
        train_vision = export.has_tower(source / ADAPTER_FILE)
        layout = export.layout_in(source / ADAPTER_FILE, lora.rank) or "own"
    except (ValueError, AttributeError, TypeError, RecursionError):  # whatever the header is in place of an object
        raise BadRequest(f"{ADAPTER_FILE} is no safetensors file: its header is no object of tensors") from None
    return Trainable(
        rank=lora.rank,
        seed=0,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        train_vision=train_vision and info.trains_vision,
        layout=layout,
    )
