"""Data directories of older servers go on under this one, with the numbers that the older ones gave.

The archives in `tests/data` and the `.json` beside each were made by the server of the commit in their name:
`git worktree add /tmp/old 073f48b && python -m tests.e2e.old_directory /tmp/old stopped`. That one holds a training
checkpoint, named, unnamed and exported weights, two suspended models, one with a gradient, finished futures and two
sessions. The server of ab350a7 was killed: its directory holds a snapshot, two logs, an image in one of them, and an
operation that waits. That of b6afec41 holds a mixture of experts, and a run of it with a gradient: every expert has an
adapter of its own, in names that expert by expert are those of PEFT.
"""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.old_directory import KILLED, MIXTURE, STOPPED, Made, copy_database, make_young
from tests.servers import Server


def approximately(value: Any) -> Any:
    """With its floats to rounding."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-3, rel=1e-4)
        case dict():
            return {key: approximately(item) for key, item in value.items()}
        case list():
            return [approximately(item) for item in value]
    return value


def unpack(made: Made, data_dir: Path) -> None:
    data_dir.mkdir()
    subprocess.run(["tar", "-xf", made.archive, "-C", data_dir], check=True)
    make_young(data_dir)


def require_same_numbers(made: Made, data_dir: Path, **settings: Any) -> None:
    recorded = json.loads(made.expected.read_text())
    server = Server(data_dir, made.models(data_dir), **settings).start()
    try:
        measured = made.measure(made.client(server), recorded["parts"])
    finally:
        assert server.stop() == 0
    for name, expected in recorded["expected"].items():
        assert measured[name] == approximately(expected), name


@pytest.mark.slow
def test_an_older_servers_directory_goes_on_with_its_numbers(tmp_path: Path) -> None:
    unpack(STOPPED, tmp_path / "data")
    require_same_numbers(STOPPED, tmp_path / "data")


@pytest.mark.slow
def test_snapshots_and_logs_of_an_older_server_that_was_killed_give_its_models_again(
    tmp_path: Path, database_url: str
) -> None:
    data_dir = tmp_path / "data"
    unpack(KILLED, data_dir)
    if database_url.startswith("sqlite"):
        require_same_numbers(KILLED, data_dir)
    else:
        file = data_dir / "tinker-server.db"
        asyncio.run(copy_database(file, database_url))
        for part in data_dir.glob(f"{file.name}*"):
            part.unlink()
        require_same_numbers(KILLED, data_dir, database_url=database_url)


@pytest.mark.slow
def test_a_mixtures_run_from_before_shared_factors_goes_on_with_an_adapter_of_each_expert(tmp_path: Path) -> None:
    unpack(MIXTURE, tmp_path / "data")
    require_same_numbers(MIXTURE, tmp_path / "data")
