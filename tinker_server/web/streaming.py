"""Answers in JSON that are encoded and sent a part at a time, since they may have hundreds of thousands of entries."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, TypeAdapter

from tinker_server.api_schemas.wire import JSON
from tinker_server.offload import LARGE, off_loop

T = TypeVar("T")
_ENTRIES: TypeAdapter[list[BaseModel]] = TypeAdapter(list[BaseModel])


async def stream(parts: AsyncIterator[bytes]) -> Response:
    """Answer the parts in order. What fails before the first part is answered with its status."""
    first = await anext(parts)

    async def all_parts() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    return StreamingResponse(all_parts(), media_type=JSON)


async def entries(
    pages: AsyncIterator[Sequence[T]], form: Callable[[T], BaseModel], owner: str
) -> AsyncIterator[bytes]:
    """Yield the entries of a JSON list without its brackets, page by page. They are made and encoded in a thread."""

    def encode(page: Sequence[T]) -> bytes:
        made = [form(row) for row in page]
        return _ENTRIES.dump_json(made, exclude_none=True, serialize_as_any=True)[1:-1]

    async for part in join_pages(pages, encode, owner):
        yield part


async def join_pages(
    pages: AsyncIterator[Sequence[T]], encode: Callable[[Sequence[T]], bytes], owner: str
) -> AsyncIterator[bytes]:
    """Yield pages with commas between them, each encoded in a thread."""
    comma = b""
    async for page in pages:
        part = await off_loop(owner, LARGE, encode, page)
        yield comma + part
        comma = b","
