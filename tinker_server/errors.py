"""Every refusal, with its HTTP status and its category in a failed future.

TinkerServerError
├── Unauthenticated 401, BadRequest (BadField) 400, LinkRefused 403, SequenceConflict 400, ModelIdTaken 400
├── OtherBaseModel 400, BodyTooLarge 413
├── UnknownSession, UnknownModel, UnknownBaseModel, UnknownSampler, UnknownCheckpoint, UnknownFuture  404
├── ForeignHost 403, KeysReadOnly 403, SessionFinished 403, HeartbeatEnded 410, ResultExpired 410
├── Unsupported 400: only in futures, where a lasting refusal must not cost the model a number
├── LostModel 500: only in futures
├── LimitReached 400: for what an owner holds that lasts; deleting some of it makes room
├── ResultTooLarge, GradientIncomplete 400: only in futures
├── Busy 429: for what an owner may have waiting at once; its clients wait and try again
├── Cancelled 410: only in futures of samples
├── ChatFailed 500: only of the chat endpoints
└── DatabaseUnavailable (DiskFull, Superseded), ShuttingDown 503

The SDK retries 408, 409, 429 and 5xx for five minutes, so no lasting refusal has one of these.
"""

import logging
import re

from api_schemas.futures import FutureFailed
from api_schemas.wire import MalformedBody
from backends.protocol import BackendFailed, InvalidInput, ModelLost

log = logging.getLogger(__name__)
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s'\"/:,;()]+/)*[^\s'\"/:,;()]+")
"""A path of this machine, which is nobody else's business. A tinker:// path is none."""


class StartFailed(Exception):
    """The server cannot start. The text is one line for the operator."""


class TinkerServerError(Exception):
    """The server could not do it."""

    status: int = 500
    category: str = "server"


class Unauthenticated(TinkerServerError):
    """The request has no API key, or one that is not known."""

    status, category = 401, "user"


class BadRequest(TinkerServerError):
    """The request is malformed, or asks for something this server does not have."""

    status, category = 400, "user"


class BadField(BadRequest):
    """A field of a chat request is not what it should be, or is not supported."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class SequenceConflict(BadRequest):
    """Another operation was sent under this number before."""


class ModelIdTaken(BadRequest):
    """The place (session_id, model_seq_id) has a model or a copy of weights already."""


class Unsupported(BadRequest):
    """The operation cannot be done as it was asked."""


class LimitReached(BadRequest):
    """The owner holds as many models, or as many bytes on the disk, as one owner may."""


class ResultTooLarge(BadRequest):
    """The operation's result is larger than can be stored."""


class GradientIncomplete(BadRequest):
    """A part of the gradient is missing, so it is not applied."""


class BodyTooLarge(TinkerServerError):
    """The request's body is larger than the server takes."""

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
    """What is asked for was made on other weights than those served under the base model's name now."""


class UnknownSampler(TinkerServerError):
    """No sampling session has this id."""

    status, category = 404, "user"


class UnknownCheckpoint(TinkerServerError):
    """The tinker:// path names no weights held here."""

    status, category = 404, "user"


class UnknownFuture(TinkerServerError):
    """No operation has this request_id."""

    status, category = 404, "user"


class LinkRefused(TinkerServerError):
    """The signed link has expired, or was changed."""

    status, category = 403, "user"


class ForeignHost(TinkerServerError):
    """The request came under a foreign name while the server has no keys."""

    status, category = 403, "user"


class KeysReadOnly(TinkerServerError):
    """The keys file is not the server's to write."""

    status, category = 403, "user"


class SessionFinished(TinkerServerError):
    """The session was finished; it takes no new work."""

    status, category = 403, "user"


class HeartbeatEnded(TinkerServerError):
    """The session was finished; heartbeats can stop."""

    status, category = 410, "user"


class ResultExpired(TinkerServerError):
    """The result was kept for its time and is gone."""

    status, category = 410, "server"


class LostModel(TinkerServerError):
    """The model is no longer in memory: the process that held it has ended."""


class Busy(TinkerServerError):
    """Too much is in flight; the same request succeeds a little later."""

    status, category = 429, "server"


class Cancelled(TinkerServerError):
    """The client cancelled the operation."""

    status, category = 410, "user"


class ChatFailed(TinkerServerError):
    """The sampler could not answer a chat; the request was not at fault."""


class DatabaseUnavailable(TinkerServerError):
    """The database does not answer; the same request succeeds once it does."""

    status = 503


class DiskFull(DatabaseUnavailable):
    """The data directory has no room left, or cannot be written."""


class Superseded(DatabaseUnavailable):
    """Another server has taken the database; this one stops, and writes nothing more."""


class ShuttingDown(TinkerServerError):
    """The server is stopping; the same request succeeds once it is back."""

    status = 503


def failure(error: Exception) -> FutureFailed:
    """What a failed future says. An error nobody foresaw is logged with its traceback, and told by its type alone:
    its text may hold paths, SQL, or what is another's."""
    match error:
        case InvalidInput() | MalformedBody():
            return FutureFailed(error=str(error), category="user")
        case TinkerServerError():
            return FutureFailed(error=str(error), category="user" if error.category == "user" else "server")
        case ModelLost() | BackendFailed():
            log.error("an operation failed: %s", error)
            return FutureFailed(error=_PATH.sub("[path]", str(error)), category="server")
        case _:
            log.error("an operation failed unexpectedly", exc_info=error)
            text = f"the operation failed unexpectedly ({type(error).__name__}); the server's log has the details"
            return FutureFailed(error=text, category="server")
