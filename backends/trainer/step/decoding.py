"""Decode the body of a forward_backward, of either content type and of every SDK. The server has checked these very
bytes before. Needs no torch."""

import contextlib

from pydantic import ValidationError

from tinker_server.api_schemas import wire
from tinker_server.api_schemas.old_clients.forward import ForwardRequest
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest
from tinker_server.backends.protocol import EncodedBatch, InvalidInput


def decode_batch(batch: EncodedBatch) -> ForwardBackwardInput:
    """Decode a request's body. Raises InvalidInput if it is not what its content type says."""
    try:
        if batch.content_type == wire.PROTOBUF:
            return wire.decode_checked(batch.body)
        with contextlib.suppress(ValidationError):
            return ForwardRequest.model_validate_json(batch.body).forward_input
        return ForwardBackwardRequest.model_validate_json(batch.body).forward_backward_input
    except wire.MalformedBody as error:
        raise InvalidInput(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
