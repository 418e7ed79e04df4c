"""The kinds of operations: for each its request, and the functions that decode it, carry it out, and encode its answer.

A submit decodes and refuses by this table, a restart takes up by it what was left, and a poll answers by it.
"""

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from tinker_server.api_schemas import ids, wire
from tinker_server.api_schemas.base import Request, Response
from tinker_server.api_schemas.old_clients import results
from tinker_server.api_schemas.old_clients.forward import ForwardRequest
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.api_schemas.training import (
    CreateModelRequest,
    ForwardBackwardRequest,
    OptimStepRequest,
    UnloadModelRequest,
)
from tinker_server.api_schemas.weights import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinker_server.errors import BadRequest
from tinker_server.operations import sampling, training
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Operation, Result
from tinker_server.weights import saving
from tinker_server.weights.lookup import WeightStores


@dataclass(frozen=True)
class OperationKind:
    """A row of the table."""

    name: str
    request: type[Request]
    run: Callable[[WeightStores, Any, Work[Any]], Awaitable[Response]]
    """Carries out an operation on its model, or on `NO_MODEL`."""
    place: Callable[[Any], tuple[str, int]] = attrgetter("model_id", "seq_id")
    """Returns the lane of a request, and its number there. Raises BadRequest."""
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


def _place_of_model(request: CreateModelRequest | LoadWeightsRequest) -> tuple[str, int]:
    """Return number 0 of the model that is made, or the number of a load into a model."""
    into = (request.model_id, request.seq_id) if isinstance(request, LoadWeightsRequest) else (None, None)
    match request.session_id, request.model_seq_id, *into:
        case str(session_id), int(model_seq_id), None, None:
            return ids.model_id(session_id, model_seq_id), 0
        case None, None, str(model_id), int(seq_id):
            return model_id, seq_id
    raise BadRequest("load_weights takes either session_id and model_seq_id, or model_id and seq_id")


def _place_of_unload(request: UnloadModelRequest) -> tuple[str, int]:
    return request.model_id + UNLOAD_SUFFIX, 0


OPERATIONS = {
    kind.name: kind
    for kind in (
        OperationKind("create_model", CreateModelRequest, training.create_model, _place_of_model),
        OperationKind(
            "forward_backward",
            ForwardBackwardRequest,
            training.forward_backward,
            protobuf_request=wire.decode_forward_backward,
            protobuf_result=wire.encode_forward_backward,
            json_form=results.forward_backward_json,
            decoded_elsewhere=True,
        ),
        OperationKind(
            "forward",
            ForwardRequest,
            training.forward_backward,
            protobuf_request=wire.decode_forward_backward,
            protobuf_result=wire.encode_forward_backward,
            json_form=results.forward_backward_json,
            json_request=_forward_request,
            decoded_elsewhere=True,
        ),
        OperationKind("optim_step", OptimStepRequest, training.optim_step),
        OperationKind("unload_model", UnloadModelRequest, training.unload_model, _place_of_unload),
        OperationKind("load_weights", LoadWeightsRequest, training.load_weights, _place_of_model),
        OperationKind("save_weights", SaveWeightsRequest, saving.save_weights),
        OperationKind("save_weights_for_sampler", SaveWeightsForSamplerRequest, saving.save_weights_for_sampler),
        OperationKind("save_weights_external", SaveWeightsExternalRequest, saving.save_weights_external),
        OperationKind(
            "sample",
            SampleRequest,
            sampling.sample,
            attrgetter("sampling_session_id", "seq_id"),
            protobuf_result=wire.encode_sample,
            json_form=results.sample_json,
        ),
    )
}


def decode(operation: Operation) -> Operation:
    """Return the operation with its decoded request. Raises ValidationError, MalformedBody."""
    assert operation.body is not None, "the body has been read"
    request = OPERATIONS[operation.operation_kind].decode(operation.body, operation.content_type)
    return replace(operation, request=request)
