"""Errors of the server, each with its HTTP status and its category in a failed future.

TinkerServerError
├── Unauthenticated (InvalidToken) 401, BadRequest (BadField) 400, LinkRefused 403, SequenceConflict 400
├── ModelIdTaken 400, OtherBaseModel 400, BodyTooLarge 413
├── UnknownSession, UnknownModel, UnknownBaseModel, UnknownSampler, UnknownCheckpoint, UnknownUpload,
│   UnknownFuture 404
├── ScopeRefused 403, AdministratorsOnly 403: the key is right, and may not do this
├── ForeignHost 403, KeysReadOnly 403, SessionFinished 403, HeartbeatEnded 410, ResultExpired 410
├── Unsupported 400: only in futures, so that a permanent refusal does not use up the model's sequence number
├── LostModel 500: only in futures
├── LimitReached 400: for what an owner holds that lasts; deleting some of it makes room
├── ResultTooLarge, GradientIncomplete 400: only in futures
├── Busy 429: an owner has too much in flight; its clients wait and retry
├── Cancelled 410: only in futures of samples
├── ChatFailed 500: only from the chat endpoints; UploadFailed 500
└── DatabaseUnavailable (DiskFull, Superseded), KeysUnreadable, StillStarting, ShuttingDown 503

The SDK retries 408, 409, 429 and 5xx for five minutes, so no permanent refusal has one of these.
"""

import errno
import logging
import re
import socket

from tinker_server.api_schemas.futures import FutureFailed
from tinker_server.api_schemas.wire import MalformedBody
from tinker_server.backends.protocol import BackendFailed, InvalidInput, ModelLost

log = logging.getLogger(__name__)
MAX_CHARACTERS = 4000
"""Longest text of an error. It may quote what a client sent, and is encoded, stored and logged between other work."""
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s'\"/:,;()]+/)*[^\s'\"/:,;()]+")
"""A path on this machine, which clients must not see. A tinker:// path does not match."""


class StartFailed(Exception):
    """The server or a command cannot start. The text is one line for the operator."""


class StartDelayed(StartFailed):
    """The same start may succeed later: a database, a disk or another server is in its way for now."""


_PASSING = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EAGAIN,
)
"""Errors that pass by themselves, or once the operator has made room. Those of connections have classes."""


def start_failure(text: str, error: BaseException | None) -> StartFailed:
    """Return the failure of a start: StartDelayed where the operating system's error may pass."""
    passes = isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError)
        and (error.errno == socket.EAI_AGAIN if isinstance(error, socket.gaierror) else error.errno in _PASSING)
    )
    return StartDelayed(text) if passes else StartFailed(text)


class TinkerServerError(Exception):
    """The request or operation failed."""

    status: int = 500
    category: str = "server"


class Unauthenticated(TinkerServerError):
    """The request has no API key, or an unknown one."""

    status, category = 401, "user"


class InvalidToken(Unauthenticated):
    """The request has a token that is not valid, or no longer. The SDK gets another for its key, and sends it again."""


class ScopeRefused(TinkerServerError):
    """The API key's scope does not include this request."""

    status, category = 403, "user"


class AdministratorsOnly(TinkerServerError):
    """Only a key with the role of an administrator may do this."""

    status, category = 403, "user"


class BadRequest(TinkerServerError):
    """The request is malformed, or asks for something that this server lacks."""

    status, category = 400, "user"


class BadField(BadRequest):
    """A field of a chat request is invalid or not supported."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class SequenceConflict(BadRequest):
    """A different operation was sent with this sequence number before."""


class ModelIdTaken(BadRequest):
    """The id (session_id, model_seq_id) already belongs to a model or a copy of weights."""


class Unsupported(BadRequest):
    """The server does not support the operation with these arguments."""


class LimitReached(BadRequest):
    """The owner holds as many models, or as many bytes on the disk, as an owner may."""


class ResultTooLarge(BadRequest):
    """The operation's result is larger than can be stored."""


class GradientIncomplete(BadRequest):
    """A part of the accumulated gradient is missing, so it is not applied."""


class BodyTooLarge(TinkerServerError):
    """The request's body is larger than the server accepts."""

    status, category = 413, "user"


class UnknownSession(TinkerServerError):
    """No session has this id."""

    status, category = 404, "user"


class UnknownModel(TinkerServerError):
    """No model has this id."""

    status, category = 404, "user"


class UnknownBaseModel(TinkerServerError):
    """The server does not serve this base model."""

    status, category = 404, "user"


class OtherBaseModel(BadRequest):
    """The requested weights were made on a different base than the one now served under its name."""


class UnknownSampler(TinkerServerError):
    """No sampling session has this id."""

    status, category = 404, "user"


class UnknownCheckpoint(TinkerServerError):
    """The tinker:// path names no weights of this server."""

    status, category = 404, "user"


class UnknownUpload(TinkerServerError):
    """No upload has this id."""

    status, category = 404, "user"


class UnknownFuture(TinkerServerError):
    """No operation has this request_id."""

    status, category = 404, "user"


class LinkRefused(TinkerServerError):
    """The signed link has expired, or was changed."""

    status, category = 403, "user"


class ForeignHost(TinkerServerError):
    """The request has a foreign host name, while the server has no keys."""

    status, category = 403, "user"


class KeysReadOnly(TinkerServerError):
    """The server may not write the keys file."""

    status, category = 403, "user"


class KeysUnreadable(TinkerServerError):
    """The server cannot read its API keys; the same request succeeds once it can."""

    status = 503


class SessionFinished(TinkerServerError):
    """The session is finished and accepts no new work."""

    status, category = 403, "user"


class HeartbeatEnded(TinkerServerError):
    """The session is finished, so heartbeats can stop."""

    status, category = 410, "user"


class ResultExpired(TinkerServerError):
    """The result is past its retention time and was deleted."""

    status, category = 410, "server"


class LostModel(TinkerServerError):
    """The model is no longer in memory, since the process that held it ended."""


class Busy(TinkerServerError):
    """Too much is in flight; the same request succeeds later."""

    status, category = 429, "server"


class Cancelled(TinkerServerError):
    """The client cancelled the operation."""

    status, category = 410, "user"


class ChatFailed(TinkerServerError):
    """The sampler could not answer a chat; the request is not at fault."""


class UploadFailed(TinkerServerError):
    """Trainer or sampler could not read the uploaded adapter; the request is not at fault."""


class DatabaseUnavailable(TinkerServerError):
    """The database does not answer; the same request succeeds once it does."""

    status = 503


class DiskFull(DatabaseUnavailable):
    """The data directory is full or cannot be written."""


class Superseded(DatabaseUnavailable):
    """Another server has taken the database's lease; this one stops and writes nothing more."""


class StillStarting(TinkerServerError):
    """The server is not ready yet; the same request succeeds once it is."""

    status = 503


class ShuttingDown(TinkerServerError):
    """The server is stopping; the same request succeeds once it is back."""

    status = 503


def failure(error: Exception) -> FutureFailed:
    """Convert an error to the result of a failed future.

    An unforeseen error is logged with its traceback. The client sees only its type, since its text may hold paths, SQL
    or another owner's data.
    """
    match error:
        case InvalidInput() | MalformedBody():
            return FutureFailed(error=shorten(str(error)), category="user")
        case TinkerServerError():
            return FutureFailed(error=shorten(str(error)), category="user" if error.category == "user" else "server")
        case ModelLost() | BackendFailed():
            log.error("an operation failed: %s", shorten(str(error)))
            return FutureFailed(error=_PATH.sub("[path]", shorten(str(error))), category="server")
        case _:
            log.error("an operation failed unexpectedly", exc_info=error)
            text = f"the operation failed unexpectedly ({type(error).__name__}); the server's log has the details"
            return FutureFailed(error=text, category="server")


def shorten(text: str) -> str:
    """Return the beginning of an error's text, and the number of the characters that are left out."""
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}... and {left_out} more characters"
