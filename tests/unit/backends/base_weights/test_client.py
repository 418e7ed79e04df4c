"""Processes that are to map weights which nobody holds."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.specs import tiny_spec
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.protocol import BackendFailed


async def test_a_process_waits_for_weights_as_long_as_it_may_and_is_ended() -> None:
    base, started = BaseWeights(replace(tiny_spec(Path()), base_copies=1)), list[Child]()

    async def start() -> list[Child]:
        started.append(await launch("child", "tests.busy_child", {}))
        return started

    with pytest.raises(BackendFailed, match=r"no weights are held after 0\.1 s"):
        await base.wrap_start(start, patience_s=0.1)()
    assert [child.died.is_set() for child in started] == [True]
    await base.stop()
