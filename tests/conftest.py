"""Fixtures shared by all tests: tiny models, made once.

The SDK, torch and what needs them is imported by the fixtures that use it: `make test-fast` needs none of it.
"""

import gc
import importlib
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.databases import KINDS, fresh_database
from tests.factories import make_renderer
from tinker_server.backends.processes import launcher, preloaded
from tinker_server.store.database import Database

if TYPE_CHECKING:
    from tests.servers import Server
    from tinker_server.backends.inputs.rendering import Renderer

# What vLLM finds out about a kind of model takes ten seconds: once for all servers, whose data directories differ.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
# Pytest changes it for each test, and each environment of an import has a process of its own.
preloaded.LATE += ("PYTEST_CURRENT_TEST",)


BEGAN_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="of the run: a test that has not begun by then is skipped")
    parser.addoption("--order", help="any text: files come in an order that follows from it alone")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    from tests.workers import skip_after

    skip_after(item.config.getoption("minutes"), BEGAN_S)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests of a file, and all that share an engine, on one worker."""
    from tests.workers import ByEngine

    return ByEngine(config, log)


FAILED = pytest.StashKey[bool]()


class OutsideOfItsModule:
    """Stands for a next test in another file of the same folder."""

    def __init__(self, item: pytest.Item) -> None:
        self._chain = [node for node in item.listchain() if isinstance(node, pytest.Session | pytest.Directory)]

    def listchain(self) -> list[pytest.Session | pytest.Directory]:
        return self._chain


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End a file's servers and engines after a test that failed: its next attempt and the next test get new ones."""
    if item.stash.get(FAILED, False):
        item.session._setupstate.teardown_exact(cast(pytest.Item, OutsideOfItsModule(item)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each folder of tests, set-up and tear-down included, over all workers."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folder = Path(report.nodeid.partition("::")[0]).parent
            seconds["/".join(folder.parts[:2])] += report.duration
    terminalreporter.section("seconds of each folder")
    for name, spent_s in sorted(seconds.items(), key=lambda one: -one[1]):
        terminalreporter.line(f"{spent_s:8.1f}  {name}")


@pytest.fixture(scope="module", autouse=True)
def closed_clients() -> Iterator[None]:
    """Clients that a file leaves open would send heartbeats to servers that are gone, until the interpreter ends."""
    yield
    if (sdk := sys.modules.get("tinker.lib.internal_client_holder")) is None:
        return
    for client in gc.get_objects():
        if type(client) is sdk.InternalClientHolder:
            client.close()


@pytest.fixture(autouse=True)
def ended_servers() -> Iterator[None]:
    """A server that a test itself has started ends with the test, also where that fails."""
    before = _running_servers()
    yield
    for server in _running_servers() - before:
        server.kill()


def _running_servers() -> "set[Server]":
    servers = sys.modules.get("tests.servers")
    return set() if servers is None else set(servers.RUNNING)


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database for one test, which so runs once on each kind."""
    with fresh_database(request.param, tmp_path) as url:
        yield url


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    """The database of a test, with its tables."""
    db = Database(database_url, synchronous="normal")  # on a disk that others keep busy, an fsync takes a second
    await db.migrate()
    yield db
    await db.close()


@pytest.fixture(scope="module", params=KINDS)
def module_database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An empty database for the tests of a file, which so run once on each kind."""
    with fresh_database(request.param, tmp_path_factory.mktemp("database")) as url:
        yield url


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's processes start in a second, where the start is not what is tested."""
    from tests.ranks import fork  # it imports the whole trainer

    monkeypatch.setattr(launcher, "launch", fork)


@pytest.fixture
def holder_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's groups of ranks, and what is changed inside it, for one test."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    from tinker_server.backends.sampler.engine.vllm_patches import targets

    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # as the launcher starts a holder
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # as above
    for patch in (targets.CPU_WEIGHTS, targets.CPU_MAPPING, targets.CPU_MAPPED_DEVICE):
        module, _, name = patch.target.partition(":")
        monkeypatch.setattr(importlib.import_module(module), name, getattr(importlib.import_module(module), name))
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL of 0.3 M parameters."""
    from tests.models import make_tiny_vl

    return make_tiny_vl(tmp_path_factory.mktemp("models") / "tiny-vl")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random text-only Qwen3."""
    from tests.models import make_tiny_text

    return make_tiny_text(tmp_path_factory.mktemp("models") / "tiny-text")


@pytest.fixture(scope="session")
def renderer(tiny_vl: Path) -> "Renderer":
    return make_renderer(tiny_vl)


@pytest.fixture(scope="session")
def server(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """The one server, and so the one vLLM engine, of a test session."""
    from tests.servers import MODEL, Server

    running = Server(tmp_path_factory.mktemp("server") / "data", {MODEL: tiny_vl}).start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]
