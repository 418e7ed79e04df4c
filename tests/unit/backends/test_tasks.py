"""Coroutines that run side by side end together, in failure and in cancellation."""

import asyncio

import pytest

from tinker_server.backends import tasks


class Slow:
    """Coroutines that need a while to end, and what has become of them."""

    def __init__(self) -> None:
        self.begun, self.ended = 0, 0

    async def work(self) -> int:
        self.begun += 1
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            self.ended += 1
        return 0


async def value(number: int) -> int:
    await asyncio.sleep(0.01 / (number + 1))
    return number


async def failing() -> int:
    await asyncio.sleep(0.01)
    raise KeyError("first")


async def test_results_come_in_order() -> None:
    assert await tasks.gather(map(value, range(4))) == [0, 1, 2, 3]
    assert await tasks.gather([]) == []


async def test_the_first_failure_rises_as_it_is_once_all_others_have_ended() -> None:
    slow = Slow()
    with pytest.raises(KeyError, match="first"):
        await tasks.gather([slow.work(), failing(), slow.work()])
    assert (slow.begun, slow.ended) == (2, 2)


async def test_a_cancelled_caller_goes_on_once_all_have_ended() -> None:
    slow = Slow()
    caller = asyncio.create_task(tasks.gather([slow.work(), slow.work()]))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (slow.begun, slow.ended) == (2, 2)


async def test_the_end_of_a_block_ends_what_still_runs() -> None:
    slow = Slow()
    async with tasks.running([value(1), slow.work()]) as [quick, other]:
        await asyncio.wait({quick, other}, return_when=asyncio.FIRST_COMPLETED)
        assert quick.result() == 1 and not other.done()
    assert slow.ended == 1 and other.cancelled()


async def test_a_command_whose_caller_is_gone_ends_first_and_its_failure_is_no_news() -> None:
    begun, may_fail = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_fail.wait()
        raise ValueError("the ranks are gone")

    others = asyncio.all_tasks()
    caller = asyncio.create_task(tasks.to_the_end(work()))
    await begun.wait()
    [command] = asyncio.all_tasks() - others - {caller}
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not command._log_traceback  # what asyncio looks at once nobody knows the task any more
