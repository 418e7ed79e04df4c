"""Parts shared by all lists: a page's position, times, and clients' metadata."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator, Field

from tinker_server.api_schemas.base import Response


def from_unix(at: float) -> datetime:
    """Convert Unix seconds to a time in UTC, as answers have it."""
    return datetime.fromtimestamp(at, UTC)


def as_texts(value: object) -> object:
    """Convert a client's metadata to texts, since the SDK reads nothing else."""
    if not isinstance(value, dict):
        return value
    return {key: item if isinstance(item, str) else str(item) for key, item in value.items() if item is not None}


Metadata = Annotated[
    Annotated[dict[str, str], BeforeValidator(as_texts)] | None,
    Field(description="Metadata from the client. Values that are not texts are answered as texts."),
]


class Cursor(Response):
    """Position of a page in a list."""

    offset: int
    """Number of entries before the page."""
    limit: int
    """Largest number of entries of the page."""
    total_count: int
    """Number of entries of the whole list."""
