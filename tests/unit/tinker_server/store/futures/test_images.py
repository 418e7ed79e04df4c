"""Images of requests that may run again are stored once, for as long as one of them needs them."""

import base64
import json

import numpy as np
import pytest
from sqlalchemy import func, select

from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.training import ForwardBackwardRequest
from tinker_server.store.database import Database
from tinker_server.store.futures import replay_log
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.rows import FutureRows
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.tables import Future, Image, ImagePlaceRow
from tinker_server.web.submission import image_places

OWNER = "alice"
IMAGES = [bytes(8192) + np.random.default_rng(seed).bytes(1000) + bytes(8192) for seed in range(3)]
"""Files of one length that begin and end alike, as those of one camera may."""


def protobuf_body(images: list[bytes]) -> bytes:
    data = []
    for image in images:
        chunks = [
            pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0\0")),
            pb.Chunk(image=pb.ImageChunk(data=image, format="png")),
        ]
        data.append(pb.Datum(model_input=chunks, loss_fn_inputs={}))
    return pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=data, loss_fn="x").SerializeToString()


def json_body(images: list[bytes]) -> bytes:
    chunks = [
        {"type": "image", "data": base64.b64encode(image).decode(), "format": "png", "height": 3} for image in images
    ]
    data = [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {}} for chunk in chunks]
    work = {"data": data, "loss_fn": "x"}
    return json.dumps({"model_id": "m", "seq_id": 1, "forward_backward_input": work}).encode()


BODIES = {wire.PROTOBUF: protobuf_body, wire.JSON: json_body}


def operation(seq_id: int, images: list[bytes], content_type: str = wire.PROTOBUF, lane: str = "model") -> Operation:
    body = BODIES[content_type](images)
    if content_type == wire.PROTOBUF:
        request = wire.decode_forward_backward(body)
    else:
        request = ForwardBackwardRequest.model_validate_json(body)
    places = image_places(body, content_type, request)
    return Operation(
        "forward_backward", lane, seq_id, body, content_type, OWNER, f"digest {seq_id}", len(body), images=places
    )


async def stored(db: Database) -> tuple[int, int]:
    """Return the numbers of stored images and of their positions."""
    async with db.read() as session:
        counts = [await session.scalar(select(func.count()).select_from(table)) for table in (Image, ImagePlaceRow)]
    return counts[0] or 0, counts[1] or 0


@pytest.fixture
def recent_bytes() -> int:
    return 0


async def end(futures: FutureStore, operation: Operation, *, failed: bool = False) -> None:
    category = "user" if failed else None
    result = Result(b"{}", "application/json", failed, category)
    futures.queue.complete(operation.request_id, result, logged=True)
    await futures.queue.flush()


@pytest.mark.parametrize("content_type", BODIES)
async def test_images_are_stored_once_and_every_body_comes_back_as_it_was(
    db: Database, futures: FutureStore, content_type: str
) -> None:
    orders = [IMAGES, IMAGES[:1], [IMAGES[2], IMAGES[0]], [IMAGES[0], IMAGES[0]], []]
    operations = [operation(number, images, content_type) for number, images in enumerate(orders)]
    assert [len(one.images) for one in operations] == [3, 1, 2, 2, 0]
    for one in operations:
        assert (await futures.queue.enqueue(one)).is_new
    assert await stored(db) == (3, 8)
    for one in operations:
        assert await futures.rows.body(one.request_id) == one.body
    async with db.read() as session:
        rests = await session.execute(select(func.sum(func.length(Future.request))))
    assert rests.scalar_one() < 2000


async def test_an_image_is_deleted_with_the_last_request_that_needs_it(db: Database, futures: FutureStore) -> None:
    one, two, failing = operation(1, IMAGES[:2]), operation(2, IMAGES[1:]), operation(3, IMAGES)
    for each in (one, two, failing):
        await futures.queue.enqueue(each)
    await end(futures, one)
    await end(futures, two)
    await end(futures, failing, failed=True)
    assert await stored(db) == (3, 4), "what is logged may run again, what failed may not"
    assert await futures.rows.body(one.request_id) == one.body
    await db.change(lambda session: replay_log.truncate(session, "model", 1))
    assert await stored(db) == (2, 2)
    assert await futures.rows.body(two.request_id) == two.body and await futures.rows.body(one.request_id) == b""
    await db.change(lambda session: replay_log.truncate(session, "model", None))
    assert await stored(db) == (0, 0)


async def test_a_repeat_and_a_conflict_store_no_image(db: Database, futures: FutureStore) -> None:
    first = operation(1, IMAGES[:1])
    await futures.queue.enqueue(first)
    assert not (await futures.queue.enqueue(operation(1, IMAGES[:1]))).is_new
    await futures.queue.enqueue(operation(1, IMAGES[1:], lane="another model"))
    assert await stored(db) == (3, 3)
    rows = FutureRows(db)
    await rows.insert([first], 1.0)  # as after a commit whose answer was lost
    assert await stored(db) == (3, 3) and await rows.body(first.request_id) == first.body


async def test_the_next_server_counts_the_images_of_waiting_bodies(db: Database, futures: FutureStore) -> None:
    waiting = operation(1, IMAGES)
    await futures.queue.enqueue(waiting)
    (left,) = await FutureRows(db).read_queue()
    assert left.size_bytes == len(waiting.body or b"")


def test_an_image_in_an_unknown_form_stays_in_the_body() -> None:
    body = json_body(IMAGES[:1]).replace(b"+", b"\\u002b")
    request = ForwardBackwardRequest.model_validate_json(body)
    assert image_places(body, wire.JSON, request) == ()
    assert (
        image_places(protobuf_body([b"small"]), wire.PROTOBUF, wire.decode_forward_backward(protobuf_body([b"small"])))
        == ()
    )
