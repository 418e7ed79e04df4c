"""A power loss after an answer loses nothing that was answered.

The disk then has the files that were synced (`tests/power.py`). SQLite's own files are copied as they are: the setting
`synchronous` decides what a power loss leaves of them.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.power import Disk
from tests.submitting import Client, server
from tinker_server.auth.keys import Keys, add
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.directories import hold
from tinker_server.store.futures.records import Result


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    (tmp_path / "data").mkdir()
    disk = Disk(tmp_path / "data")
    monkeypatch.setattr(os, "fsync", disk.sync)
    yield disk
    disk.close()


def power_loss(disk: Disk, data_dir: Path, name: str) -> Path:
    """Make the data directory that the next server finds."""
    left = data_dir.with_name(name)
    disk.left(left)
    for file in data_dir.glob("tinker-server.db*"):
        shutil.copy(file, left / file.name)
    return left


class Answers:
    """The answers that a client got."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.results: dict[str, Result] = {}
        self.paths: list[str] = []

    async def well(self, request_id: str) -> Result:
        result = self.results[request_id] = await self.client.result(request_id)
        assert not result.failed, result.body
        return result


async def assert_all_is_there(left: Path, answers: Answers, steps: int, gradient: list[int]) -> None:
    before = answers.client
    async with server(left) as after:
        for request_id, result in answers.results.items():
            assert (await after.result(request_id)).body == result.body
        last = max(entry.seq_id for entry in answers.results.values() if entry.lane == before.model_id)
        stepped = json.loads((await after.result(await after.optim_step(last + 1, before.model_id))).body)
        assert stepped["metrics"]["step"] == steps + 1
        assert after.trainer.applied[-1] == (before.model_id, gradient)
        for number, path in enumerate(answers.paths, 1):
            checkpoint = await after.services.checkpoints.find(parse_path(path))
            assert checkpoint is not None
            if checkpoint.kind == "weights":
                assert not (await after.result(await after.load_as(number, path, optimizer=True))).failed
            else:
                assert (after.services.storage.path(checkpoint.directory) / "steps").read_text() == str(steps)


@pytest.mark.parametrize("snapshots", [False, True])
async def test_nothing_that_was_answered_is_missing_after_a_power_loss(
    tmp_path: Path, disk: Disk, snapshots: bool
) -> None:
    async with server(tmp_path / "data") as before:
        answers = Answers(before)
        await answers.well(await before.create_model())
        for number in range(1, 8, 4):
            await answers.well(await before.forward_backward(number))
            if snapshots:
                before.services.scheduler.actor(before.model_id).model.log.must_end = True
            await answers.well(await before.optim_step(number + 1))
            for name, save in (("a", before.save), ("b", before.save_named_for_sampler)):
                saved = await answers.well(await save(number + (2 if name == "a" else 3), f"{name}{number}"))
                answers.paths.append(json.loads(saved.body)["path"])
            await before.services.scheduler.actor(before.model_id).model.settle()
            await assert_all_is_there(
                power_loss(disk, tmp_path / "data", f"loss {number}"), answers, 1 + number // 4, []
            )
            answers.paths.clear()
        await answers.well(await before.forward_backward(9))
        assert (await before.services.runs.get(before.model_id)).snapshot is not None or not snapshots
        await assert_all_is_there(power_loss(disk, tmp_path / "data", "loss"), answers, 2, [1])


async def test_models_that_were_moved_to_disk_are_there_after_a_power_loss(tmp_path: Path, disk: Disk) -> None:
    async with server(tmp_path / "data") as before:
        answers = Answers(before)
        await answers.well(await before.create_model())
        await answers.well(await before.optim_step(1))
        await answers.well(await before.save_unnamed(2))
        await answers.well(await before.forward_backward(3))
        await before.services.scheduler.suspend(before.model_id)
        await assert_all_is_there(power_loss(disk, tmp_path / "data", "loss"), answers, 1, [1])


async def test_a_data_directory_that_was_just_made_is_there_after_a_power_loss(tmp_path: Path, disk: Disk) -> None:
    with hold(tmp_path / "data" / "new" / "data"):
        disk.left(tmp_path / "loss")
    assert (tmp_path / "loss" / "new" / "data").is_dir()


async def test_a_key_that_was_shown_is_valid_after_a_power_loss(tmp_path: Path, disk: Disk) -> None:
    key = add(tmp_path / "data" / "new" / "keys", "alice")
    left = power_loss(disk, tmp_path / "data", "loss")
    assert Keys(left / "new" / "keys").owner_of(key) == "alice"
