"""Where the images of a forward_backward lie in its body, so that each is stored once."""

import base64
import hashlib
from collections.abc import Iterator

from api_schemas import wire
from api_schemas.inputs import ImageChunk
from api_schemas.training import ForwardBackwardRequest
from tinker_server.store.futures.records import ImagePlace

SMALLEST_BYTES = 4096
"""A place and an image of its own take a few hundred bytes in the database."""


def image_places(body: bytes, content_type: str, request: ForwardBackwardRequest) -> tuple[ImagePlace, ...]:
    """In order; as far as they are found there in the form and order that clients send them in."""
    places, at = [], 0
    for image in _images(request):
        data = image if content_type == wire.PROTOBUF else base64.b64encode(image)
        start = body.find(data, at)
        if start < 0:
            break
        at = start + len(data)
        places.append(ImagePlace(start, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(places)


def _images(request: ForwardBackwardRequest) -> Iterator[bytes]:
    for datum in request.forward_backward_input.data:
        for chunk in datum.model_input.chunks:
            if isinstance(chunk, ImageChunk) and len(chunk.data) >= SMALLEST_BYTES:
                yield chunk.data
