"""HTTP answers to errors; every answer has a body and its length."""

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tinker_server.api_schemas.base import NOTED_TOO_LARGE, UNSTORABLE, unstorable
from tinker_server.api_schemas.wire import MalformedBody
from tinker_server.backends.protocol import InvalidInput
from tinker_server.errors import BadField, BadRequest, BodyTooLarge, TinkerServerError, shorten
from tinker_server.web.vendors import error_body, vendor_of

CLIENT_GONE = 499
"""Status of an answer that nobody reads."""
RETRY_AFTER_S = "1"
"""Value of the header Retry-After with 429 and 503."""


def retry_after(status: int) -> Mapping[str, str] | None:
    """Return the header of a refusal after which clients send the same request again."""
    return {"Retry-After": RETRY_AFTER_S} if status in (429, 503) else None


def answer(
    path: str, status: int, error: Exception, detail: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Make a refusal in the form of this path. The text may quote a client, including halves of surrogate pairs."""
    sendable = shorten(detail).encode(errors="backslashreplace").decode()
    vendor = vendor_of(path)
    if vendor is not None:
        field = error.field if isinstance(error, BadField) else None
        return JSONResponse(error_body(vendor, status, error, sendable, field), status, headers)
    return JSONResponse({"detail": sendable, "error": type(error).__name__}, status, headers)


def describe(error: RequestValidationError) -> str:
    """Name the first few fields of a body that are wrong."""
    problems = error.errors()
    places = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems[:5]]
    return "; ".join(places) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def install(app: FastAPI) -> None:
    """Map exceptions to responses, for the whole app."""

    @app.exception_handler(TinkerServerError)
    async def answer_refusal(http: Request, error: TinkerServerError) -> JSONResponse:
        return answer(http.url.path, error.status, error, str(error), retry_after(error.status))

    @app.exception_handler(MalformedBody)
    @app.exception_handler(InvalidInput)
    async def answer_invalid(http: Request, error: ValueError) -> JSONResponse:
        return answer(http.url.path, BadRequest.status, error, str(error))

    @app.exception_handler(RequestValidationError)
    async def answer_malformed(http: Request, error: RequestValidationError) -> JSONResponse:
        is_too_large = any(problem.get("type") == NOTED_TOO_LARGE for problem in error.errors())
        return answer(http.url.path, BadRequest.status if is_too_large else 422, error, describe(error))

    @app.exception_handler(HTTPException)
    async def answer_unrouted(http: Request, error: HTTPException) -> JSONResponse:
        kind = BodyTooLarge() if error.status_code == BodyTooLarge.status else error
        return answer(http.url.path, error.status_code, kind, error.detail, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def answer_gone(http: Request, error: ClientDisconnect) -> JSONResponse:
        return answer(http.url.path, CLIENT_GONE, error, "the client hung up")

    @app.exception_handler(Exception)
    async def answer_unexpected(http: Request, error: Exception) -> JSONResponse:
        return answer(http.url.path, 500, error, "internal error; the server's log has the details")  # uvicorn logs it


async def storable_parameters(request: Request) -> None:
    """Refuse texts in the URL or a header that a database cannot store, as request bodies do."""
    scope = request.scope
    head = b"\n".join((scope["query_string"], *(value for _, value in scope["headers"])))
    if UNSTORABLE.search(scope["path"]) is None and b"\0" not in head and b"%00" not in head:
        return  # percent encoding gives no halves of surrogate pairs, nor does Latin-1
    for place, values in (("path", request.path_params), ("query", request.query_params), ("header", request.headers)):
        for name, value in values.items():
            if isinstance(value, str) and (problem := unstorable(value)) is not None:
                raise RequestValidationError([{"loc": (place, name), "msg": problem}])
