"""How tests are given to the workers of a run.

pytest tests/unit/test_workers.py
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.workers import APART, TOGETHER, ByEngine, skip_after

UNIT, SMALL, OTHER = (f"tests/unit/test_{name}.py::test_it" for name in "abc")
CONTRACT = ["tests/contract/test_a.py::test_it", "tests/contract/test_a.py::test_another"]
SERVER = ["tests/conformance/test_futures.py::test_it", "tests/e2e/test_docs.py::test_it"]
OWN_SERVER = "tests/e2e/test_demo.py::test_it"
CHAOS = [f"tests/chaos/test_kills.py::test_{name}" for name in "ab"]
ENGINE = [f"tests/contract/sampler/test_{name}.py::test_it" for name in "ab"]


@dataclass(eq=False)
class Worker:
    """Holds what it is given."""

    gateway: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(id="worker"))
    given: list[int] = field(default_factory=list)
    shutting_down: bool = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(config: pytest.Config, tests: list[str], num_workers: int) -> tuple[ByEngine, list[Worker]]:
    """Return a scheduler that has begun, and its workers."""
    scheduler, workers = ByEngine(config), [Worker() for _ in range(num_workers)]
    scheduler.numnodes = num_workers
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    return scheduler, workers


def run_alone(scheduler: ByEngine, worker: Worker, tests: list[str]) -> list[str]:
    """Return the tests that a worker runs to the end of all, in their order."""
    ran = 0
    while ran < len(worker.given):
        scheduler.mark_test_complete(worker, worker.given[ran])
        ran += 1
    return [tests[index] for index in worker.given]


@pytest.fixture
def config(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> pytest.Config:
    """As the Makefile calls pytest."""
    monkeypatch.setattr(pytestconfig.option, "tx", ["2*popen"])
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", False)
    return pytestconfig


def test_the_longest_tests_begin_first_whatever_their_names(config: pytest.Config) -> None:
    tests = [*CHAOS, *SERVER, *CONTRACT, *ENGINE, OWN_SERVER, UNIT]
    scheduler, [worker] = scheduled(config, tests, 1)
    assert run_alone(scheduler, worker, tests) == [*SERVER, *ENGINE, OWN_SERVER, *CHAOS, *CONTRACT, UNIT]


def test_files_come_in_the_order_of_a_text_and_what_shares_an_engine_stays_together(
    config: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [*CHAOS, *SERVER, *CONTRACT, *ENGINE, OWN_SERVER, UNIT, SMALL, OTHER]
    found = []
    for order in ("a", "a", "b"):
        monkeypatch.setattr(config.option, "order", order)
        scheduler, [worker] = scheduled(config, tests, 1)
        found.append(run_alone(scheduler, worker, tests))
        assert sorted(found[-1]) == sorted(tests) and found[-1].index(ENGINE[1]) == found[-1].index(ENGINE[0]) + 1
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("minutes", "skips"), [(None, False), (1e6, False), (0, True)])
def test_a_test_that_has_not_begun_by_the_last_minute_is_skipped(minutes: float | None, skips: bool) -> None:
    with pytest.raises(pytest.skip.Exception, match="--minutes") if skips else nullcontext():
        skip_after(minutes, time.monotonic() - 1)


def test_what_shares_a_server_or_an_engine_is_on_the_same_worker_and_nothing_else(config: pytest.Config) -> None:
    tests = [*CHAOS, SERVER[0], *ENGINE, OWN_SERVER, SERVER[1]]
    scheduler, workers = scheduled(config, tests, 2)
    assert [[tests[index] for index in worker.given] for worker in workers] == [SERVER, ENGINE]
    scheduler.mark_test_complete(workers[0], workers[0].given[0])
    assert [tests[index] for index in workers[0].given] == [*SERVER, OWN_SERVER]
    scheduler.mark_test_complete(workers[1], workers[1].given[0])
    assert [tests[index] for index in workers[1].given] == [*ENGINE, CHAOS[0]]


def test_a_worker_holds_the_next_test_and_no_more(config: pytest.Config) -> None:
    tests = [UNIT, SMALL, OTHER, *CHAOS]
    scheduler, workers = scheduled(config, tests, 2)
    assert [[tests[index] for index in worker.given] for worker in workers] == [[CHAOS[0], UNIT], [CHAOS[1], SMALL]]
    assert run_alone(scheduler, workers[1], tests) == [CHAOS[1], SMALL, OTHER]
    assert workers[1].shutting_down


def test_after_a_crash_every_test_is_given_to_a_worker_that_then_has_the_next(config: pytest.Config) -> None:
    tests = [f"tests/unit/test_{number:02}.py::test_it" for number in range(12)]
    scheduler, [first, second] = scheduled(config, tests, 2)
    for number in range(4):  # each file to its end, so that it has no test left
        scheduler.mark_test_complete(first, first.given[number])
    crashed_in = first.given[4]
    assert scheduler.remove_node(first) == tests[crashed_in]
    scheduler.add_node(third := Worker())
    scheduler.add_node_collection(third, tests)
    scheduler.schedule()
    ran = {second: 0, third: 0}
    while able := [each for each in ran if len(each.given) - ran[each] > (not each.shutting_down)]:
        for each in able:
            scheduler.mark_test_complete(each, each.given[ran[each]])
            ran[each] += 1
    assert {*first.given[:4], *second.given, *third.given} == set(range(12))
    assert scheduler.tests_finished and ran == {second: len(second.given), third: len(third.given)}


def test_every_file_that_is_given_with_others_is_there() -> None:
    root = Path(__file__).parents[2]
    named = [APART, *(file for files in TOGETHER.values() for file in files)]
    assert [file for file in named if not (root / file).exists()] == []
