"""Routes that list, delete, publish, expire, copy, download and upload saved weights."""

import json
import time
from email.utils import formatdate
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Response
from fastapi.responses import RedirectResponse

from tinker_server.api_schemas.checkpoints import (
    TYPES,
    CheckpointCursor,
    CheckpointInfo,
    CheckpointsResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    SearchCheckpointsRequest,
    SearchCheckpointsResponse,
    SetTtlRequest,
    UploadFinishRequest,
    UploadFinishResponse,
    UploadStartRequest,
    UploadStartResponse,
    UploadUrl,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinker_server.api_schemas.listing import Cursor, from_unix
from tinker_server.api_schemas.old_clients.versions import takes_upload_headers, visible_kinds
from tinker_server.api_schemas.weights import Kind, TinkerPath, check_name
from tinker_server.auth.links import VALID_S
from tinker_server.errors import (
    BadRequest,
    Busy,
    DiskFull,
    LimitReached,
    ModelIdTaken,
    SessionFinished,
    UnknownBaseModel,
    UnknownCheckpoint,
    UnknownModel,
    UnknownSession,
    UnknownUpload,
    UploadFailed,
)
from tinker_server.store.catalog import Page
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.notes import LIST_BYTES
from tinker_server.store.records import Checkpoint
from tinker_server.store.uploads import FILES
from tinker_server.web.deps import (
    Audit,
    Caller,
    CatalogDep,
    Checkpoints,
    Server,
    ServerUrl,
)
from tinker_server.web.parameters import IdempotencyKey, LongPage, RunIdInPath
from tinker_server.web.refusals import Described, describe
from tinker_server.weights.saving import check_ttl

router = APIRouter()
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
OF_WEIGHTS = describe(BadRequest, UnknownCheckpoint, Busy)
MOVED: Described = {302: {"description": "`Location` is a link to the tar.gz, valid for an hour."}}


async def _path(
    run_id: RunIdInPath,
    kind: Annotated[str, Path(description="Kind of weights: weights, sampler_weights or external_weights.")],
    name: Annotated[str, Path(description="Name of the saved weights within their run.")],
) -> TinkerPath:
    try:
        check_name(name)
        return TinkerPath.parse(f"tinker://{run_id}/{kind}/{name}")
    except ValueError as error:
        raise BadRequest(str(error)) from None


SdkVersion = Annotated[
    str | None,
    Header(
        alias="x-stainless-package-version",
        description="Version of the SDK: before 0.28 it accepts no weights of type `external`, before 0.40 no links of"
        " uploads with headers.",
    ),
]


async def _kinds(sdk_version: SdkVersion = None) -> list[Kind]:
    return visible_kinds(sdk_version)


CheckpointPath = Annotated[TinkerPath, Depends(_path)]
ShownKinds = Annotated[list[Kind], Depends(_kinds)]


@router.get("/checkpoints", response_model_exclude_none=True)
async def list_checkpoints(page: LongPage, kinds: ShownKinds, catalog: CatalogDep) -> CheckpointsResponse:
    """List the saved weights of all runs, newest first."""
    rows, total = await catalog.checkpoints(page, kinds, time.time())
    return _make_page(rows, page, total)


@router.post("/checkpoints/search", response_model_exclude_none=True, responses=describe(BadRequest))
async def search_checkpoints(
    request: SearchCheckpointsRequest, checkpoints: Checkpoints, caller: Caller
) -> SearchCheckpointsResponse:
    """List the saved weights that match, newest first, a page at a time."""
    found = await checkpoints.search(request, caller, time.time())
    shown = found[: request.limit]
    while len(shown) > 1 and sum(len(json.dumps(row.user_metadata)) for row in shown) > LIST_BYTES:
        shown = shown[: len(shown) // 2]
    next_cursor = None
    if len(shown) < len(found):
        last = shown[-1]
        next_cursor = CheckpointCursor(
            last_created_at=from_unix(last.created_at), last_checkpoint_uuid=last.tinker_path
        )
    return SearchCheckpointsResponse(checkpoints=[checkpoint_info(row) for row in shown], next_cursor=next_cursor)


@router.get("/training_runs/{run_id}/checkpoints", response_model_exclude_none=True, responses=describe(UnknownModel))
async def list_checkpoints_of_run(
    run_id: RunIdInPath, page: LongPage, kinds: ShownKinds, catalog: CatalogDep
) -> CheckpointsResponse:
    """List a training run's saved weights, newest first."""
    await catalog.run(run_id, page.scope, time.time())
    rows, total = await catalog.checkpoints(page, kinds, time.time(), run_id)
    return _make_page(rows, page, total)


@router.post(f"{CHECKPOINT}/publish", status_code=204, responses=OF_WEIGHTS)
async def publish(path: CheckpointPath, checkpoints: Checkpoints, audit: Audit, caller: Caller) -> Response:
    """Let every client load the weights. Repeating it changes nothing."""
    audit.admit(caller)
    await checkpoints.set_public(path, True, caller, time.time())
    await _note(audit, caller, "checkpoint_published", path)
    return Response(status_code=204)


@router.delete(f"{CHECKPOINT}/publish", status_code=204, responses=OF_WEIGHTS)
async def unpublish(path: CheckpointPath, checkpoints: Checkpoints, audit: Audit, caller: Caller) -> Response:
    """Undo publish."""
    audit.admit(caller)
    await checkpoints.set_public(path, False, caller, time.time())
    await _note(audit, caller, "checkpoint_unpublished", path)
    return Response(status_code=204)


@router.put(f"{CHECKPOINT}/ttl", status_code=204, responses=OF_WEIGHTS)
async def set_ttl(
    path: CheckpointPath, request: SetTtlRequest, checkpoints: Checkpoints, audit: Audit, caller: Caller
) -> Response:
    """Set the seconds from now after which weights expire; null: never."""
    audit.admit(caller)
    check_ttl(request.ttl_seconds)
    now = time.time()
    await checkpoints.set_expiry(path, None if request.ttl_seconds is None else now + request.ttl_seconds, caller, now)
    await _note(audit, caller, "checkpoint_ttl_set", path, ttl_seconds=request.ttl_seconds)
    return Response(status_code=204)


@router.get(f"{CHECKPOINT}/external_weights_urls", responses=OF_WEIGHTS)
async def external_weights_urls(
    path: CheckpointPath, server: Server, url: ServerUrl, caller: Caller
) -> ExternalWeightsUrlsResponse:
    """Return signed URLs of the files of weights saved by save_weights_external."""
    server.audit.admit(caller)
    if path.kind != "external_weights":
        raise BadRequest(f"{path} cannot be downloaded file by file; only weights of save_weights_external can")
    checkpoint = await server.checkpoints.require_readable(path, {caller}, time.time())
    expires = int(time.time()) + VALID_S
    files = await server.storage.files(checkpoint.directory)
    await _note(server.audit, caller, "checkpoint_read", path, purpose="download")
    signed = {name: server.links.sign(f"files/{checkpoint.directory}/{name}", expires) for name in files}
    return ExternalWeightsUrlsResponse(
        urls={name: f"{url}/{link}" for name, link in signed.items()}, expires=from_unix(expires)
    )


@router.get(f"{CHECKPOINT}/archive", status_code=302, response_class=RedirectResponse, responses=OF_WEIGHTS | MOVED)
async def archive(path: CheckpointPath, server: Server, url: ServerUrl, caller: Caller) -> Response:
    """Redirect to the weights as a tar.gz, which clients before 0.36 download."""
    server.audit.admit(caller)
    checkpoint = await server.checkpoints.require_readable(path, {caller}, time.time())
    expires = int(time.time()) + VALID_S
    await _note(server.audit, caller, "checkpoint_read", path, purpose="download")
    link = server.links.sign(f"archives/{checkpoint.directory}", expires)
    return RedirectResponse(f"{url}/{link}", 302, {"Expires": formatdate(expires, usegmt=True)})


@router.delete(CHECKPOINT, status_code=204, responses=OF_WEIGHTS)
async def delete(
    path: CheckpointPath, server: Server, caller: Caller, x_idempotency_key: IdempotencyKey = None
) -> Response:
    """Delete the weights' record, then their files. Copies stay; sampling sessions that use the weights fail then.

    A retry with the same idempotency key changes nothing.
    """
    server.audit.admit(caller)
    directory = await server.checkpoints.delete(path, caller, x_idempotency_key)
    if directory is not None:
        await server.storage.delete(directory)
    server.futures.changes.note(caller)
    return Response(status_code=204)


@router.post("/weights_info", response_model_exclude_none=True, responses=OF_WEIGHTS)
async def weights_info(request: WeightsInfoRequest, checkpoints: Checkpoints, caller: Caller) -> WeightsInfoResponse:
    """Return the base model and the trained modules of saved weights."""
    row = await checkpoints.require_readable(parse_path(request.tinker_path), {caller}, time.time())
    return WeightsInfoResponse(
        base_model=row.base_model,
        is_lora=not row.trainable.full,
        lora_rank=row.trainable.lora_rank,
        train_unembed=row.trainable.train_unembed,
        train_mlp=row.trainable.train_mlp,
        train_attn=row.trainable.train_attn,
    )


@router.post(
    "/copy_weights",
    responses=describe(BadRequest, UnknownCheckpoint, ModelIdTaken, UnknownSession, SessionFinished, Busy),
)
async def copy_weights(
    request: CopyWeightsRequest,
    server: Server,
    caller: Caller,
    x_idempotency_key: IdempotencyKey = None,
    x_tinker_weights_access_token: Annotated[
        str | None, Header(description="An API key of the weights' owner; needed to read unpublished weights.")
    ] = None,
) -> CopyWeightsResponse:
    """Copy weights to a path of their own. A retry with the same idempotency key gets the first copy's path."""
    server.audit.admit(caller)
    readers = server.keys.readers(caller, x_tinker_weights_access_token or request.weights_access_token)
    path = await server.copying.copy(request, x_idempotency_key, caller, readers)
    await _note(server.audit, caller, "checkpoint_copied", path, source_path=request.source_path)
    return CopyWeightsResponse(tinker_path=str(path))


@router.post("/external_weights_upload_start", responses=describe(BadRequest, LimitReached, UnknownBaseModel))
async def external_weights_upload_start(  # noqa: PLR0913 - three are headers
    request: UploadStartRequest,
    server: Server,
    url: ServerUrl,
    caller: Caller,
    sdk_version: SdkVersion = None,
    x_idempotency_key: IdempotencyKey = None,
) -> UploadStartResponse:
    """Start the upload of an adapter: return a signed link for each of its files, to which a plain PUT sends it."""
    upload = await server.uploads.start(request, x_idempotency_key, caller)
    links = {name: server.links.sign(f"uploads/{upload.upload_id}/{name}", upload.expires) for name in FILES}
    plain = {name: f"{url}/{link}" for name, link in links.items()}
    with_headers = {name: UploadUrl(url=url) for name, url in plain.items()}
    return UploadStartResponse(
        upload_id=upload.upload_id,
        urls=dict(with_headers if takes_upload_headers(sdk_version) else plain),
        expires=from_unix(upload.expires),
    )


@router.post(
    "/external_weights_upload_finish",
    responses=describe(BadRequest, LimitReached, UnknownBaseModel, UnknownUpload, UploadFailed, Busy, DiskFull),
)
async def external_weights_upload_finish(
    request: UploadFinishRequest, server: Server, caller: Caller
) -> UploadFinishResponse:
    """Check the adapter that was uploaded, and save it. It can be sampled from, and trained on without an optimizer.

    A repeat waits for the first request, and gets its path.
    """
    server.audit.admit(caller)
    path = await server.uploads.finish(request.upload_id, caller)
    await _note(server.audit, caller, "checkpoint_uploaded", path)
    return UploadFinishResponse(tinker_path=str(path))


def checkpoint_info(row: Checkpoint) -> CheckpointInfo:
    """Convert a checkpoint's row to its entry in a list."""
    kind = TinkerPath.parse(row.tinker_path).kind
    return CheckpointInfo(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=TYPES[kind],
        time=from_unix(row.created_at),
        tinker_path=row.tinker_path,
        base_model=row.base_model,
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=row.user_metadata,
        expires_at=None if row.expires_at is None else from_unix(row.expires_at),
    )


def _make_page(rows: list[Checkpoint], page: Page, total: int) -> CheckpointsResponse:
    cursor = Cursor(offset=page.offset, limit=page.limit, total_count=total)
    return CheckpointsResponse(checkpoints=[checkpoint_info(row) for row in rows], cursor=cursor)


async def _note(audit: Audit, owner: str, event: str, path: TinkerPath, **details: object) -> None:
    await audit.note(event, owner, model_id=path.run_id, tinker_path=str(path), **details)
