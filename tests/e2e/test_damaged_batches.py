"""Damaged batches on the true trainer: each is refused or done, none fails the server, and no model notices.

pytest tests/e2e/test_damaged_batches.py -m slow
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.factories import MIXED, batch, datum
from tests.servers import KEY, MODEL, Server
from tests.training import logprobs_of
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.backends.inputs.rendering import Renderer

BATCHES, SEED = 200, 1
GAP_S = 0.1
"""The server waits no longer for the number of a batch that it could not read, to which it answered."""


def damaged(body: bytes, draw: random.Random) -> bytes:
    """The body with a few bytes changed, left out or repeated."""
    changed = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed))
        match draw.randrange(3):
            case 0:
                changed[at] = draw.randrange(256)
            case 1:
                del changed[at : at + draw.randint(1, 8)]
            case _:
                changed[at:at] = changed[at : at + draw.randint(1, 8)]
    return bytes(changed)


@pytest.fixture
def server(tiny_vl: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "data", {MODEL: tiny_vl}, gap_grace_s=GAP_S).start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]


@pytest.mark.slow
def test_damaged_batches_are_refused_or_done_and_no_other_model_notices(server: Server, renderer: Renderer) -> None:
    draw = random.Random(SEED)
    bystander, victim = (server.client().create_lora_training_client(MODEL, rank=4).result() for _ in "ab")
    probe = [datum(one, renderer) for one in MIXED.values()]
    before = logprobs_of(bystander, probe)
    data = batch([datum(one, renderer, seed) for seed, one in enumerate(MIXED.values())], "cross_entropy").body
    datums = pb.ForwardBackwardRequest.FromString(data)
    statuses: set[int] = set()
    outcomes: set[str] = set()
    with httpx.Client(base_url=f"{server.base_url}/api/v1", headers={"x-api-key": KEY}, timeout=60) as http:
        for number in range(1, BATCHES + 1):
            envelope = pb.ForwardBackwardRequest(model_id=victim.model_id, seq_id=number, loss_fn="cross_entropy")
            some = pb.ForwardBackwardRequest(data=[draw.choice(datums.data)]).SerializeToString()
            body = damaged(some, draw) + envelope.SerializeToString()
            answer = http.post("/forward_backward", content=body, headers={"content-type": wire.PROTOBUF})
            statuses.add(answer.status_code)
            if answer.status_code != 200:
                assert 400 <= answer.status_code < 500, answer.text
                continue
            while (result := http.post("/retrieve_future", json=answer.json())).status_code == 408:
                pass
            assert result.status_code == 200, result.text
            failed = json.loads(result.content) if b'"category"' in result.content else None
            outcomes.add("done" if failed is None else failed["category"])
    assert statuses > {200} and outcomes == {"done", "user"}, (statuses, outcomes)
    for one, wanted in zip(logprobs_of(bystander, probe), before, strict=True):
        np.testing.assert_array_equal(one, wanted)
