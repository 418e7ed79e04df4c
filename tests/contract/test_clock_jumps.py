"""The clock of a server's machine is set a day ahead and an hour back: its clients' work goes on, and nothing is lost.

The clients are on other machines, whose clocks are right.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from tests.fake_server import datum
from tests.servers import Server
from tinker_server.auth import keys

HOUR_S, DAY_S = 3600, 24 * 3600
FAKES_WITH_A_CLOCK = """
import os, sys, time
from pathlib import Path
right, offset = time.time, Path(os.environ["CLOCK"])
time.time = lambda: right() + float(offset.read_text())
import tinker_server.__main__ as main, tinker_server.app as app
from tests.fakes import FakeBackend
main.create_app = lambda settings, on_loading: app.create_app(settings, FakeBackend())
sys.exit(main.main())
"""
SWEEPS_S = 1.5
"""Time for several rounds of housekeeping, which runs four times a second."""


class Clock:
    """The clock of the server's machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def set(self, ahead_s: float) -> None:
        aside = self._path.with_suffix(".new")
        aside.write_text(str(ahead_s))
        aside.rename(self._path)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("CLOCK", str(tmp_path / "clock"))
    return Clock(tmp_path / "clock")


@pytest.fixture
def key(tmp_path: Path) -> str:
    return keys.add(tmp_path / "data" / "keys", "alice")


@pytest.fixture
def server(tmp_path: Path, clock: Clock, key: str) -> Iterator[Server]:
    program = ("-c", FAKES_WITH_A_CLOCK)
    server = Server(tmp_path / "data", {"tiny": tmp_path}, program=program, session_timeout_s=1).start()
    yield server
    if server.process.poll() is None:
        server.stop()


def train(model: tinker.TrainingClient) -> None:
    model.forward_backward([datum()], "cross_entropy").result(30)
    model.optim_step(types.AdamParams()).result(30)


def test_work_goes_on_and_nothing_is_lost_while_the_clock_jumps(server: Server, clock: Clock, key: str) -> None:
    service = tinker.ServiceClient(base_url=server.base_url, api_key=key)
    model = service.create_lora_training_client("tiny", rank=8).result(30)
    train(model)
    kept = model.save_state("kept", ttl_seconds=2 * HOUR_S).result(30).path
    http = httpx.Client(base_url=f"{server.base_url}/api/v1", headers={"x-api-key": key}, timeout=30)
    for ahead_s in (DAY_S + HOUR_S, 0, -HOUR_S, 0):
        clock.set(ahead_s)
        time.sleep(SWEEPS_S)
        train(model)
        name = f"at-{time.monotonic_ns()}"
        made = model.save_state(name, ttl_seconds=2 * HOUR_S).result(30).path
        train(service.create_training_client_from_state_with_optimizer(made).result(30))
        sampler = model.save_weights_and_get_sampling_client().result(30)
        sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result(30)
        found = {one["tinker_path"] for one in http.get("/checkpoints").raise_for_status().json()["checkpoints"]}
        assert made in found
        assert (kept in found) == (ahead_s <= HOUR_S), "it is as old as the clock says, and not deleted"
    train(service.create_training_client_from_state_with_optimizer(kept).result(30))
    clock.set(DAY_S + HOUR_S)
    assert server.stop() == 0
    clock.set(0)
    server.start()  # at a time that is before what it wrote last
    train(model)
    assert http.get("/training_runs").status_code == 200
    http.close()
    text = server.log.read_text()
    assert "Traceback" not in text and "deleting" not in text, text
