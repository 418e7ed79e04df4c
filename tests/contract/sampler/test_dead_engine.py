"""Failures in the engine's host because the engine is dead."""

from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tinker_server.backends.sampler.engine import sequences


class Engine:
    def __init__(self, *, errored: bool) -> None:
        self.errored = errored


@pytest.mark.parametrize(
    ("engine", "error"),
    [(Engine(errored=False), EngineDeadError()), (Engine(errored=True), RuntimeError("a socket is closed"))],
)
def test_it_ends_the_host_and_no_command(engine: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise SystemExit(1)

    monkeypatch.setattr(sequences, "end_process", end)
    with pytest.raises(SystemExit), sequences.ending_with(engine):
        raise error


def test_a_failure_of_a_living_engine_is_raised() -> None:
    engine: Any = Engine(errored=False)
    with pytest.raises(ValueError, match="a bad prompt"), sequences.ending_with(engine):
        raise ValueError("a bad prompt")
