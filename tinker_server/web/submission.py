"""Submits of operations: the body is decoded to see that it is sound, and stored as it came.

A refused operation still uses up its number, which the scheduler then does not wait for.
"""

import base64
import hashlib
import time
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from tinker_server.api_schemas import wire
from tinker_server.api_schemas.base import Request
from tinker_server.api_schemas.futures import UntypedFuture
from tinker_server.api_schemas.inputs import ImageChunk
from tinker_server.api_schemas.old_clients.forward import ForwardRequest
from tinker_server.api_schemas.training import MORE_OUTPUTS, OUTPUT_BYTES, ForwardBackwardRequest
from tinker_server.errors import BadRequest
from tinker_server.offload import LARGE, off_loop
from tinker_server.operations.table import OPERATIONS, OperationKind
from tinker_server.store.futures.records import UNLOAD_SUFFIX, ImagePlace, Operation
from tinker_server.web.asset_pointers import with_images
from tinker_server.web.deps import Caller, Server, Services
from tinker_server.web.gate import largest_body, require_quick_to_parse

FORWARD = "forward"
MAX_TRACEPARENT = 128
"""Characters of the header; in its current version it has 55."""
SMALLEST_IMAGE_BYTES = 4096
"""Smaller images are not stored apart: that takes a few hundred bytes in the database."""


@dataclass(frozen=True)
class ModelQueue:
    """Accepts operations on a caller's own models, in open sessions."""

    server: Services
    caller: str

    async def accept(self, operation: Operation) -> UntypedFuture:
        """Queue an operation on a model, durably on return. Raises UnknownModel, SessionFinished."""
        model_id = operation.lane
        if operation.operation_kind == "unload_model":
            model_id = model_id.removesuffix(UNLOAD_SUFFIX)
        run = await self.server.runs.require(model_id, self.caller)
        await self.server.sessions.require(run.session_id, self.caller, must_be_open=True)
        return UntypedFuture(request_id=await self.server.scheduler.actor(model_id).accept(operation))

    async def accept_new(self, operation: Operation, session_id: str) -> UntypedFuture:
        """Queue an operation that makes a model. Raises UnknownSession, SessionFinished, and Busy."""
        await self.server.sessions.require(session_id, self.caller, must_be_open=True)
        self.server.records.add(self.caller, operation.size_bytes)
        return UntypedFuture(request_id=await self.server.scheduler.actor(operation.lane).accept(operation))

    async def note_refusal(self, model_id: str, seq_id: int, operation_kind: str) -> None:
        """Note that an operation was refused before it had a future, unless the model is another owner's."""
        run = await self.server.runs.find(model_id)
        if run is not None and run.owner == self.caller:
            self.server.scheduler.refuse_number(model_id, seq_id, operation_kind)


async def _model_queue(server: Server, caller: Caller) -> ModelQueue:
    return ModelQueue(server, caller)


OwnModels = Annotated[ModelQueue, Depends(_model_queue)]


class Numbered(BaseModel):
    """The fields of a training operation that give its place in its model's lane."""

    model_id: str
    seq_id: int
    forward_only: bool = False


@dataclass(frozen=True)
class Body:
    """Reads the body of a kind of operation, as a dependency of a route."""

    operation_kind: str

    async def __call__(self, http: HttpRequest, models: OwnModels) -> Operation:
        """Return the operation. A body that is refused uses up its number."""
        kind, settings, caller = OPERATIONS[self.operation_kind], models.server.settings, models.caller
        content_type = _content_type(http, kind)
        pieces = [piece async for piece in http.stream()]
        # A long copy of a large body, during which Python lets other threads run.
        body: bytes = await off_loop(caller, sum(map(len, pieces)), b"".join, pieces)
        is_zstd = http.headers.get("content-encoding", "").strip().lower() == "zstd"
        size_bytes = len(body)
        if is_zstd:
            limit = largest_body(http.url.path, settings.max_body_bytes)
            size_bytes = wire.frame_content_bytes(body, limit)
        async with models.server.ledger.decoding(caller, size_bytes):
            if is_zstd:
                body = await off_loop(caller, len(body), wire.decompress, body, limit)
            try:
                request, operation = await off_loop(caller, len(body), _decode, kind, body, content_type, caller)
            except (ValidationError, wire.MalformedBody) as error:
                numbered = None
                if kind.name != "sample":  # samples have no order
                    numbered = await off_loop(caller, len(body), _number_of, body, content_type)
                if numbered is not None:
                    name = FORWARD if numbered.forward_only else kind.name
                    await models.note_refusal(numbered.model_id, numbered.seq_id, name)
                if isinstance(error, ValidationError):
                    raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
                raise
        try:
            with_files = await with_images(request, settings.image_addresses(), caller)
        except BadRequest:
            if isinstance(request, ForwardBackwardRequest | ForwardRequest):
                await models.note_refusal(request.model_id, request.seq_id, operation.operation_kind)
            raise
        if with_files is not None:
            operation = await off_loop(caller, LARGE, with_request, operation, with_files)
        return replace(operation, traceparent=http.headers.get("traceparent", "")[:MAX_TRACEPARENT])


def _decode(kind: OperationKind, body: bytes, content_type: str, owner: str) -> tuple[Request, Operation]:
    if content_type == wire.JSON:
        require_quick_to_parse(body)
    request = kind.decode(body, content_type)
    # An operation that leaves the gradient unchanged is a kind of its own, whichever route it came by.
    batch = request if isinstance(request, ForwardBackwardRequest) else None
    name = FORWARD if batch is not None and batch.forward_only else kind.name
    operation = Operation(
        name,
        *kind.place(request),
        body,
        content_type,
        owner,
        kind.digest(body, content_type),
        len(body),
        answer_bytes=0 if batch is None else answer_bytes(batch),
        request=None if kind.decoded_elsewhere else request,
        images=() if batch is None else image_places(body, content_type, batch),
    )
    return request, operation


def with_request(operation: Operation, request: Request) -> Operation:
    """Replace the request and body, but keep the digest of the original, so that its repeat is recognised."""
    body = request.model_dump_json(exclude_none=True).encode()
    return replace(
        operation,
        body=body,
        content_type=wire.JSON,
        size_bytes=len(body),
        accepted_at=time.time(),  # the images may have taken long
        request=None if OPERATIONS[operation.operation_kind].decoded_elsewhere else request,
        images=image_places(body, wire.JSON, request) if isinstance(request, ForwardBackwardRequest) else (),
    )


def image_places(body: bytes, content_type: str, request: ForwardBackwardRequest) -> tuple[ImagePlace, ...]:
    """Return the positions of a body's images, in order, up to the first that clients encode or order otherwise."""
    if request.forward_only:  # it is not kept in a log
        return ()
    places = list[ImagePlace]()
    at = 0
    for datum in request.forward_backward_input.data:
        for chunk in datum.model_input.chunks:
            if not isinstance(chunk, ImageChunk) or len(chunk.data) < SMALLEST_IMAGE_BYTES:
                continue
            data = chunk.data if content_type == wire.PROTOBUF else base64.b64encode(chunk.data)
            start = body.find(data[:SMALLEST_IMAGE_BYTES], at)  # a search for all of it would hold up other threads
            if start < 0 or not body.startswith(data, start):
                return tuple(places)
            at = start + len(data)
            places.append(ImagePlace(start, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(places)


def answer_bytes(request: ForwardBackwardRequest) -> int:
    """Return the bytes of the tensors that answer a batch: a body of a kilobyte may ask for a hundred megabytes."""
    loss_input = request.forward_backward_input
    targets = [datum.loss_fn_inputs.get("target_tokens") for datum in loss_input.data]
    num_targets = sum(target.size for target in targets if target is not None)
    return num_targets * OUTPUT_BYTES * (1 + len(MORE_OUTPUTS.get(loss_input.loss_fn, ())))


def _content_type(http: HttpRequest, kind: OperationKind) -> str:
    """Return JSON, whatever the header says, unless this kind of operation may also come as protobuf."""
    if kind.protobuf_request is None:
        return wire.JSON
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (wire.JSON, wire.PROTOBUF):
        given = content_type or "a body without a type"
        raise BadRequest(f"{kind.name} takes {wire.PROTOBUF} or {wire.JSON}, not {given}")
    return content_type


def _number_of(body: bytes, content_type: str) -> Numbered | None:
    """Return the number of a body that was refused, if it has a number."""
    if content_type == wire.PROTOBUF:
        envelope = wire.envelope_of(body)
        return None if envelope is None else Numbered(**envelope._asdict())
    try:
        return Numbered.model_validate_json(body)
    except ValidationError:
        return None
