"""Every error has one status and one category, and reaches the client with its text."""

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import DataError

from tinker_server import errors
from tinker_server.api_schemas.sessions import SessionHeartbeatRequest
from tinker_server.api_schemas.wire import MalformedBody
from tinker_server.backends.protocol import BackendFailed, InvalidInput, ModelLost
from tinker_server.errors import MAX_CHARACTERS, TinkerServerError, failure
from tinker_server.web.gate import BodyLimit
from tinker_server.web.handlers import install
from tinker_server.web.ledger import Ledger

RETRIED = {408, 409, 429, *range(500, 600)}


def subclasses(cls: type[TinkerServerError]) -> Iterator[type[TinkerServerError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.add_middleware(BodyLimit, max_bytes=100)
    app.state.services = SimpleNamespace(ledger=Ledger(1000))
    install(app)

    @app.get("/raise/{name}")
    async def fail(name: str) -> None:
        kinds = [*subclasses(TinkerServerError), InvalidInput, MalformedBody, ZeroDivisionError]
        raise next(kind for kind in kinds if kind.__name__ == name)("the reason")

    @app.post("/heartbeat")
    async def heartbeat(request: SessionHeartbeatRequest) -> str:
        return request.session_id

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("kind", [*subclasses(TinkerServerError)])
async def test_every_error_is_answered_with_its_status_and_text(
    kind: type[TinkerServerError], http: httpx.AsyncClient
) -> None:
    answer = await http.get(f"/raise/{kind.__name__}")
    assert answer.status_code == kind.status and int(answer.headers["content-length"]) > 0
    assert answer.json() == {"detail": "the reason", "error": kind.__name__}


@pytest.mark.parametrize("kind", [*subclasses(TinkerServerError)])
def test_no_refusal_of_a_user_is_retried_by_the_sdk(kind: type[TinkerServerError]) -> None:
    assert kind.category == "server" or kind.status not in RETRIED
    assert kind.__doc__ and kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "status"), [("InvalidInput", 400), ("MalformedBody", 400), ("ZeroDivisionError", 500)]
)
async def test_errors_of_other_rooms_are_mapped(name: str, status: int, http: httpx.AsyncClient) -> None:
    answer = await http.get(f"/raise/{name}")
    assert answer.status_code == status and answer.json()["error"] == name
    assert ("the reason" in answer.json()["detail"]) == (status == 400)


async def test_a_wrong_body_names_the_field(http: httpx.AsyncClient) -> None:
    answer = await http.post("/heartbeat", json={"session_id": 1, "extra": 2})
    assert answer.status_code == 422
    assert "body.session_id: Input should be a valid string; body.extra: Extra" in answer.json()["detail"]


async def test_a_body_over_the_limit_is_read_and_refused(http: httpx.AsyncClient) -> None:
    assert (await http.post("/heartbeat", content=b"x" * 101)).status_code == 413
    assert (await http.post("/heartbeat", json={"session_id": "x" * 50})).status_code == 200


@pytest.mark.parametrize(
    ("error", "category", "text"),
    [
        (InvalidInput("datum 0: wrong"), "user", "datum 0: wrong"),
        (errors.UnknownBaseModel("served: tiny"), "user", "served: tiny"),
        (errors.LostModel("gone"), "server", "gone"),
        (ModelLost("gone"), "server", "gone"),
        (BackendFailed("broke"), "server", "broke"),
        (BackendFailed("no /data/a/b.bin (tinker://s/weights/a)"), "server", "no [path] (tinker://s/weights/a)"),
        (KeyError("x"), "server", "the operation failed unexpectedly (KeyError); the server's log has the details"),
    ],
)
def test_a_failed_future_says_whose_fault_it_was(error: Exception, category: str, text: str) -> None:
    failed = failure(error)
    assert (failed.category, failed.error) == (category, text)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/srv/data/checkpoints/secret"),
        DataError("UPDATE futures SET result = ?", {"result": "secret"}, Exception("too big")),
    ],
)
def test_an_unforeseen_errors_text_stays_in_the_log(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failed = failure(error)
    assert failed.category == "server" and type(error).__name__ in failed.error and "log" in failed.error
    assert not any(part in failed.error for part in ("secret", "/srv", "UPDATE", "No space"))
    assert "secret" in caplog.text


@pytest.mark.parametrize("kind", [InvalidInput, BackendFailed, errors.BadRequest])
def test_an_errors_text_ends_though_it_quotes_without_end(kind: type[Exception]) -> None:
    said = failure(kind("datum 3: " + "x" * 10 * MAX_CHARACTERS)).error
    assert said.startswith("datum 3: xxx") and said.endswith(f"... and {9 * MAX_CHARACTERS + 9} more characters")
    assert len(said) < MAX_CHARACTERS + 100
