"""How a route's decorator says what may be refused: `responses=refused(UnknownSession, ...)`."""

from typing import Any

from api_schemas.base import Response
from api_schemas.wire import JSON
from tinker_server.errors import SequenceConflict, ShuttingDown, TinkerServerError

REF = "#/components/schemas/{model}"
BINARY = {"type": "string", "format": "binary"}
Described = dict[int | str, dict[str, Any]]

SUBMIT = (SequenceConflict, ShuttingDown)
"""What may be refused when an operation is submitted."""
DOWNLOAD: Described = {200: {"description": "The file", "content": {"application/octet-stream": {"schema": BINARY}}}}
"""The answer of routes that send a file."""


class Error(Response):
    """Whatever is refused. Clients try again after 408, 429 and 5xx."""

    detail: str
    """What is wrong, and with which field."""
    error: str
    """Class of the error."""


def refused(*kinds: type[TinkerServerError]) -> Described:
    """One answer for each status among these errors, which says what may be the reason."""
    texts: dict[int, list[str]] = {}
    for kind in kinds:
        texts.setdefault(kind.status, []).append(f"{kind.__name__}: {kind.__doc__}")
    return {status: refusal(" ".join(reasons)) for status, reasons in texts.items()}


def refusal(text: str) -> dict[str, Any]:
    """An answer whose body is an Error."""
    return {"description": text, "content": {JSON: {"schema": {"$ref": REF.format(model=Error.__name__)}}}}
