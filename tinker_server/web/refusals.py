"""The refusals of a route, for its decorator: `responses=refused(UnknownSession, ...)`."""

from tinker_server.api_schemas.base import Response
from tinker_server.api_schemas.wire import JSON
from tinker_server.errors import (
    Busy,
    SequenceConflict,
    SessionFinished,
    ShuttingDown,
    TinkerServerError,
    UnknownModel,
)

REF = "#/components/schemas/{model}"
BINARY = {"type": "string", "format": "binary"}
Described = dict[int | str, dict[str, object]]

SUBMIT = (SequenceConflict, ShuttingDown)
"""Refusals of every submit."""
DOWNLOAD: Described = {200: {"description": "The file", "content": {"application/octet-stream": {"schema": BINARY}}}}
"""Answer of routes that send a file."""


class Error(Response):
    """A refusal. Clients retry after 408, 429 and 5xx."""

    detail: str
    """The reason, with the field that it is about."""
    error: str
    """Class of the error."""


def describe(*kinds: type[TinkerServerError]) -> Described:
    """Describe an answer for each status among these errors, with its possible reasons."""
    texts: dict[int, list[str]] = {}
    for kind in kinds:
        texts.setdefault(kind.status, []).append(f"{kind.__name__}: {kind.__doc__}")
    return {status: refusal(" ".join(reasons)) for status, reasons in texts.items()}


def refusal(text: str) -> dict[str, object]:
    """Describe an answer whose body is an Error."""
    return {"description": text, "content": {JSON: {"schema": {"$ref": REF.format(model=Error.__name__)}}}}


OF_MODEL = describe(UnknownModel, SessionFinished, Busy, *SUBMIT)
"""Refusals of every submit of an operation on a model."""
