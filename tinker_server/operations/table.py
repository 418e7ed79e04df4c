"""The kinds of operations: per kind its request, and how that is decoded, carried out, and answered.

A submit decodes and refuses by this table, a restart takes up what was left by it, and a poll answers by it.
"""

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
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
from tinker_server.models.snapshots import Snapshots
from tinker_server.offload import off_loop
from tinker_server.operations.recording import Recording
from tinker_server.operations.sampling import Sampling
from tinker_server.operations.training import ModelOperations
from tinker_server.store.futures.records import Operation, Result
from tinker_server.weights.saving import Saving


@dataclass(frozen=True)
class Executors:
    """What carries the operations out."""

    models: ModelOperations
    saving: Saving
    sampling: Sampling
    snapshots: Snapshots
    recording: Recording


@dataclass(frozen=True)
class OperationKind:
    """One row of the table."""

    name: str
    request: type[Request]
    run: Callable[[Executors, Operation, Any], Awaitable[Response]]
    """The decoded request to its response."""
    protobuf_request: Callable[[bytes], Request] | None = None
    """Decodes a request that may also come as protobuf. Raises MalformedBody."""
    protobuf_result: Callable[[Any], bytes] | None = None
    """Encodes a response that is answered as protobuf; the others are answered as JSON."""
    json_form: Callable[[bytes], Iterator[bytes]] | None = None
    """A result in protobuf as JSON, in parts, for clients that take no protobuf."""
    json_request: Callable[[bytes], Request] | None = None
    """Decodes a request that is not only `request` in JSON."""
    decoded_elsewhere: bool = False
    """The body itself is handed on: what was decoded at the submit, to see that it is sound, is not kept."""

    def decode(self, body: bytes, content_type: str) -> Request:
        """A stored or received body. Raises pydantic's ValidationError, MalformedBody."""
        if content_type == wire.PROTOBUF and self.protobuf_request is not None:
            return self.protobuf_request(body)
        if self.json_request is not None:
            return self.json_request(body)
        return self.request.model_validate_json(body)

    def digest(self, body: bytes, content_type: str) -> str:
        """A hash by which a repeat is told from another operation under the same number."""
        if content_type == wire.PROTOBUF:
            body = wire.canonical(body)  # the entries of a map come in any order
        return hashlib.sha256(body).hexdigest()

    def encode(self, response: Response) -> Result:
        """The response as it is stored and sent."""
        if self.protobuf_result is not None:
            return Result(self.protobuf_result(response), wire.PROTOBUF)
        # Strict JSON: the SDK's parser takes no NaN, so that is an error here.
        body = json.dumps(response.model_dump(mode="json", exclude_none=True), allow_nan=False)
        return Result(body.encode(), wire.JSON)


def _forward_request(body: bytes) -> Request:
    """As `/forward` takes it, or as a forward_backward with `forward_only`, which is stored as a forward too."""
    try:
        return ForwardRequest.model_validate_json(body)
    except ValidationError as error:
        with contextlib.suppress(ValidationError):
            request = ForwardBackwardRequest.model_validate_json(body)
            if request.forward_only:
                return request
        raise error


def _batch(operation: Operation) -> EncodedBatch:
    """What the ranks decode for themselves."""
    assert operation.body is not None, "the scheduler has read the body"
    return EncodedBatch(operation.body, operation.content_type)


OPERATIONS = {
    kind.name: kind
    for kind in (
        OperationKind(
            "create_model", CreateModelRequest, lambda do, operation, r: do.models.create_model(r, operation.owner)
        ),
        OperationKind(
            "forward_backward",
            ForwardBackwardRequest,
            lambda do, operation, _: do.models.forward_backward(operation.lane, _batch(operation), backward=True),
            wire.decode_forward_backward,
            wire.encode_forward_backward,
            results.forward_backward_json,
            decoded_elsewhere=True,
        ),
        OperationKind(
            "forward",
            ForwardRequest,
            lambda do, operation, _: do.models.forward_backward(operation.lane, _batch(operation), backward=False),
            wire.decode_forward_backward,
            wire.encode_forward_backward,
            results.forward_backward_json,
            _forward_request,
            decoded_elsewhere=True,
        ),
        OperationKind("optim_step", OptimStepRequest, lambda do, _, request: do.models.optim_step(request)),
        OperationKind("unload_model", UnloadModelRequest, lambda do, _, request: do.models.unload_model(request)),
        OperationKind(
            "load_weights", LoadWeightsRequest, lambda do, operation, r: do.models.load_weights(r, operation.owner)
        ),
        OperationKind("save_weights", SaveWeightsRequest, lambda do, _, request: do.saving.save_weights(request)),
        OperationKind(
            "save_weights_for_sampler",
            SaveWeightsForSamplerRequest,
            lambda do, _, request: do.saving.save_weights_for_sampler(request),
        ),
        OperationKind(
            "save_weights_external",
            SaveWeightsExternalRequest,
            lambda do, _, request: do.saving.save_weights_external(request),
        ),
        OperationKind(
            "sample",
            SampleRequest,
            lambda do, operation, request: do.sampling.sample(request, operation.owner),
            None,
            wire.encode_sample,
            results.sample_json,
        ),
    )
}


class OperationRunner:
    """Runs one operation to its result."""

    def __init__(self, executors: Executors) -> None:
        self._executors = executors

    def decoded(self, operation: Operation) -> Operation:
        """The operation with its request at hand, where it is needed. Raises ValidationError, MalformedBody."""
        kind = OPERATIONS[operation.operation_kind]
        if operation.request is not None or kind.decoded_elsewhere:
            return operation
        assert operation.body is not None, "the scheduler has read the body"
        return replace(operation, request=kind.decode(operation.body, operation.content_type))

    async def is_to_be_had(self, model_id: str) -> bool:
        """Whether a model is in memory or can be restored."""
        return await self._executors.models.is_to_be_had(model_id)

    def last_turn(self, model_id: str) -> int:
        """A number that changes when a trainer begins to work for a model."""
        return self._executors.models.last_turn(model_id)

    def undisturbed(self, model_id: str) -> AbstractAsyncContextManager[None]:
        """While an operation of a model runs, until its place in the log is known, or the model is looked after."""
        return self._executors.snapshots.undisturbed(model_id)

    async def logs(self, operation: Operation, failure_category: str | None) -> bool:
        """Whether an operation that has ended is to have a place in its model's log."""
        return await self._executors.snapshots.logs(operation, failure_category)

    async def look_after(self, operation: Operation) -> None:
        """A model's operation has its result: a snapshot may be due."""
        await self._executors.snapshots.look_after(operation)

    async def mark_incomplete(self, model_id: str) -> None:
        """Have the model's next optim_step fail and clear the gradient."""
        await self._executors.models.mark_incomplete(model_id)

    async def run(self, operation: Operation) -> Result:
        """Raises InvalidInput, BackendFailed or a TinkerServerError; its text is for the user."""
        kind = OPERATIONS[operation.operation_kind]
        operation = await off_loop(operation.size_bytes, self.decoded, operation)
        timer = self._executors.recording.start(operation)
        response = await kind.run(self._executors, operation, operation.request)
        step = await self._executors.recording.done(operation, response, timer)
        return replace(await off_loop(operation.size_bytes, kind.encode, response), step=step)
