"""What /openapi.json says beyond what FastAPI finds out by itself: bodies that routes read by hand, forms of results,
every refusal, and what the words mean. Knows the routes by their paths and the handlers' types."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, cast, get_args, get_origin, get_type_hints

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api_schemas.base import Request, Response
from api_schemas.futures import FutureFailed, FutureMetadata, RetrieveFuturePending
from api_schemas.old_clients.results import ForwardBackwardJson, SampleJson
from api_schemas.training import CreateModelResponse, ForwardBackwardRequest, OptimStepResponse, UnloadModelResponse
from api_schemas.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from api_schemas.wire import PROTOBUF
from tinker_server.errors import (
    BadRequest,
    BodyTooLarge,
    Busy,
    HeartbeatEnded,
    KeysReadOnly,
    LinkRefused,
    ModelIdTaken,
    ResultExpired,
    SequenceConflict,
    SessionFinished,
    ShuttingDown,
    TinkerServerError,
    UnknownBaseModel,
    UnknownCheckpoint,
    UnknownFuture,
    UnknownModel,
    UnknownSampler,
    UnknownSession,
)
from tinker_server.scheduling.operations import JSON
from tinker_server.web.glossary import GLOSSARY
from tinker_server.web.submission import Submission

Schema = dict[str, Any]
PREFIX = "/api/v1"
REF = "#/components/schemas/{model}"
BINARY = {"type": "string", "format": "binary"}
ABOUT = """The training API of the `tinker` SDK.

Whatever takes time is an operation: its submit is answered at once with a `request_id`, and `retrieve_future` waits for
the result. A submit is repeated as it was, after a lost connection for example: the same `seq_id` of the same model is
the same operation. Whatever is refused has the body of `Error`; an operation that fails later has a `FutureFailed`."""


class Error(Response):
    """Whatever is refused. Clients try again after 408, 429 and 5xx."""

    detail: str
    """What is wrong, and with which field."""
    error: str
    """Class of the error."""


RESULTS: list[type[Response]] = [
    CreateModelResponse,
    UnloadModelResponse,
    LoadWeightsResponse,
    ForwardBackwardJson,
    OptimStepResponse,
    SampleJson,
    SaveWeightsResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsExternalResponse,
    FutureMetadata,
    FutureFailed,
]
"""What retrieve_future may answer in JSON."""

_SUBMIT = (SequenceConflict, ShuttingDown)
_OF_MODEL = (UnknownModel, SessionFinished)
_OF_SESSION = (UnknownSession, SessionFinished)
_OF_WEIGHTS = (BadRequest, UnknownCheckpoint)
_NAMED = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
REFUSALS: dict[str, tuple[type[TinkerServerError], ...]] = {
    "/session_heartbeat": (UnknownSession, HeartbeatEnded),
    "/sessions/search": (BadRequest,),
    "/sessions/{session_id}": (UnknownSession,),
    "/sessions/{session_id}/finish": (UnknownSession,),
    "/sessions/{session_id}/project": (UnknownSession,),
    "/sessions/{session_id}/trace_export": (UnknownSession,),
    "/create_model": (*_OF_SESSION, *_SUBMIT),
    "/get_info": (UnknownModel, UnknownBaseModel),
    "/forward_backward": (*_OF_MODEL, *_SUBMIT),
    "/forward": (*_OF_MODEL, *_SUBMIT),
    "/unload_model": (*_OF_MODEL, *_SUBMIT),
    "/optim_step": (*_OF_MODEL, *_SUBMIT),
    "/save_weights": (*_OF_MODEL, *_SUBMIT),
    "/save_weights_for_sampler": (*_OF_MODEL, *_SUBMIT),
    "/save_weights_external": (*_OF_MODEL, *_SUBMIT),
    "/load_weights": (*_OF_SESSION, UnknownModel, *_SUBMIT),
    "/create_sampling_session": (*_OF_SESSION, *_OF_WEIGHTS, UnknownBaseModel),
    "/samplers/{sampler_id}": (UnknownSampler,),
    "/join_sampling_session": (UnknownSampler,),
    "/asample": (UnknownSampler, SessionFinished, *_OF_WEIGHTS, UnknownBaseModel, Busy, *_SUBMIT),
    "/retrieve_future": (UnknownFuture, ResultExpired),
    "/retrieve_futures": (UnknownSampler,),
    "/cancel_future": (UnknownFuture, BadRequest),
    "/training_runs/{run_id}": (UnknownModel,),
    "/training_runs/{run_id}/checkpoints": (UnknownModel,),
    _NAMED: _OF_WEIGHTS,
    f"{_NAMED}/publish": _OF_WEIGHTS,
    f"{_NAMED}/ttl": _OF_WEIGHTS,
    f"{_NAMED}/external_weights_urls": _OF_WEIGHTS,
    f"{_NAMED}/archive": _OF_WEIGHTS,
    "/weights_info": _OF_WEIGHTS,
    "/copy_weights": (*_OF_WEIGHTS, ModelIdTaken, *_OF_SESSION),
    "/files/{path}": (LinkRefused, UnknownCheckpoint),
    "/archives/{directory}": (LinkRefused, UnknownCheckpoint),
    "/traces/{session_id}": (LinkRefused, UnknownSession),
    "/billing/usage/events": (BadRequest,),
    "/auth/apikey/me": (KeysReadOnly,),
}
"""By path: what may be answered beside that the request itself is malformed."""

_FOUND: Schema = {"description": "The file", "content": {"application/octet-stream": {"schema": BINARY}}}
ANSWERS: dict[str, dict[str, Schema]] = {
    "/retrieve_future": {
        "200": {
            "description": "The result: forward_backward and samples as protobuf (messages ForwardBackwardOutput and "
            "SampleResponse of tinker_wire.proto) where the client accepts it, all else as JSON. An operation that "
            "failed is a FutureFailed. FutureMetadata comes once, before a large result, where the request allows it.",
            "content": {
                PROTOBUF: {"schema": BINARY},
                JSON: {"schema": {"anyOf": [{"$ref": REF.format(model=one.__name__)} for one in RESULTS]}},
            },
        },
        "408": {
            "description": "There is no result yet: ask again at once.",
            "content": {JSON: {"schema": {"$ref": REF.format(model=RetrieveFuturePending.__name__)}}},
        },
    },
    "/files/{path}": {"200": _FOUND},
    "/archives/{directory}": {"200": _FOUND},
    "/traces/{session_id}": {
        "200": {"description": "Trace Event Format", "content": {JSON: {"schema": {"type": "object"}}}}
    },
    f"{_NAMED}/archive": {"302": {"description": "`Location` is where the tar.gz is, for an hour."}},
}
"""By path: answers whose form no handler's type tells."""


def install(app: FastAPI) -> None:
    """Have the app describe itself in full. Its routes must be there by now."""
    plain = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = completed(plain(), [route for route in app.routes if isinstance(route, APIRoute)])
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it


def completed(schema: Schema, routes: list[APIRoute]) -> Schema:
    """FastAPI's schema of these routes, with all that it does not know."""
    schema["info"] = {"title": "tinker-server", "version": "v1", "description": ABOUT}
    bodies = {route.path: body for route in routes if (body := _submitted(route)) is not None}
    components: Schema = schema["components"]["schemas"]
    components.update(_definitions(list(bodies.values()), [Error, RetrieveFuturePending, *RESULTS]))
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    modules = {}
    for route in routes:
        for method in route.methods:
            operation = schema["paths"][route.path_format][method.lower()]
            if (body := bodies.get(route.path)) is not None:
                operation["requestBody"] = _body(body)
            _answers(operation, route.path_format.removeprefix(PREFIX))
            modules[_tag(route)] = sys.modules[route.endpoint.__module__]
            operation["tags"] = [_tag(route)]
            for parameter in operation.get("parameters", []):
                _explain(parameter["name"], parameter)
    schema["tags"] = [{"name": name, "description": inspect.getdoc(module)} for name, module in modules.items()]
    for properties in _properties(components):
        for name, field in properties.items():
            _explain(name, field)
    return schema


def _submitted(route: APIRoute) -> type[Request] | None:
    """The request that a handler takes as a Submission, whose body FastAPI does not read."""
    for hint in get_type_hints(route.endpoint).values():
        if get_origin(hint) is Submission:
            return cast(type[Request], get_args(hint)[0])
    return None


def _definitions(requests: list[type[Request]], responses: list[type[Response]]) -> Schema:
    read: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in requests]
    written: list[tuple[type[BaseModel], Any]] = [(model, "serialization") for model in responses]
    definitions: Schema = {}
    for models in (read, written):
        definitions |= models_json_schema(models, ref_template=REF)[1].get("$defs", {})
    return definitions


def _body(model: type[Request]) -> Schema:
    content: Schema = {JSON: {"schema": {"$ref": REF.format(model=model.__name__)}}}
    if model is ForwardBackwardRequest:
        content = {PROTOBUF: {"schema": BINARY}} | content
        text = "Message ForwardBackwardRequest of tinker_wire.proto, also with Content-Encoding zstd; or JSON."
        return {"required": True, "content": content, "description": text}
    return {"required": True, "content": content}


def _answers(operation: Schema, path: str) -> None:
    """All statuses of an operation, each refusal with what may be the reason."""
    reasons: dict[int, list[str]] = {500: ["The server failed; its log has the details."]}
    if "requestBody" in operation:
        reasons[400] = ["The body cannot be read."]
        reasons[413] = [_reason(BodyTooLarge)]
    if "requestBody" in operation or operation.get("parameters"):
        reasons[422] = ["A field is missing, unknown, or not what it should be."]
    if operation.get("security"):
        reasons[401] = ["The API key is missing, or not known."]
    for kind in REFUSALS.get(path, ()):
        reasons.setdefault(kind.status, []).append(_reason(kind))
    content = {JSON: {"schema": {"$ref": REF.format(model=Error.__name__)}}}
    for status, texts in reasons.items():
        operation["responses"][str(status)] = {"description": " ".join(texts), "content": content}
    operation["responses"] = dict(sorted((operation["responses"] | ANSWERS.get(path, {})).items()))


def _reason(kind: type[TinkerServerError]) -> str:
    return f"{kind.__name__}: {kind.__doc__}"


def _tag(route: APIRoute) -> str:
    return route.endpoint.__module__.rpartition(".")[2]


def _properties(schema: Any) -> Iterator[Schema]:
    """The `properties` of every object in a schema."""
    if isinstance(schema, dict):
        if isinstance(fields := schema.get("properties"), dict):
            yield fields
        for part in schema.values():
            yield from _properties(part)


def _explain(name: str, described: Schema) -> None:
    if "description" not in described and name in GLOSSARY:
        described["description"] = GLOSSARY[name]
