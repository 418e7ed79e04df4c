"""The kinds of operations: for each its request, and the functions that decode it, carry it out, and encode its answer.

A submit decodes and refuses by this table, a restart takes up by it what was left, and a poll answers by it.
"""

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from api_schemas import wire
from api_schemas.base import Request, Response
from api_schemas.old_clients import results
from api_schemas.old_clients.forward import ForwardRequest
from api_schemas.sampling import SampleRequest
from api_schemas.training import (
    CreateModelRequest,
    ForwardBackwardRequest,
    OptimStepRequest,
    UnloadModelRequest,
)
from api_schemas.weights import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from backends.protocol import EncodedBatch
from tinker_server.models.model import Model
from tinker_server.offload import off_loop
from tinker_server.operations.recording import Recording, Timer
from tinker_server.operations.sampling import Sampling
from tinker_server.operations.training import Training
from tinker_server.store.futures.records import Operation, Result
from tinker_server.weights.saving import Saving


@dataclass(frozen=True)
class Executors:
    """Carry the operations out and record them."""

    training: Training
    saving: Saving
    sampling: Sampling
    recording: Recording


@dataclass(frozen=True)
class OperationKind:
    """One row of the table."""

    name: str
    request: type[Request]
    run: Callable[[Executors, Model, Operation, Any], Awaitable[Response]]
    """Carries out an operation, whose decoded request comes last."""
    protobuf_request: Callable[[bytes], Request] | None = None
    """Decodes a request that may also come as protobuf. Raises MalformedBody."""
    protobuf_result: Callable[[Any], bytes] | None = None
    """Encodes a response that is answered as protobuf; the others are answered as JSON."""
    json_form: Callable[[bytes], Iterator[bytes]] | None = None
    """A result in protobuf as JSON, in parts, for clients that take no protobuf."""
    json_request: Callable[[bytes], Request] | None = None
    """Decodes a request that is not only `request` in JSON."""
    decoded_elsewhere: bool = False
    """The body itself is handed on: the request that was decoded at the submit, to check it, is not kept."""

    def decode(self, body: bytes, content_type: str) -> Request:
        """Decode a stored or received body. Raises pydantic's ValidationError, MalformedBody."""
        if content_type == wire.PROTOBUF and self.protobuf_request is not None:
            return self.protobuf_request(body)
        if self.json_request is not None:
            return self.json_request(body)
        return self.request.model_validate_json(body)

    def digest(self, body: bytes, content_type: str) -> str:
        """Return a hash that tells a repeat from another operation under the same number."""
        digest = hashlib.sha256()
        for part in wire.canonical(body) if content_type == wire.PROTOBUF else (body,):  # maps come in any order
            digest.update(part)
        return digest.hexdigest()

    def encode(self, response: Response) -> Result:
        """Encode a response as it is stored and sent."""
        if self.protobuf_result is not None:
            return Result(self.protobuf_result(response), wire.PROTOBUF)
        # Strict JSON: the SDK's parser takes no NaN, so that is an error here.
        body = json.dumps(response.model_dump(mode="json", exclude_none=True), allow_nan=False)
        return Result(body.encode(), wire.JSON)


def _forward_request(body: bytes) -> Request:
    """Decode a body of `/forward`, or a forward_backward with `forward_only`, which is stored as a forward too."""
    try:
        return ForwardRequest.model_validate_json(body)
    except ValidationError as error:
        with contextlib.suppress(ValidationError):
            request = ForwardBackwardRequest.model_validate_json(body)
            if request.forward_only:
                return request
        raise error


def _batch(operation: Operation) -> EncodedBatch:
    """Return the batch, which the ranks decode for themselves."""
    assert operation.body is not None, "the body has been read"
    return EncodedBatch(operation.body, operation.content_type)


OPERATIONS = {
    kind.name: kind
    for kind in (
        OperationKind(
            "create_model",
            CreateModelRequest,
            lambda do, model, operation, request: do.training.create_model(model, request, operation.owner),
        ),
        OperationKind(
            "forward_backward",
            ForwardBackwardRequest,
            lambda do, model, operation, _: do.training.forward_backward(model, _batch(operation), backward=True),
            wire.decode_forward_backward,
            wire.encode_forward_backward,
            results.forward_backward_json,
            decoded_elsewhere=True,
        ),
        OperationKind(
            "forward",
            ForwardRequest,
            lambda do, model, operation, _: do.training.forward_backward(model, _batch(operation), backward=False),
            wire.decode_forward_backward,
            wire.encode_forward_backward,
            results.forward_backward_json,
            _forward_request,
            decoded_elsewhere=True,
        ),
        OperationKind(
            "optim_step", OptimStepRequest, lambda do, model, _, request: do.training.optim_step(model, request)
        ),
        OperationKind("unload_model", UnloadModelRequest, lambda do, model, *_: do.training.unload_model(model)),
        OperationKind(
            "load_weights",
            LoadWeightsRequest,
            lambda do, model, operation, request: do.training.load_weights(model, request, operation.owner),
        ),
        OperationKind(
            "save_weights", SaveWeightsRequest, lambda do, model, _, request: do.saving.save_weights(model, request)
        ),
        OperationKind(
            "save_weights_for_sampler",
            SaveWeightsForSamplerRequest,
            lambda do, model, _, request: do.saving.save_weights_for_sampler(model, request),
        ),
        OperationKind(
            "save_weights_external",
            SaveWeightsExternalRequest,
            lambda do, model, _, request: do.saving.save_weights_external(model, request),
        ),
        OperationKind(
            "sample",
            SampleRequest,
            lambda do, _, operation, request: do.sampling.sample(request, operation.owner),
            None,
            wire.encode_sample,
            results.sample_json,
        ),
    )
}


class OperationRunner:
    """Runs one operation to its result, once."""

    def __init__(self, executors: Executors) -> None:
        self._executors = executors

    def decoded(self, operation: Operation) -> Operation:
        """Return the operation with its decoded request. Raises ValidationError, MalformedBody."""
        assert operation.body is not None, "the body has been read"
        request = OPERATIONS[operation.operation_kind].decode(operation.body, operation.content_type)
        return replace(operation, request=request)

    async def run(self, operation: Operation, model: Model | None) -> Result:
        """Raises InvalidInput, BackendFailed or a TinkerServerError; its text is for the user."""
        kind = OPERATIONS[operation.operation_kind]
        if operation.request is None and not kind.decoded_elsewhere:
            operation = await off_loop(operation.owner, operation.size_bytes, self.decoded, operation)
        timer = Timer(operation, model)
        # A sample, which has no model, asks for none.
        response = await kind.run(self._executors, model, operation, operation.request)  # type: ignore[arg-type]
        step = await self._executors.recording.done(operation, response, timer)
        result = await off_loop(operation.owner, operation.size_bytes, kind.encode, response)
        return replace(result, step=step)
