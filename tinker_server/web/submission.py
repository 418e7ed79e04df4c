"""Reading the body of an operation, which is parsed here and stored as it came.

A refused operation still uses up its number, so the scheduler is told not to wait for it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from api_schemas import wire
from api_schemas.base import Request
from api_schemas.futures import UntypedFuture
from api_schemas.training import ForwardBackwardRequest
from tinker_server.errors import BadRequest
from tinker_server.offload import off_loop
from tinker_server.scheduling.scheduler import Scheduler
from tinker_server.store import futures
from tinker_server.web.callers import Caller
from tinker_server.web.deps import AppSettings, SchedulerDep, Server, Services

R = TypeVar("R", bound=Request)
JSON = "application/json"


@dataclass(frozen=True)
class Submission(Generic[R]):
    """A request, and the bytes it came as."""

    request: R
    body: bytes
    content_type: str

    async def accept(self, scheduler: Scheduler, owner: str, kind: str, lane: str, seq_id: int) -> UntypedFuture:
        """Queue it; answered as soon as that is durable."""
        stored = futures.Work(kind, lane, seq_id, self.body, self.content_type, owner)
        return UntypedFuture(request_id=await scheduler.submit(stored, self.request))


@dataclass(frozen=True)
class ModelQueue:
    """Where operations on a caller's own models, in open sessions, are accepted."""

    server: Services
    caller: str

    async def accept(
        self, submission: Submission[R], kind: str, model_id: str, seq_id: int, lane_suffix: str = ""
    ) -> UntypedFuture:
        """Raises UnknownModel, SessionFinished."""
        run = await self.server.runs.require(model_id, self.caller)
        await self.server.sessions.require_open(run.session_id, self.caller)
        return await submission.accept(self.server.scheduler, self.caller, kind, model_id + lane_suffix, seq_id)

    async def accept_new(
        self, submission: Submission[R], kind: str, session_id: str, model_seq_id: int
    ) -> UntypedFuture:
        """An operation that makes a model: number 0 of its lane. Raises UnknownSession, SessionFinished."""
        await self.server.sessions.require_open(session_id, self.caller)
        lane = f"{session_id}:train:{model_seq_id}"
        return await submission.accept(self.server.scheduler, self.caller, kind, lane, 0)


async def _model_queue(server: Server, caller: Caller) -> ModelQueue:
    return ModelQueue(server, caller)


OwnModels = Annotated[ModelQueue, Depends(_model_queue)]


class Numbered(BaseModel):
    """The part of a training operation that places it in its model's lane."""

    model_id: str
    seq_id: int


def json_body(model: type[R]) -> Callable[..., Awaitable[Submission[R]]]:
    """A dependency that reads a JSON body."""

    async def read(http: HttpRequest, scheduler: SchedulerDep) -> Submission[R]:
        body = await http.body()
        try:
            request = await off_loop(len(body), model.model_validate_json, body)
        except ValidationError as error:
            _refuse_json_number(body, scheduler)
            raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
        return Submission(request, body, JSON)

    return read


_forward_backward_json = json_body(ForwardBackwardRequest)


async def forward_backward_body(
    http: HttpRequest, scheduler: SchedulerDep, settings: AppSettings
) -> Submission[ForwardBackwardRequest]:
    """A dependency that reads a protobuf body, zstd-compressed or not, or the JSON of clients before 0.25."""
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == JSON:
        return await _forward_backward_json(http, scheduler)
    if content_type != wire.PROTOBUF:
        raise BadRequest(
            f"forward_backward takes {wire.PROTOBUF} or {JSON}, not {content_type or 'a body without a type'}"
        )
    body = await http.body()
    encoding = http.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        body = await off_loop(len(body), wire.decompress, body, settings.max_body_bytes)
    elif encoding != "identity":
        raise BadRequest(f"Content-Encoding {encoding!r} is not supported; zstd is, or none")
    try:
        request = await off_loop(len(body), wire.decode_forward_backward, body)
    except wire.MalformedBody:
        number = await off_loop(len(body), wire.number_of, body)
        if number is not None:
            scheduler.refuse_number(*number)
        raise
    return Submission(request, body, wire.PROTOBUF)


def _refuse_json_number(body: bytes, scheduler: Scheduler) -> None:
    try:
        number = Numbered.model_validate_json(body)
    except ValidationError:
        return
    scheduler.refuse_number(number.model_id, number.seq_id)
