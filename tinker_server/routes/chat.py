"""Chat endpoints for the clients of OpenAI and Anthropic, as these vendors document them."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from tinker_server.api_schemas.wire import JSON
from tinker_server.backends import tasks
from tinker_server.backends.protocol import ChatEndpoint, InvalidInput
from tinker_server.chat.requests import ChatRequest, check, parse, read, receive
from tinker_server.chat.responses import Translation, to_chat
from tinker_server.errors import BadRequest, TinkerServerError, shorten
from tinker_server.offload import off_loop
from tinker_server.store.catalog import Page, Scope
from tinker_server.web import vendors
from tinker_server.web.deps import Server, Services
from tinker_server.web.handlers import CLIENT_GONE

T = TypeVar("T")
LISTED_WEIGHTS = 100
"""Sampler weights in the list of models, the newest."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream: a proxy should forward each event at once."""
Handler = Callable[[Request, Server], Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Add the chat routes to the app, under every prefix that clients use."""
    openai, anthropic = APIRouter(), APIRouter()
    openai.add_api_route("/chat/completions", _answering("chat_completions"), methods=["POST"])
    openai.add_api_route("/completions", _answering("completions"), methods=["POST"])
    openai.add_api_route("/responses", respond, methods=["POST"])
    openai.add_api_route("/models", list_models, methods=["GET"])
    openai.add_api_route("/models/{name:path}", get_model, methods=["GET"])
    anthropic.add_api_route("/messages", _answering("messages"), methods=["POST"])
    anthropic.add_api_route("/messages/count_tokens", _answering("count_tokens"), methods=["POST"])
    for router, prefixes in ((openai, vendors.OPENAI), (anthropic, vendors.ANTHROPIC)):
        for prefix in prefixes:
            app.include_router(router, prefix=prefix, include_in_schema=False)


async def list_models(http: Request, server: Server) -> dict[str, object]:
    """List the base models, and the caller's newest sampler weights."""
    now = time.time()
    asked = Page(Scope(http.state.owner), LISTED_WEIGHTS, 0)
    saved, _ = await server.catalog.checkpoints(asked, ["sampler_weights"], now)
    cards = [_card(name, name, server) for name in server.models.served]
    cards += [_card(weights.tinker_path, weights.base_model, server, weights.created_at) for weights in saved]
    return {"object": "list", "data": cards}


async def get_model(name: str, http: Request, server: Server) -> dict[str, object]:
    """Return the model's card if the caller may use it."""
    found = await server.chats.find(name, http.state.owner)
    return _card(name, found.base_model, server)


def _card(name: str, base_model: str, server: Services, created_at: float = 0) -> dict[str, object]:
    """Make a model's card: OpenAI's fields, then vLLM's. Weights of a base that is not served have no length."""
    base = server.models.served.get(base_model)
    length = None if base is None else base.info.max_context_length
    card = {"id": name, "object": "model", "created": int(created_at), "owned_by": "tinker-server"}
    return card | {"max_model_len": length, "parent": None if name == base_model else base_model}


def _answering(endpoint: ChatEndpoint) -> Handler:
    async def answer(http: Request, server: Server) -> Response:
        server.scheduler.require_open()
        content = await receive(http.stream())
        request = await off_loop(http.state.owner, len(content), read, endpoint, content)
        parts = server.chats.answer(request, http.state.owner, server.settings.image_addresses())
        first = await _unless_gone(http, _first(parts) if request.streamed else _all(parts))
        if first is None:
            return Response(status_code=CLIENT_GONE)
        if not request.streamed:
            return Response(first, media_type=JSON)
        events = _events(vendors.vendor_of(http.url.path), first, parts)
        return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)

    return answer


async def respond(http: Request, server: Server) -> Response:
    """Answer OpenAI's Responses by a chat completion."""
    server.scheduler.require_open()
    content = await receive(http.stream())
    body, request = await off_loop(http.state.owner, len(content), _translate, content)
    translation = Translation(body)
    parts = server.chats.answer(request, http.state.owner, server.settings.image_addresses())
    first = await _unless_gone(http, _first(parts) if request.streamed else _all(parts))
    if first is None:
        return Response(status_code=CLIENT_GONE)
    if not request.streamed:
        return Response(translation.whole(first), media_type=JSON)
    events = translation.events(_chain(first, parts))
    head = await _first(events)
    whole = _events("openai", head, events, translation)
    return StreamingResponse(whole, media_type="text/event-stream", headers=_HEADERS)


def _translate(content: bytearray) -> tuple[dict[str, object], ChatRequest]:
    body = parse(content)
    return body, check("chat_completions", to_chat(body), len(content))


async def _chain(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        yield first
        async for part in rest:
            yield part


async def _first(parts: AsyncGenerator[str, None]) -> str:
    return await anext(parts)


async def _all(parts: AsyncGenerator[str, None]) -> str:
    return "".join([part async for part in parts])


async def _events(
    vendor: vendors.Vendor | None,
    first: str,
    rest: AsyncGenerator[str, None],
    translation: Translation | None = None,
) -> AsyncGenerator[str, None]:
    """Yield the stream. If it fails midway, its last event is the error."""
    assert vendor is not None
    async with aclosing(rest):
        yield first
        try:
            async for part in rest:
                yield part
        except (InvalidInput, TinkerServerError) as error:
            status = error.status if isinstance(error, TinkerServerError) else BadRequest.status
            refusal = vendors.error_body(vendor, status, error, shorten(str(error)))
            if translation is not None:
                yield translation.error(refusal)
            else:
                named = "event: error\n" if vendor == "anthropic" else ""
                yield f"{named}data: {json.dumps(refusal)}\n\n"


async def _unless_gone(http: Request, work: Coroutine[object, object, T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects first."""
    async with tasks.running([work]) as [working], tasks.running([_wait_for_disconnect(http)]) as [gone]:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None


async def _wait_for_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
