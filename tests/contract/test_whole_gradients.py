"""The gradient is whole or the step fails: drawn sequences of what can happen to a model's requests.

pytest tests/contract/test_whole_gradients.py
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fake_server import Running, forward_backward_body
from tests.fakes import FakeBackend

PROTOBUF = {"content-type": "application/x-protobuf"}
ACTIONS = ["good", "forward", "failing", "refused", "too large", "never sent", "suspended", "restarted", "cut", "step"]
ACTIONS += ["snapshot", "trainer died", "killed"]
"""Events between two steps. `cut`: the server is stopped while the request runs. `killed`: the next server finds
what the disk held while a request ran."""


@dataclass
class History:
    """One model, and what its client knows of its gradient."""

    model_id: str
    seq_id: int = 0
    next_token: int = 1
    submitted: dict[int, httpx.Response] = field(default_factory=dict)
    """The answers to accepted requests since the last step, by their datum's token."""
    is_missing: bool = False
    """True if a request since the last step was refused or never arrived."""
    steps: list[list[int]] = field(default_factory=list)
    """The tokens of every step that was taken."""

    def number(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def token(self) -> int:
        self.next_token += 1
        return self.next_token


class Run:
    """A server that can be restarted, and the client of one model at a time."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._start()

    def _start(self) -> None:
        self.server = Running(self._data_dir, backend=FakeBackend(), gap_grace_s=0.05, poll_hold_s=5, drain_s=0.05)
        self.trainer = self.server.backend.tiny.trainer

    def model(self) -> None:
        self.history = History(self.server.model())

    def act(self, action: str) -> None:
        history = self.history
        match action:
            case "good":
                self._submit(history.token())
            case "failing":
                self._submit(history.token(), loss_fn="wrong")
            case "forward":
                body = {"data": [DATUM], "loss_fn": "cross_entropy"}
                answer = self.server.post(
                    "/forward", model_id=history.model_id, seq_id=history.number(), forward_input=body
                )
                assert answer.status_code == 200, answer.text
            case "refused":
                self._refused(forward_backward_body(history.model_id, history.number(), tokens=b"\1\0\0"), 400)
            case "too large":
                large = forward_backward_body(history.model_id, history.number(), tokens=bytes(1 << 21))
                self._refused(large, 413)
            case "never sent":
                history.number()
                history.is_missing = True
            case "step":
                self._step()
            case _:
                self._happen(action)

    def _happen(self, event: str) -> None:
        """To processes, not to requests."""
        history = self.history
        match event:
            case "suspended":
                self._suspend()
            case "restarted":
                self._restart()
            case "cut":
                self.server.set_gate(self.trainer.gates["cut"], is_open=False)
                self._submit(history.token(), loss_fn="cut")
                self._restart()
            case "snapshot":
                self._snapshot()
            case "trainer died":
                self.trainer.lose(*self.trainer.steps)
            case "killed":
                self.server.set_gate(self.trainer.gates["cut"], is_open=False)
                self._submit(history.token(), loss_fn="cut")
                self._kill()

    def _submit(self, token: int, loss_fn: str = "cross_entropy") -> None:
        history = self.history
        body = forward_backward_body(history.model_id, history.number(), token.to_bytes(4, "little"), loss_fn)
        answer = self.server.http.post("/forward_backward", content=body, headers=PROTOBUF)
        if answer.status_code == 200:
            history.submitted[token] = answer
        else:
            history.is_missing = True

    def _refused(self, body: bytes, status: int) -> None:
        answer = self.server.http.post("/forward_backward", content=body, headers=PROTOBUF)
        assert answer.status_code == status, answer.text
        self.history.is_missing = True

    def _suspend(self) -> None:
        services = self.server.app.state.services

        async def suspend() -> None:
            await services.scheduler.suspend(self.history.model_id)

        for answer in self.history.submitted.values():
            self.server.result(answer)  # only an idle model is suspended
        asyncio.run_coroutine_threadsafe(suspend(), self.server.loop).result(10)

    def _snapshot(self) -> None:
        """Begun with the next operation, and written while others run."""
        scheduler = self.server.app.state.services.scheduler

        async def make_due() -> None:
            scheduler.actor(self.history.model_id).model.log.must_end = True

        asyncio.run_coroutine_threadsafe(make_due(), self.server.loop).result(10)

    def _kill(self) -> None:
        left = self._data_dir.with_name(f"{self._data_dir.name}+")
        shutil.copytree(self._data_dir, left)
        self.server.set_gate(self.trainer.gates["cut"], is_open=True)
        self.server.stop()
        shutil.rmtree(self._data_dir)
        self._data_dir = left
        self._start()

    def _restart(self) -> None:
        self.server.stop()
        self._start()

    def _step(self) -> None:
        """Submit a step, then look at every answer, as the SDK does."""
        history = self.history
        submitted = self.server.post(
            "/optim_step", model_id=history.model_id, seq_id=history.number(), adam_params={"learning_rate": 0.1}
        )
        acknowledged = []
        for token, answer in history.submitted.items():
            result = self.server.result(answer)
            if result.headers["content-type"] == "application/x-protobuf":
                acknowledged.append(token)
            else:
                history.is_missing = True
        stepped = self.server.result(submitted).json()
        text = stepped.get("error", "")
        if history.is_missing:
            assert "incomplete" in text, f"stepped on {acknowledged}, and more was sent"
        else:
            assert not text, text
            history.steps.append(acknowledged)
        # If it was restored, the trainer took the steps after the model's snapshot again.
        applied = [gradient for model_id, gradient in self.trainer.applied if model_id == history.model_id]
        assert applied == history.steps[len(history.steps) - len(applied) :]
        assert self.trainer.steps[history.model_id] == len(history.steps)
        history.submitted.clear()
        history.is_missing = False


DATUM = {
    "model_input": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
    "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64", "shape": [1]}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("gradients") / "data")
    yield run
    run.server.stop()


def applies_what_it_acknowledged(run: Run, actions: list[str]) -> None:
    """Every step applies exactly the acknowledged requests, or fails."""
    run.model()
    for action in [*actions, "step", "good", "step"]:
        run.act(action)


def drawn(max_examples: int) -> settings:
    checks = list(HealthCheck)
    return settings(
        max_examples=max_examples, deadline=None, derandomize=True, database=None, suppress_health_check=checks
    )


SEQUENCES = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=10)


@drawn(4)
@given(actions=SEQUENCES)
@example(actions=["good", "refused"])
@example(actions=["good", "too large"])
@example(actions=["good", "never sent"])
@example(actions=["refused", "good", "step", "good"])
@example(actions=["failing", "suspended", "good"])
@example(actions=["good", "suspended", "cut"])
@example(actions=["good", "killed", "good"])
@example(actions=["good", "step", "snapshot", "good", "good", "killed", "trainer died", "good"])
@example(actions=["good", "snapshot", "failing", "trainer died", "step", "good", "killed"])
@example(actions=["good", "snapshot", "good", "trainer died", "step", "never sent", "good", "killed"])
@example(actions=["good", "suspended", "failing", "restarted", "good"])
@example(actions=["good", "refused", "suspended", "restarted", "good"])
def test_every_step_applies_exactly_the_acknowledged_requests_or_fails(run: Run, actions: list[str]) -> None:
    applies_what_it_acknowledged(run, actions)


@pytest.mark.slow
@drawn(40)
@given(actions=SEQUENCES)
def test_every_step_of_many_sequences_applies_exactly_the_acknowledged_requests_or_fails(
    run: Run, actions: list[str]
) -> None:
    applies_what_it_acknowledged(run, actions)
