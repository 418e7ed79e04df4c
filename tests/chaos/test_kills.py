"""Mixed work on two models while the server, its trainer and its sampler are killed at drawn moments.

All is answered, nothing is answered twice in two ways, and every state is what its acknowledged steps make.

pytest tests/chaos -m "slow or not slow"
"""

import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.chaos.client import PATIENCE_S, Client, Model, Request, State
from tests.chaos.worker import Seen, Worker
from tests.cluster.machines import free_port
from tests.databases import fresh_database
from tests.servers import CHILDREN, KEY, MODEL, Server, runs

SEED = 20
VICTIMS = ["trainer", "sampler", "engine", "server"]
OF_CLUSTERS = ["machine", "agent", "remote sampler", "head"]
"""Further ones: all of a machine that has joined, the actor there that starts its engines, the host of its engine, and
the process with Ray's head."""
ON_MACHINES = OF_CLUSTERS[:3]
SAMPLING = ["sampler", "engine", *OF_CLUSTERS]
"""Those that samples run on."""
ON_ONE_MACHINE = ["sampler", "trainer", "server", "trainer", "engine", "server"]
"""Each of the victims, and again those whose state must outlive two deaths."""
ORPHAN_S = 10
"""Time for which a child may outlive its server."""
TOLERANCE = 2e-3
"""Nats; trainer and sampler are 1e-4 apart. The trainer's results are bitwise equal."""


class Machine:
    """`tinker-server join`, started again as systemd would. It fetches the model."""

    def __init__(self, directory: Path, cluster_port: int, number: int) -> None:
        self._log = directory / f"machine-{number}.log"
        self._command = [sys.executable, "-m", "tinker_server", "join", f"127.0.0.1:{cluster_port}"]
        self._command += ["--token-file", str(directory / "data/cluster-token"), "--model", MODEL]
        self._command += ["--data-dir", str(directory / f"machine-{number}"), "--name", f"m{number}"]
        self.process = self._start()

    def _start(self) -> psutil.Popen:
        with self._log.open("a") as log:
            return psutil.Popen(self._command, stderr=log)

    def start_again(self) -> None:
        self.process.wait()
        self.process = self._start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Place:
    """A server and who works with it."""

    def __init__(self, server: Server, num_operations: int, seed: int) -> None:
        self.server = server
        self.machines: list[Machine] = []
        """Those that have joined it."""
        self._num_operations, self._num_while_waiting, self._is_waiting = num_operations, 0, False
        self._random = random.Random(seed)
        self.starts_s: list[float] = []
        self.kills: list[tuple[str, float]] = []
        """The killed processes, with times."""
        self._hit: dict[str, list[Request]] = {}
        """By victim, what was under way at its last kill."""
        self.saved: dict[str, State] = {}
        self.sampled: dict[str, State] = {}
        self.start()
        self.workers = [
            Worker(Client(server.base_url), random.Random(seed + 1 + n), self.saved, self.sampled, self._may_go_on)
            for n in range(2)
        ]

    def start(self) -> None:
        began = time.monotonic()
        self.server.start()
        self.starts_s.append(time.monotonic() - began)

    def num_answered(self) -> int:
        return sum(len(worker.client.answered) for worker in self.workers) - self._num_while_waiting

    def _may_go_on(self) -> bool:
        has_work = self._is_waiting or self.num_answered() < self._num_operations
        return has_work and not any(worker.error for worker in self.workers)

    def await_machines(self) -> None:
        """Wait until each machine's engine samples; operations that are answered meanwhile do not count, and are few:
        each costs as much again when all is looked at."""
        before, deadline, self._is_waiting = self.num_answered(), time.monotonic() + PATIENCE_S, True
        for worker in self.workers:
            worker.hurries.clear()
        while self._num_engines() <= len(self.machines):
            self._raise_errors()
            assert time.monotonic() < deadline, "a machine that has joined has no engine"
            time.sleep(0.5)
        self._num_while_waiting += self.num_answered() - before
        self._is_waiting = False
        for worker in self.workers:
            worker.hurries.set()
        while self._may_go_on() and not any(worker.client.under_way for worker in self.workers):
            time.sleep(0.02)

    def _num_engines(self) -> int:
        text = httpx.get(f"{self.server.base_url}/metrics", headers={"x-api-key": KEY}, timeout=60).text
        return len(set(re.findall(r'^tinker_pool_sequences{.*engine="(\d+)"', text, re.MULTILINE)))

    def work_through(self, kills: list[str]) -> None:
        """All operations, with the kills spread over them at drawn moments."""
        for worker in self.workers:
            worker.start()
        moments = sorted(self._random.uniform(0.1, 0.9) * self._num_operations for _ in kills)
        for moment, victim in zip(moments, kills, strict=True):
            while self.num_answered() < moment and self._may_go_on():
                time.sleep(0.02)
            self._raise_errors()
            self._kill(victim)
        for worker in self.workers:
            worker.thread.join()
        self._raise_errors()

    def _raise_errors(self) -> None:
        for worker in self.workers:
            if worker.error is not None:
                raise worker.error

    def _kill(self, victim: str) -> None:
        if victim in OF_CLUSTERS:
            self.await_machines()
        kind = "sampler" if victim in SAMPLING else victim
        self._spare_what_was_hit(kind)
        api = psutil.Process(self.server.process.pid)
        if victim != "server":
            machine = self._random.choice(self.machines) if victim in ON_MACHINES else None
            found = self._random.choice(self._await(api if machine is None else machine.process, victim))
            self.kills.append((victim, time.monotonic()))
            self._hit[kind] = self._under_way()
            found.kill()
            self._hit[kind] += self._under_way()  # what came while the process was looked for, and killed
            if machine is not None and victim == "machine":
                machine.start_again()
            return
        children = api.children(recursive=True)
        self.kills.append((victim, time.monotonic()))
        self._hit[kind] = self._under_way()
        self.server.kill()
        _, orphans = psutil.wait_procs(children, timeout=ORPHAN_S)
        assert not orphans, f"outlive their server: {[' '.join(orphan.cmdline()) for orphan in orphans]}"
        self.start()

    def _spare_what_was_hit(self, victim: str) -> None:
        """An operation under which a process ends twice fails by name: our kills must not hit one twice."""
        deadline = time.monotonic() + PATIENCE_S
        hit = self._hit.get(victim, [])
        while self._may_go_on() and any(one in worker.client.under_way for worker in self.workers for one in hit):
            assert time.monotonic() < deadline, "what was under way at a kill is not answered"
            time.sleep(0.02)

    def _under_way(self) -> list[Request]:
        return [request for worker in self.workers for request in list(worker.client.under_way)]

    def _await(self, top: psutil.Process, victim: str) -> list[psutil.Process]:
        """The processes of a kind beneath one of them; one that was just killed is there again soon."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._raise_errors()
            beneath = top.children(recursive=True)
            if found := [child for child in beneath if _is(child, "agent" if victim == "machine" else victim)]:
                return [top] if victim == "machine" else found  # it is in use
            time.sleep(0.05)
        raise AssertionError(f"no {victim} was started again")


def _is(process: psutil.Process, victim: str) -> bool:
    """A rank of the trainer, the sampler's host, or the engine that vLLM starts beneath it."""
    try:
        if victim == "engine":
            return process.name().startswith("VLLM") and any(_is(above, "sampler") for above in process.parents())
        if victim == "agent":
            return process.cmdline()[0].startswith("ray::Agent")
        if victim == "head":
            return runs(process, "tinker_server.backends.cluster.head")
        return runs(process, CHILDREN[victim.removeprefix("remote ")])
    except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):  # it has just ended
        return False


def assert_told_once(clients: list[Client]) -> None:
    """Sent again, every operation is the same one and has the same result."""
    for client in clients:
        for request in list(client.answered):
            assert client.post(request.path, request.body)["request_id"] == request.request_id, request
            again = client.post("/retrieve_future", {"request_id": request.request_id})
            assert again == request.result, (request, again)


def assert_made_by_its_steps(seen: list[Seen], client: Client) -> None:
    """Weights seen by clients equal those of a model without crashes after the same steps."""
    wanted: dict[State, list[float]] = {}
    states = {one.state for one in seen}
    for number, end in enumerate(sorted(states, key=len, reverse=True)):
        if end in wanted:
            continue
        model = Model(client, client.session(), number)
        model.create()
        for length in range(len(end) + 1):
            if length:
                model.train(end[length - 1])
            if (state := end[:length]) in states and state not in wanted:
                wanted[state] = model.probe()
    for one in seen:
        difference = np.abs(np.subtract(one.logprobs, wanted[one.state])).max()
        assert difference <= (TOLERANCE if one.by == "the sampler" else 0), (one, wanted[one.state])
    probes = list(wanted.values())
    assert np.abs(np.subtract(probes[0], probes[-1])).max() > 10 * TOLERANCE, "the states do not tell themselves apart"


def assert_no_strays(data_dir: Path, client: Client) -> None:
    """On the disk is what is listed, and the models that wait for their clients."""
    listed = set()
    for one in client.get("/checkpoints?limit=1000")["checkpoints"]:
        run_id, kind, name = one["tinker_path"].removeprefix("tinker://").split("/")
        listed.add((run_id, kind, name))
    paths = [path.relative_to(data_dir / "checkpoints") for path in (data_dir / "checkpoints").glob("*/*/*")]
    found = {(path.parts[0], path.parts[1], path.parts[2].partition("~")[0]) for path in paths}
    assert {one for one in found if one[1] != "snapshots"} == listed
    assert len(paths) == len({str(path).partition("~")[0] for path in paths}), "weights lie there twice"


def assert_sampler_was_back_in_time(place: Place) -> None:
    """No sample waited for longer than the server and the sampler take to start."""
    log = place.server.log.read_text()
    starts_s = place.starts_s + [float(found) for found in re.findall(r"sampler is ready after (\d+) s", log)]
    samples = [request for worker in place.workers for request in worker.client.answered if request.path == "/asample"]
    assert max(request.seconds for request in samples) < 2 * max(starts_s) + 10


def say_pauses(place: Place) -> None:
    """Print the wait from each kill to the next result of an operation submitted after it, by the killed process."""
    answered = [one for worker in place.workers for one in worker.client.answered]
    for victim, at_s in place.kills:
        after = [one for one in answered if one.at_s - one.seconds > at_s]
        waits = [one.at_s - at_s for one in after if (one.path == "/asample") == (victim in SAMPLING)]
        print(f"{victim}: {min(waits, default=0):.1f} s to the next result")


@pytest.fixture
def cluster_port() -> int:
    return free_port()


@pytest.fixture
def server(tiny_vl: Path, tmp_path: Path, request: pytest.FixtureRequest, cluster_port: int) -> Iterator[Server]:
    arguments = ["--engines", str(request.config.getoption("--engines", 1))]
    if request.config.getoption("--nodes", 1) > 1:
        arguments += in_cluster(cluster_port)
    with fresh_database(request.config.getoption("--database", "sqlite"), tmp_path) as url:
        server = Server(tmp_path / "data", {MODEL: tiny_vl}, *arguments, "--database-url", url)
        yield server
        if server.process.poll() is None:
            server.stop()


def in_cluster(port: int) -> list[str]:
    return ["--cluster", "--cluster-address", "127.0.0.1", "--cluster-port", str(port)]


@contextmanager
def joined(place: Place, directory: Path, port: int, num: int) -> Iterator[None]:
    """So many machines of a server that runs."""
    place.machines = [Machine(directory, port, number) for number in range(num)]
    try:
        yield
    finally:
        for machine in place.machines:
            machine.stop()


@pytest.mark.slow
def test_work_survives_kills_of_one_engine_of_two(tiny_vl: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "data", {MODEL: tiny_vl}, "--engines", "2")
    try:
        place = Place(server, 40, SEED)
        place.work_through(["engine", "sampler", "server", "engine"])
        assert_all_is_well(place, tmp_path / "data")
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.mark.slow
def test_work_survives_kills_of_what_another_machine_runs(tiny_vl: Path, tmp_path: Path, cluster_port: int) -> None:
    server = Server(tmp_path / "data", {MODEL: tiny_vl}, *in_cluster(cluster_port))
    place = Place(server, 40, SEED)
    try:
        with joined(place, tmp_path, cluster_port, 1):
            place.work_through(OF_CLUSTERS)
            assert_all_is_well(place, tmp_path / "data")
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.mark.slow
def test_rounds(server: Server, tmp_path: Path, request: pytest.FixtureRequest, cluster_port: int) -> None:
    """`make chaos ROUNDS=200`"""
    rounds, seed = request.config.getoption("--rounds", None), request.config.getoption("--seed", SEED)
    num_others = request.config.getoption("--nodes", 1) - 1
    victims = VICTIMS + (OF_CLUSTERS if num_others else [])
    kills = ON_ONE_MACHINE if rounds is None else random.Random(seed).choices(victims, k=rounds)
    place = Place(server, 15 * len(kills), seed)
    with joined(place, tmp_path, cluster_port, num_others):
        place.work_through(kills)
        assert_all_is_well(place, tmp_path / "data")


@pytest.mark.slow
def test_one_of_two_ranks_may_be_killed(tiny_vl: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "data", {MODEL: tiny_vl}, "--ranks", "2")
    place = Place(server, 30, SEED)
    place.work_through(["trainer", "server", "trainer"])
    assert_all_is_well(place, tmp_path / "data")


def assert_all_is_well(place: Place, data_dir: Path) -> None:
    server = place.server
    say_pauses(place)
    clients = [worker.client for worker in place.workers]
    assert_sampler_was_back_in_time(place)
    assert_told_once(clients)
    fresh = Client(server.base_url)
    seen = [one for worker in place.workers for one in worker.seen]
    for number, (path, state) in enumerate(place.saved.items()):
        model = Model(fresh, fresh.session(), number)
        model.create()
        model.load(path, state)
        seen.append(Seen(state, model.probe(), "a checkpoint"))
    assert_made_by_its_steps(seen, fresh)
    assert_no_strays(data_dir, fresh)
    assert server.stop() == 0
