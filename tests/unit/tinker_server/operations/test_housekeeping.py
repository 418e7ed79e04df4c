"""Ages are measured by a clock that may be set ahead, and what is old and unused is deleted."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import update

from tests.fake_server import Running
from tests.submitting import server
from tinker_server.api_schemas.training import Trainable
from tinker_server.operations import housekeeping
from tinker_server.operations.housekeeping import HELD_S, SNAPSHOT_KEPT_S, SteadyClock
from tinker_server.store.records import Checkpoint
from tinker_server.store.tables import SessionRow

DAY_S = 24 * 3600.0
NOW = 1e9


@dataclass
class Machine:
    """Its two clocks: what it says, and how long it has run."""

    wall: float = NOW
    passed: float = 100.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.passed

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.passed += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(housekeeping, "time", machine)
    return machine


@pytest.fixture
def steady(machine: Machine) -> SteadyClock:
    return SteadyClock()


def test_a_clock_that_is_set_ahead_makes_nothing_old_at_once(
    machine: Machine, steady: SteadyClock, caplog: pytest.LogCaptureFixture
) -> None:
    machine.wait(50)
    machine.wall += 365 * DAY_S
    assert steady() == NOW + 50
    machine.wait(3600)
    assert steady() == NOW + 3650
    assert caplog.text.count("set ahead by 31536000 s") == 1
    machine.wall -= 365 * DAY_S
    assert steady() == NOW + 3650


def test_a_clock_that_stays_ahead_is_followed_in_the_end(machine: Machine, steady: SteadyClock) -> None:
    machine.wall += 10 * DAY_S
    assert steady() == NOW
    machine.wait(HELD_S)
    assert steady() == machine.wall == NOW + 11 * DAY_S
    machine.wait(5)
    assert steady() == machine.wall


def test_small_changes_and_a_clock_that_is_set_back_are_followed(machine: Machine, steady: SteadyClock) -> None:
    machine.wall += 30
    assert steady() == NOW + 30
    machine.wall -= DAY_S
    assert steady() == NOW + 30 - DAY_S
    machine.wall += DAY_S
    assert steady() == NOW + 30


def test_a_server_whose_clock_is_set_ahead_keeps_snapshots_results_and_what_may_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time
    running = Running(tmp_path, session_timeout_s=1)  # so that house is kept four times a second
    try:
        model_id = running.model()
        saved = running.post("/save_weights", model_id=model_id, seq_id=1, path="a")
        running.result(saved)
        until = time.monotonic() + 10
        while not suspended(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.05)
        (snapshot,) = suspended(tmp_path)
        given_up = running.app.state.services.storage.reserve(model_id, "weights", "given-up")
        directory = tmp_path / asyncio.run_coroutine_threadsafe(given_up, running.loop).result(10)
        directory.mkdir(parents=True)
        monkeypatch.setattr(time, "time", lambda: right() + 365 * DAY_S)
        time.sleep(1)
        monkeypatch.undo()
        assert suspended(tmp_path) == [snapshot]
        assert directory.is_dir(), "a sample that has begun may still read it"
        assert running.result(saved).status_code == 200
    finally:
        running.stop()


def suspended(data_dir: Path) -> list[Path]:
    """Snapshots of models that are on disk."""
    return [one for one in data_dir.glob("checkpoints/*/snapshots/model~*") if one.is_dir()]


async def test_a_model_whose_client_works_without_heartbeats_outlasts_a_sweep(tmp_path: Path) -> None:
    """Its session is older than snapshots are kept without a sign of life."""
    heard = time.time() - SNAPSHOT_KEPT_S - DAY_S
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await client.result(await client.optim_step(1))
        model_id, now = client.model_id, time.time()
        aged = update(SessionRow).values(created_at=heard, last_heartbeat=heard)
        await client.services.runs._db.change(lambda session: session.execute(aged))
    async with server(tmp_path) as client:  # which finds the model on disk
        await client.services.housekeeper.sweep_models(now + 60)
        assert (await client.services.runs.get(model_id)).status == "suspended"
        await client.services.housekeeper.sweep_models(now + SNAPSHOT_KEPT_S + 60)
        assert (await client.services.runs.get(model_id)).status == "lost"


async def test_a_directory_that_a_killed_server_left_among_archives_stops_no_sweep(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        left, old = tmp_path / "archives/tmpabc", tmp_path / "archives/zz.tar.gz"
        left.mkdir(parents=True)
        (left / "half").write_bytes(b"x")
        old.write_bytes(b"x")
        for path in (left, old):
            os.utime(path, (0, 0))
        await client.services.housekeeper.sweep_weights(time.time())
        assert not left.exists() and not old.exists()


async def test_pages_are_told_of_weights_that_have_expired(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        services = client.services
        expired = Checkpoint(
            tinker_path="tinker://run/weights/a",
            owner="alice",
            run_id="run",
            kind="weights",
            name="a",
            directory="checkpoints/run/a",
            base_model="tiny",
            trainable=Trainable(rank=8, seed=1),
            size_bytes=1,
            created_at=1.0,
            expires_at=2.0,
        )
        await services.checkpoints.put(expired)
        with services.futures.changes.watching("bob") as others, services.futures.changes.watching("alice") as watch:
            await services.housekeeper.sweep_weights(time.time())
            assert await watch.next(0.01) and not await others.next(0.01)
            await services.housekeeper.sweep_weights(time.time())
            assert not await watch.next(0.01)
