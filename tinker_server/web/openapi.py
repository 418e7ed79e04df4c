"""Additions to /openapi.json that no route or field can make: bodies that are read as Operations, answers that any
route may give, tags."""

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from tinker_server.api_schemas.base import Request
from tinker_server.api_schemas.training import ForwardBackwardRequest
from tinker_server.api_schemas.wire import JSON, PROTOBUF
from tinker_server.errors import BodyTooLarge, ForeignHost, KeysUnreadable, ScopeRefused, Unauthenticated
from tinker_server.operations.table import OPERATIONS
from tinker_server.web.fixed_page import FixedPage
from tinker_server.web.refusals import BINARY, REF, Error, describe, refusal
from tinker_server.web.submission import Body

Schema = dict[str, Any]
ABOUT = """The training API of the `tinker` SDK.

Whatever takes time is an operation: its submit is answered at once with a `request_id`, and `retrieve_future` waits for
the result. A submit is repeated as it was, after a lost connection for example: the same `seq_id` of the same model is
the same operation. Every refused request returns an `Error` body; an operation that fails later has a
`FutureFailed`."""


def install(app: FastAPI) -> None:
    """Have the app describe itself in full. Its routes must have been added."""
    plain = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = complete_schema(
                plain(), [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
    page = FixedPage(lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode(), JSON)
    app.add_api_route("/openapi.json", page.answer, include_in_schema=False)


def complete_schema(schema: Schema, routes: list[APIRoute]) -> Schema:
    """Return FastAPI's schema of these routes, with everything that it does not know."""
    schema["info"] = {"title": "tinker-server", "version": "v1", "description": ABOUT}
    bodies = {route.path: body for route in routes if (body := _find_request_type(route)) is not None}
    components: Schema = schema["components"]["schemas"]
    read = models_json_schema([(body, "validation") for body in bodies.values()], ref_template=REF)[1]
    components |= read["$defs"] | {"Error": Error.model_json_schema()}
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    modules = {}
    for route in routes:
        for method in route.methods:
            operation = schema["paths"][route.path_format][method.lower()]
            if (body := bodies.get(route.path)) is not None:
                operation["requestBody"] = _body(body)
            _add_general_answers(operation)
            modules[_tag(route)] = sys.modules[route.endpoint.__module__]
            operation["tags"] = [_tag(route)]
    schema["tags"] = [{"name": name, "description": inspect.getdoc(module)} for name, module in modules.items()]
    for field in _fields(components):
        if "const" in field:
            field.setdefault("description", f"Always `{field['const']}`.")
    return schema


def _find_request_type(route: APIRoute) -> type[Request] | None:
    """Return the request that a handler takes as an Operation, whose body FastAPI does not read."""
    for dependency in route.dependant.dependencies:
        if isinstance(dependency.call, Body):
            return OPERATIONS[dependency.call.operation_kind].request
    return None


def _body(model: type[Request]) -> Schema:
    content: Schema = {JSON: {"schema": {"$ref": REF.format(model=model.__name__)}}}
    if model is ForwardBackwardRequest:
        content = {PROTOBUF: {"schema": BINARY}} | content
        text = "Message ForwardBackwardRequest of tinker_wire.proto, also with Content-Encoding zstd; or JSON."
        return {"required": True, "content": content, "description": text}
    return {"required": True, "content": content}


def _add_general_answers(operation: Schema) -> None:
    """Add to an operation's own answers those of every operation with a body, with parameters, with a key."""
    general: dict[int | str, Schema] = describe(ForeignHost)
    general[500] = refusal("The server failed; its log has the details.")
    if "requestBody" in operation:
        general[400] = refusal("The body cannot be read.")
        general |= describe(BodyTooLarge)
    if "requestBody" in operation or operation.get("parameters"):
        general[422] = refusal("A field is missing, unknown, or not what it should be.")
    if operation.get("security"):
        general |= describe(Unauthenticated, ForeignHost, ScopeRefused, KeysUnreadable)
    answers: Schema = operation["responses"]
    answers.pop("422", None)  # FastAPI's, of another form
    for status, answer in general.items():
        if (own := answers.get(str(status))) is not None:
            answer["description"] += " " + own["description"]
        answers[str(status)] = answer
    operation["responses"] = dict(sorted(answers.items()))


def _tag(route: APIRoute) -> str:
    return route.endpoint.__module__.rpartition(".")[2]


def _fields(schema: object) -> Iterator[Schema]:
    """Yield the fields of every object in a schema."""
    if isinstance(schema, dict):
        if isinstance(fields := schema.get("properties"), dict):
            yield from fields.values()
        for part in schema.values():
            yield from _fields(part)
