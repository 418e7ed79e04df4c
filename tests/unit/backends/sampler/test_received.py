"""Weights that an engine on another machine was sent."""

from pathlib import Path
from pickle import PickleBuffer

import pytest

from tinker_server.backends.processes.rpc import WeightsAbsent
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler import received
from tinker_server.backends.sampler.received import ReceivedWeights, read_files


def saved(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter.safetensors").write_bytes(content)
    (directory / "config.json").write_bytes(b"{}")
    return directory


def test_an_engine_beside_the_server_finds_weights_where_they_are() -> None:
    here = ReceivedWeights(None)
    assert here.local(None) is None and here.local(Path("/weights/1")) == Path("/weights/1")


def test_weights_are_absent_until_they_are_received(tmp_path: Path) -> None:
    there, weights = ReceivedWeights(tmp_path / "received"), saved(tmp_path / "weights/1", bytes(range(256)) * 1024)
    assert there.local(None) is None
    with pytest.raises(WeightsAbsent):
        there.local(weights)
    there.receive(weights, read_files(weights))
    held = there.require(weights)
    assert held.is_relative_to(tmp_path / "received")
    assert {path.name: path.read_bytes() for path in held.iterdir()} == {
        path.name: path.read_bytes() for path in weights.iterdir()
    }


def test_the_least_recently_used_weights_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "MAX_RECEIVED", 2)
    there = ReceivedWeights(tmp_path / "received")
    first, second, third = (saved(tmp_path / f"weights/{number}", b"x") for number in range(3))
    for weights in (first, second):
        there.receive(weights, read_files(weights))
    there.require(first)
    there.receive(third, read_files(third))
    with pytest.raises(WeightsAbsent):
        there.require(second)
    assert there.require(first).exists() and there.require(third).exists()
    assert len(list((tmp_path / "received").iterdir())) == 2


def test_files_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    there = ReceivedWeights(tmp_path / "received")
    with pytest.raises(FileNotFoundError):
        there.receive(Path("/weights/1"), {"a": PickleBuffer(b"x" * 1000), "no/b": PickleBuffer(b"x")})
    assert not list((tmp_path / "received").iterdir())


def test_all_engines_of_a_machine_find_weights_that_one_was_sent(tmp_path: Path) -> None:
    one, other = (ReceivedWeights(tmp_path / "received") for _ in range(2))
    weights = saved(tmp_path / "weights/1", b"x")
    one.receive(weights, read_files(weights))
    assert other.require(weights) == one.require(weights)
    other.receive(weights, read_files(weights))  # both were asked at once
    assert [path.name for path in (tmp_path / "received").iterdir()] == [one.require(weights).name]


def test_weights_that_are_gone_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no longer exist"):
        read_files(tmp_path / "missing")
