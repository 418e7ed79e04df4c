"""Observers of operations, which may fail and cost nothing."""

import pytest

from tinker_server.store.database import Database
from tinker_server.store.futures.observers import Observers
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.store import FutureStore


def operation(seq_id: int = 1, body: bytes = b"{}") -> Operation:
    return Operation("optim_step", "m", seq_id, body, "application/json", "alice", digest=body.decode())


def observers_of(seen: list[str]) -> Observers:
    observers = Observers()
    observers.accepted.append(lambda operation: seen.append(f"accepted {operation.request_id}"))
    observers.ended.append(lambda request_id, result: seen.append(f"ended {request_id} {result.failure_category}"))
    observers.stored.append(lambda request_id, result: seen.append(f"stored {request_id} {result.owner}"))
    return observers


async def test_each_event_comes_once_and_in_order(db: Database) -> None:
    seen: list[str] = []
    futures = FutureStore(db, 0, observers=observers_of(seen))
    await futures.start()
    first = (await futures.queue.enqueue(operation())).request_id
    repeat = await futures.queue.enqueue(operation())
    assert repeat.request_id == first and not repeat.is_new
    futures.queue.complete(first, Result.of_error(ValueError("no")))
    futures.queue.complete(first, Result(b"{}", "application/json"))
    await futures.queue.flush()
    await futures.stop()
    assert seen == [f"accepted {first}", f"ended {first} server", f"stored {first} alice"]


async def test_what_an_earlier_server_left_is_accepted_again(db: Database) -> None:
    before = FutureStore(db, 0)
    await before.start()
    request_id = (await before.queue.enqueue(operation())).request_id
    await before.stop()
    seen: list[str] = []
    after = FutureStore(db, 0, observers=observers_of(seen))
    await after.start()
    await after.stop()
    assert seen == [f"accepted {request_id}"]


async def test_an_observer_that_fails_costs_no_operation_and_no_other_observer(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw it")

    seen: list[str] = []
    observers = Observers(accepted=[broken], ended=[broken], stored=[broken])
    for events, more in zip(vars(observers).values(), vars(observers_of(seen)).values(), strict=True):
        events.extend(more)
    futures = FutureStore(db, 0, observers=observers)
    await futures.start()
    request_id = (await futures.queue.enqueue(operation())).request_id
    futures.queue.complete(request_id, Result(b"{}", "application/json"))
    result = await futures.wait(request_id, "alice", 10)
    await futures.stop()
    assert result is not None and result.body == b"{}"
    assert seen == [f"accepted {request_id}", f"ended {request_id} None", f"stored {request_id} alice"]
    assert caplog.text.count("an observer of operations failed") == 3
