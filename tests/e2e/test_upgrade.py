"""A data directory of an older server goes on under this one, with the numbers that the older one gave.

`tests/data/directory-of-073f48b.tar.xz` and the `.json` beside it were made by that commit's server:
`git worktree add /tmp/old 073f48b && python -m tests.e2e.old_directory /tmp/old`. It holds a training checkpoint,
named, unnamed and exported weights, two suspended models, one with a gradient, finished futures and two sessions.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.old_directory import ARCHIVE, EXPECTED, MODEL, Client, make_young, measure
from tests.servers import Server
from tinker_server.embedded import DIRECTORIES


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


@pytest.mark.slow
def test_an_older_servers_directory_goes_on_with_its_numbers(tmp_path: Path) -> None:
    recorded = json.loads(EXPECTED.read_text())
    (tmp_path / "data").mkdir()
    subprocess.run(["tar", "-xf", ARCHIVE, "-C", tmp_path / "data"], check=True)
    make_young(tmp_path / "data")
    server = Server(tmp_path / "data", {MODEL: DIRECTORIES[MODEL]}).start()
    try:
        measured = measure(Client(server.base_url), recorded["parts"])
    finally:
        assert server.stop() == 0
    for name, expected in recorded["expected"].items():
        assert measured[name] == approximately(expected), name
