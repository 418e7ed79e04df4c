"""Submits of operations: the body is decoded to see that it is sound, and stored as it came.

A refused operation still uses up its number, which the scheduler then does not wait for.
"""

import base64
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Generic, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from api_schemas import ids, wire
from api_schemas.base import Request
from api_schemas.futures import UntypedFuture
from api_schemas.inputs import ImageChunk
from api_schemas.old_clients.forward import ForwardRequest
from api_schemas.training import MORE_OUTPUTS, OUTPUT_BYTES, ForwardBackwardRequest
from tinker_server.errors import BadRequest
from tinker_server.models.scheduler import Scheduler
from tinker_server.offload import LARGE, off_loop
from tinker_server.operations.table import OPERATIONS, OperationKind
from tinker_server.store.futures.records import ImagePlace, Operation
from tinker_server.web.asset_pointers import with_images
from tinker_server.web.deps import Caller, Server, Services
from tinker_server.web.gate import largest_body, require_quick_to_parse

R = TypeVar("R", bound=Request)
FORWARD = "forward"
MAX_TRACEPARENT = 128
"""Characters of the header; in its current version it has 55."""
SMALLEST_IMAGE_BYTES = 4096
"""Smaller images are not stored apart: that takes a few hundred bytes in the database."""


@dataclass(frozen=True)
class Submission(Generic[R]):
    """A request with the bytes it came as."""

    operation_kind: str
    request: R
    body: bytes
    content_type: str
    digest: str
    images: tuple[ImagePlace, ...] = ()
    traceparent: str = ""
    image_bytes: int = 0
    """Bytes of the pixels of a sample's images."""

    def with_request(self, request: R) -> "Submission[R]":
        """Replace request and body, but keep the digest of the original, so that its repeat is recognised."""
        body = request.model_dump_json(exclude_none=True).encode()
        images = _places(request, body, wire.JSON)
        return replace(self, request=request, body=body, content_type=wire.JSON, images=images)

    async def accept(self, scheduler: Scheduler, owner: str, lane: str, seq_id: int) -> UntypedFuture:
        """Queue the operation; return once it is stored durably."""
        operation = Operation(
            self.operation_kind,
            lane,
            seq_id,
            self.body,
            self.content_type,
            owner,
            self.digest,
            len(self.body),
            self.image_bytes,
            request=None if OPERATIONS[self.operation_kind].decoded_elsewhere else self.request,
            images=self.images,
            traceparent=self.traceparent,
            answer_bytes=_answer_bytes(self.request),
        )
        return UntypedFuture(request_id=await scheduler.submit(operation))


@dataclass(frozen=True)
class ModelQueue:
    """Accepts operations on a caller's own models, in open sessions."""

    server: Services
    caller: str

    async def accept(
        self, submission: Submission[R], model_id: str, seq_id: int, lane_suffix: str = ""
    ) -> UntypedFuture:
        """Queue an operation on a model. Raises UnknownModel, SessionFinished."""
        run = await self.server.runs.require(model_id, self.caller)
        await self.server.sessions.require_open(run.session_id, self.caller)
        return await submission.accept(self.server.scheduler, self.caller, model_id + lane_suffix, seq_id)

    async def accept_new(self, submission: Submission[R], session_id: str, model_seq_id: int) -> UntypedFuture:
        """Queue an operation that makes a model, as number 0 of its lane. Raises UnknownSession, SessionFinished, and
        Busy."""
        await self.server.sessions.require_open(session_id, self.caller)
        self.server.records.add(self.caller, len(submission.body))
        lane = ids.model_id(session_id, model_seq_id)
        return await submission.accept(self.server.scheduler, self.caller, lane, 0)

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


def body_of(operation_kind: str) -> Callable[..., Awaitable[Submission[Request]]]:
    """Return a dependency that reads the body of one kind of operation."""
    kind = OPERATIONS[operation_kind]

    async def read(http: HttpRequest, models: OwnModels) -> Submission[Request]:
        settings = models.server.settings
        content_type = _content_type(http, kind)
        pieces = [piece async for piece in http.stream()]
        # One long copy of a large body, during which Python lets other threads run.
        body: bytes = await off_loop(models.caller, sum(map(len, pieces)), b"".join, pieces)
        is_zstd = http.headers.get("content-encoding", "").strip().lower() == "zstd"
        limit = largest_body(http.url.path, settings.max_body_bytes)
        size_bytes = wire.decompressed_bytes(body, limit) if is_zstd else len(body)
        async with models.server.ledger.decoding(models.caller, size_bytes):
            if is_zstd:
                body = await off_loop(models.caller, len(body), wire.decompress, body, limit)
            try:
                request, digest, images = await off_loop(models.caller, len(body), _decode, kind, body, content_type)
            except (ValidationError, wire.MalformedBody) as error:
                numbered = await off_loop(models.caller, len(body), _number_of, body, content_type)
                if numbered is not None:
                    name = FORWARD if numbered.forward_only else operation_kind
                    await models.note_refusal(numbered.model_id, numbered.seq_id, name)
                if isinstance(error, ValidationError):
                    raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
                raise
        # An operation that leaves the gradient unchanged is a kind of its own, whichever route it came by.
        name = FORWARD if isinstance(request, ForwardBackwardRequest) and request.forward_only else operation_kind
        traceparent = http.headers.get("traceparent", "")[:MAX_TRACEPARENT]
        submission = Submission(name, request, body, content_type, digest, images, traceparent)
        try:
            with_files = await with_images(request, settings.image_addresses(), models.caller)
        except BadRequest:
            if isinstance(request, ForwardBackwardRequest | ForwardRequest):
                await models.note_refusal(request.model_id, request.seq_id, name)
            raise
        if with_files is None:
            return submission
        return await off_loop(models.caller, LARGE, submission.with_request, with_files)

    return read


def _decode(kind: OperationKind, body: bytes, content_type: str) -> tuple[Request, str, tuple[ImagePlace, ...]]:
    if content_type == wire.JSON:
        require_quick_to_parse(body)
    request = kind.decode(body, content_type)
    return request, kind.digest(body, content_type), _places(request, body, content_type)


def _places(request: Request, body: bytes, content_type: str) -> tuple[ImagePlace, ...]:
    if isinstance(request, ForwardBackwardRequest) and not request.forward_only:  # only these are kept in logs
        return image_places(body, content_type, request)
    return ()


def image_places(body: bytes, content_type: str, request: ForwardBackwardRequest) -> tuple[ImagePlace, ...]:
    """Return the positions of a body's images, in order, up to the first that clients encode or order otherwise."""
    places, at = [], 0
    for image in _images(request):
        data = image if content_type == wire.PROTOBUF else base64.b64encode(image)
        start = body.find(data, at)
        if start < 0:
            break
        at = start + len(data)
        places.append(ImagePlace(start, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(places)


def _answer_bytes(request: Request) -> int:
    """Return the bytes of the tensors that answer a batch: a body of a kilobyte may ask for a hundred megabytes."""
    if not isinstance(request, ForwardBackwardRequest):
        return 0
    loss_input = request.forward_backward_input
    targets = [datum.loss_fn_inputs.get("target_tokens") for datum in loss_input.data]
    num_targets = sum(target.size for target in targets if target is not None)
    return num_targets * OUTPUT_BYTES * (1 + len(MORE_OUTPUTS.get(loss_input.loss_fn, ())))


def _images(request: ForwardBackwardRequest) -> Iterator[bytes]:
    for datum in request.forward_backward_input.data:
        for chunk in datum.model_input.chunks:
            if isinstance(chunk, ImageChunk) and len(chunk.data) >= SMALLEST_IMAGE_BYTES:
                yield chunk.data


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
    """Return the number of a body that was refused, if it has one."""
    if content_type == wire.PROTOBUF:
        envelope = wire.envelope_of(body)
        return None if envelope is None else Numbered(**envelope._asdict())
    try:
        return Numbered.model_validate_json(body)
    except ValidationError:
        return None
