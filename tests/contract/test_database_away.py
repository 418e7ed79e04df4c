"""PostgreSQL goes away or falls silent while a client works: it is refused or waits, and nothing is lost or done twice.

pytest tests/contract/test_database_away.py -m "slow or not slow"
"""

import logging
import re
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.away import way_to
from tests.fake_server import Running, forward_backward_body
from tinker_server.store import lease
from tinker_server.store.database import RETRY_S

PATIENCE_S = 120
LONG_S = RETRY_S + 5
"""Longer than work waits for the database, so that it is refused."""


class Work:
    """Steps of one model, sent again as often as the server says, until `end` is called."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._model_id = running.model()
        self._is_ending = threading.Event()
        self.answered: list[tuple[bytes, str, bytes]] = []
        """Body, request_id, result."""
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Work":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the work does not end"
        if self.error is not None:
            raise self.error

    def await_steps(self, count: int) -> None:
        """Returns once so many more were taken."""
        wanted, deadline = len(self.answered) + 2 * count, time.monotonic() + PATIENCE_S
        while len(self.answered) < wanted and self.error is None:
            assert time.monotonic() < deadline, "no steps are taken"
            time.sleep(0.02)

    def submit(self, body: bytes) -> httpx.Response:
        if body.startswith(b"{"):
            return self._running.http.post("/optim_step", content=body, headers={"content-type": "application/json"})
        headers = {"content-type": "application/x-protobuf"}
        return self._running.http.post("/forward_backward", content=body, headers=headers)

    def poll(self, request_id: str) -> httpx.Response:
        return self._running.post("/retrieve_future", request_id=request_id)

    def _run(self) -> None:
        try:
            number = 1
            while not self._is_ending.is_set():
                passed = forward_backward_body(self._model_id, number)
                step = b'{"model_id":"%s","seq_id":%d}' % (self._model_id.encode(), number + 1)
                for body in (passed, step):
                    request_id = self._at_last(lambda body=body: self.submit(body)).json()["request_id"]
                    result = self._at_last(lambda request_id=request_id: self.poll(request_id))
                    assert b'"error"' not in result.content, result.text
                    self.answered.append((body, request_id, result.content))
                number += 2
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error

    def _at_last(self, ask: object) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            answer: httpx.Response = ask()  # type: ignore[operator]
            if answer.status_code == 200:
                return answer
            assert answer.status_code in (408, 503), answer.text
            if answer.status_code == 503:
                assert answer.headers["retry-after"] and "does not answer" in answer.json()["detail"], answer.text
                time.sleep(0.1)
        raise AssertionError("there was no answer")


@pytest.mark.parametrize("away_s", [2, pytest.param(LONG_S, marks=pytest.mark.slow)])
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_postgresql_that_is_away_costs_a_pause(database_url: str, tmp_path: Path, away_s: float) -> None:
    with way_to(database_url) as way:
        running = Running(tmp_path, database_url=way.url)
        try:
            with Work(running) as work:
                other = running.model()
                work.await_steps(3)
                way.close()
                refused = running.post("/optim_step", model_id=other, seq_id=1)
                assert refused.status_code == 503 and refused.headers["retry-after"], refused.text
                time.sleep(away_s)
                assert running.http.get("/healthz").status_code == 200
                assert work.error is None
                way.open()
                work.await_steps(3)
            applied = [gradient for _, gradient in running.backend.tiny.trainer.applied]
            assert applied == [[1]] * (len(work.answered) // 2), "a step was lost, or taken twice"
            for body, request_id, result in work.answered:
                assert work.submit(body).json()["request_id"] == request_id
                assert work.poll(request_id).content == result
        finally:
            running.stop()


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.parametrize("silent_s", [9, pytest.param(LONG_S, marks=pytest.mark.slow)])
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_network_that_silently_loses_everything_costs_a_pause(
    database_url: str,
    tmp_path: Path,
    silent_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lease, "SILENCE_S", 1.0)
    caplog.set_level(logging.INFO, logger="tinker_server")
    with way_to(database_url) as way:
        running = Running(tmp_path, database_url=way.url)
        try:
            with Work(running) as work:
                work.await_steps(3)
                way.silence()
                time.sleep(silent_s)
                way.speak()
                spoke_at = time.monotonic()
                work.await_steps(3)
                print(f"steps again after {time.monotonic() - spoke_at:.1f} s")
                assert time.monotonic() - spoke_at < 12
            applied = [gradient for _, gradient in running.backend.tiny.trainer.applied]
            assert applied == [[1]] * (len(work.answered) // 2), "a step was lost, or taken twice"
        finally:
            running.stop()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    print("\n".join(warnings))
    begun = [line for line in warnings if re.match("the database does not answer (reads|writes)", line)]
    assert len(begun) == len(set(begun)) in (1, 2), "reads and writes, once each"
    assert sum("again, " in line and "that failed" in line for line in warnings) in (1, 2)
    assert len(warnings) <= 8
