"""Operations whose numbers come late, over HTTP: the gradient of a step is the sum of its parts, or the step fails.

pytest tests/contract/test_late_numbers.py
"""

import itertools
from collections.abc import Iterator

import pytest

from api_schemas.wire import PROTOBUF
from tests.fake_server import Running, forward_backward_body
from tests.fakes import FakeBackend

GRACE_S = 0.1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("late") / "data", backend=FakeBackend(), gap_grace_s=GRACE_S)
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
