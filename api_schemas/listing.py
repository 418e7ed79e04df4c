"""What all lists share: a page's place, times, and what clients noted."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from api_schemas.base import Response


def from_unix(at: float) -> datetime:
    """A time as it is answered, with its zone."""
    return datetime.fromtimestamp(at, UTC)


def as_texts(value: Any) -> Any:
    """What a client noted, as it is answered: the SDK reads texts only."""
    if not isinstance(value, dict):
        return value
    return {key: item if isinstance(item, str) else str(item) for key, item in value.items() if item is not None}


Metadata = Annotated[
    Annotated[dict[str, str], BeforeValidator(as_texts)] | None,
    Field(description="What the client noted. Values other than texts are answered as their text."),
]


class Cursor(Response):
    """Which part of a list this is."""

    offset: int
    """How many entries came before."""
    limit: int
    """Most entries that were asked for."""
    total_count: int
    """Entries of the whole list."""
