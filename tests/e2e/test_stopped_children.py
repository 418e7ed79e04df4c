"""Child processes that are stopped, as by a debugger: for a moment, and for longer than the server waits.

Other work goes on, each operation has one result, and the numbers are those of a server that nobody disturbed.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.client import Client, Model, tokens, well
from tests.servers import CHILDREN, MODEL, Server, runs

pytestmark = pytest.mark.slow
PATIENCE_S = 15
MOMENT_S = 4.0
TOLERANCE = 2e-3
"""Nats, between two starts of an engine."""
LESS_PATIENT = f"""
import sys
from tinker_server.backends.configure import describe
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.__main__ import main
describe.SAMPLER_SILENCE_S["cpu"] = {PATIENCE_S}
TrainerClient.__init__.__kwdefaults__["patience_s"] = {PATIENCE_S}
sys.exit(main())
"""
"""The server, which waits for seconds in place of minutes."""


@pytest.fixture(scope="module")
def server(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("stopped") / "data"
    running = Server(data_dir, {MODEL: tiny_vl}, program=("-c", LESS_PATIENT)).start()
    yield running
    if running.process.poll() is None:
        running.stop()


def child(server: Server, kind: str) -> psutil.Process:
    """Return the trainer's rank, the sampler's host, or the engine that vLLM starts beneath it."""

    def is_it(process: psutil.Process) -> bool:
        if kind == "engine":
            return process.name().startswith("VLLM")
        return runs(process, CHILDREN[kind])

    (found,) = filter(is_it, psutil.Process(server.process.pid).children(recursive=True))
    return found


class Work:
    """Training and sampling of one client."""

    def __init__(self, server: Server) -> None:
        self.client = Client(server.base_url)
        self.model = Model(self.client, self.client.session(), 0)
        self.model.create()
        self._num_samples = 0

    def train(self) -> list[float]:
        self.model.train((1, 2))
        return self.model.probe()

    def sample(self) -> list[float]:
        """Return the log probabilities of the probe's tokens on the base, and of the tokens that follow."""
        session = {"session_id": self.model.session_id, "sampling_session_seq_id": self._num_samples}
        self._num_samples += 1
        sampler = self.client.post("/create_sampling_session", session | {"base_model": MODEL})
        request: dict[str, Any] = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": tokens(0), "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 4, "temperature": 0},
            "prompt_logprobs": True,
        }
        result = well(self.client.do("/asample", request))
        return [*result["prompt_logprobs"][1:], *result["sequences"][0]["logprobs"]]

    def assert_answered_once(self) -> None:
        for request in self.client.answered:
            assert self.client.post(request.path, request.body)["request_id"] == request.request_id
            assert self.client.post("/retrieve_future", {"request_id": request.request_id}) == request.result


class Later(threading.Thread):
    """Does something meanwhile."""

    def __init__(self, do: Callable[[], list[float]]) -> None:
        super().__init__(daemon=True)
        self._do, self.found = do, list[float]()
        self.start()

    def run(self) -> None:
        self.found = self._do()


@pytest.mark.parametrize("is_resumed", [True, False], ids=["a moment", "for good"])
@pytest.mark.parametrize("kind", ["trainer", "sampler", "engine"])
def test_work_outlasts_a_child_that_is_stopped(server: Server, kind: str, is_resumed: bool) -> None:
    undisturbed, work, other = Work(server), Work(server), Work(server)
    trained, sampled = [undisturbed.train() for _ in range(3)], undisturbed.sample()
    assert work.train() == trained[0]
    stopped = child(server, kind)
    stopped.suspend()
    began = time.monotonic()
    hit = Later(work.train if kind == "trainer" else work.sample)
    beside = other.sample() if kind == "trainer" else other.train()
    assert hit.is_alive(), "it does not need the child that is stopped"
    if is_resumed:
        time.sleep(max(0.0, MOMENT_S - (time.monotonic() - began)))
        stopped.resume()
    hit.join(240)
    assert stopped.is_running() == is_resumed
    assert not hit.is_alive(), f"no answer {time.monotonic() - began:.0f} s after the {kind} was stopped"
    if kind == "trainer":
        assert (hit.found, work.train()) == (trained[1], trained[2])
        assert beside == pytest.approx(sampled, abs=TOLERANCE)
    else:
        assert hit.found == pytest.approx(sampled, abs=TOLERANCE)
        assert (beside, work.train()) == (trained[0], trained[1])
    for one in (work, other):
        one.assert_answered_once()


def test_a_server_ends_with_all_children_that_are_stopped(server: Server) -> None:
    """The last test of the file: it stops the server."""
    stopped = [child(server, kind) for kind in ("trainer", "sampler", "engine")]
    for one in stopped:
        one.suspend()
    assert server.stop() == 0
    assert not any(one.is_running() for one in stopped)
