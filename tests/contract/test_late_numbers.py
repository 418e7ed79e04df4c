"""Operations whose numbers come late, over HTTP: the gradient of a step is the sum of its parts, or the step fails.

pytest tests/contract/test_late_numbers.py
"""

import asyncio
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker import types

from tests.factories import present
from tests.fake_server import Running, forward_backward_body
from tests.fakes import FakeBackend
from tinker_server.api_schemas.wire import PROTOBUF, envelope_of

GRACE_S = 0.1
UPLOAD_S = 1.0
"""Time until the one slow part of a batch arrives: as many times the grace as a real server's 5 s are 50."""


class SlowUplink:
    """Brings the body of one part of a batch late, once it has begun."""

    def __init__(self) -> None:
        self.slow_number = 0
        """Number of the slow part; 0: none."""
        self.arrived: list[int] = []
        """Numbers of parts, in the order in which their bodies were whole."""

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, behind it."""

        async def delayed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].endswith("/forward_backward"):
                await app(scope, receive, send)
                return
            messages = [await receive()]
            while messages[-1].get("more_body"):
                messages.append(await receive())
            number = present(envelope_of(b"".join(message["body"] for message in messages)))[1]

            async def read() -> Message:
                if number == self.slow_number and len(messages) == 1:
                    await asyncio.sleep(UPLOAD_S)
                if len(messages) == 1:
                    self.arrived.append(number)
                return messages.pop(0) if messages else await receive()

            await app(scope, read, send)

        return delayed


@pytest.fixture(scope="module")
def uplink() -> SlowUplink:
    return SlowUplink()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, uplink: SlowUplink) -> Iterator[Running]:
    running = Running(
        tmp_path_factory.mktemp("late") / "data", backend=FakeBackend(), around=uplink.around, gap_grace_s=GRACE_S
    )
    yield running
    running.stop()


class Client:
    """Sends the operations of one model under any numbers; a part's token is its number."""

    def __init__(self, server: Running) -> None:
        self.server, self.model_id = server, server.model()
        self.trainer = server.backend.tiny.trainer

    def part(self, number: int):
        body = forward_backward_body(self.model_id, number, number.to_bytes(4, "little"))
        return self.server.http.post("/forward_backward", content=body, headers={"content-type": PROTOBUF})

    def step(self, number: int):
        return self.server.post("/optim_step", model_id=self.model_id, seq_id=number, adam_params={})

    def send(self, number: int):
        return self.step(number) if number in (4, 6) else self.part(number)

    def result(self, answer) -> dict:
        found = self.server.result(answer)
        return found.json() if "json" in found.headers["content-type"] else {}

    @property
    def steps(self) -> list[list[int]]:
        """The parts of each gradient that was applied."""
        return [gradient for model_id, gradient in self.trainer.applied if model_id == self.model_id]


def failed(result: dict) -> bool:
    return "error" in result


def test_a_late_part_whose_step_was_not_taken_makes_the_gradient_whole(server):
    client = Client(server)
    first, third = client.part(1), client.part(3)
    client.result(first), client.result(third)
    second = client.part(2)
    assert second.status_code == 200
    client.result(second)
    assert not failed(client.result(client.step(4)))
    assert [sorted(step) for step in client.steps] == [[1, 2, 3]]


def test_a_part_that_comes_after_its_step_is_refused_and_goes_into_no_other(server):
    client = Client(server)
    for number in (1, 3):
        client.result(client.part(number))
    assert "incomplete" in client.result(client.step(4))["error"]
    late = client.part(2)
    assert late.status_code == 400
    assert "forward_backward 2" in late.json()["detail"] and "too late" in late.json()["detail"]
    client.result(client.part(5))
    assert not failed(client.result(client.step(6)))
    assert [sorted(step) for step in client.steps] == [[5]]


def test_a_step_that_comes_late_is_refused_and_clears_nothing(server):
    client = Client(server)
    for number in (1, 3):
        client.result(client.part(number))
    late = client.step(2)
    assert late.status_code == 400 and "optim_step 2" in late.json()["detail"]
    assert "incomplete" in client.result(client.step(4))["error"], "number 2 was no part, as far as anybody knows"
    client.result(client.part(5))
    assert not failed(client.result(client.step(6)))
    assert [sorted(step) for step in client.steps] == [[5]]


def test_a_repeat_of_what_has_run_gets_its_first_request_id(server):
    client = Client(server)
    answers = {number: client.send(number) for number in (1, 2, 3, 4)}
    for answer in answers.values():
        client.result(answer)
    for number, answer in answers.items():
        assert client.send(number).json() == answer.json()
    assert [sorted(step) for step in client.steps] == [[1, 2, 3]]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("slow_number", [1, 2, 5, 8])
def test_a_part_of_the_sdks_that_uploads_slowly_beside_seven_others_is_in_the_step(server, uplink, slow_number):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        training = client.create_lora_training_client("tiny", rank=8).result()
        side_by_side = {"parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": 1}
        client.holder._client_config = client.holder.get_client_config().model_copy(update=side_by_side)
        uplink.slow_number, uplink.arrived = slow_number, []
        try:
            outputs = training.forward_backward([token_datum(token) for token in range(10, 18)], "cross_entropy")
            stepped = training.optim_step(types.AdamParams())
            assert len(outputs.result().loss_fn_outputs) == 8
            stepped.result()
        finally:
            uplink.slow_number = 0
    assert len(uplink.arrived) == 8 and uplink.arrived[-1] == 1, "the SDK sends the first part last"
    applied = [gradient for model_id, gradient in server.backend.tiny.trainer.applied if model_id == training.model_id]
    assert [sorted(gradient) for gradient in applied] == [list(range(10, 18))]


def token_datum(token: int) -> types.Datum:
    target = types.TensorData.from_numpy(np.array([token]))
    return types.Datum(model_input=types.ModelInput.from_ints([token]), loss_fn_inputs={"target_tokens": target})


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3, 4)))[::2], ids=str)
def test_in_every_order_a_step_has_all_its_parts_or_fails(server, order):
    """Each operation has ended before the next is sent."""
    client = Client(server)
    taken_at = None
    for number in order:
        answer = client.send(number)
        if taken_at is not None and number < 4:
            assert answer.status_code == 400, "its step was taken"
            continue
        result = client.result(answer)
        if number == 4:
            taken_at = order.index(4)
            is_whole = {1, 2, 3} <= set(order[:taken_at])
            assert failed(result) != is_whole
    for number in (5,):
        client.result(client.part(number))
    assert not failed(client.result(client.step(6)))
    assert [sorted(step) for step in client.steps] == ([[1, 2, 3], [5]] if order[3] == 4 else [[5]])
