"""Images that a request names by address (`image_asset_pointer` chunks). They are read before the request is accepted,
so that it means the same whenever it runs."""

from collections.abc import Iterator
from typing import TypeVar

from tinker_server.api_schemas.base import Request
from tinker_server.api_schemas.inputs import ImageAssetPointerChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.old_clients.forward import ForwardRequest
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest
from tinker_server.errors import BadRequest
from tinker_server.image_addresses import ImageAddresses
from tinker_server.offload import LARGE, off_loop

R = TypeVar("R", bound=Request)


async def with_images(request: R, addresses: ImageAddresses, owner: str) -> R | None:
    """Return the request with each pointer replaced by its image; None if it has no pointers.

    Raises BadRequest for an image that may not or cannot be read, and for too many bytes in all.
    """
    pointers = [
        (f"{where}, chunk {index}", chunk.location)
        for where, model_input in _inputs(request)
        for index, chunk in enumerate(model_input.chunks)
        if isinstance(chunk, ImageAssetPointerChunk)
    ]
    if not pointers:
        return None
    if not addresses.hosts and not addresses.directories:
        raise BadRequest(
            "image_asset_pointer chunks are not supported here: the operator names no host (setting image_hosts) and no"
            " directory (image_directories) that images are read from; send image chunks with the file's bytes"
        )
    files = await addresses.read_all(pointers, "image_asset_pointer chunks", owner)
    return await off_loop(owner, LARGE, _replace, request, files)


def _inputs(request: Request) -> Iterator[tuple[str, ModelInput]]:
    """Yield the inputs of a request, each with its name."""
    match request:
        case SampleRequest():
            yield "prompt", request.prompt
        case ForwardBackwardRequest(forward_backward_input=batch) | ForwardRequest(forward_input=batch):
            for index, datum in enumerate(batch.data):
                yield f"datum {index}", datum.model_input


def _replace(request: R, files: dict[str, bytes]) -> R:
    match request:
        case SampleRequest():
            return request.model_copy(update={"prompt": _input(request.prompt, files)})
        case ForwardBackwardRequest():
            of_data = _batch(request.forward_backward_input, files)
            return request.model_copy(update={"forward_backward_input": of_data})
        case ForwardRequest():
            return request.model_copy(update={"forward_input": _batch(request.forward_input, files)})
    return request


def _batch(batch: ForwardBackwardInput, files: dict[str, bytes]) -> ForwardBackwardInput:
    data = [datum.model_copy(update={"model_input": _input(datum.model_input, files)}) for datum in batch.data]
    return batch.model_copy(update={"data": data})


def _input(model_input: ModelInput, files: dict[str, bytes]) -> ModelInput:
    chunks = [
        ImageChunk(data=files[chunk.location], format=chunk.format, expected_tokens=chunk.expected_tokens)
        if isinstance(chunk, ImageAssetPointerChunk)
        else chunk
        for chunk in model_input.chunks
    ]
    return model_input.model_copy(update={"chunks": chunks})
