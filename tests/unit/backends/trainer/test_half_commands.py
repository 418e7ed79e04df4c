"""A command whose caller is gone runs to its end, whatever that is.

pytest tests/unit/backends/trainer/test_half_commands.py
"""

import asyncio

import pytest

from backends.trainer.client import _to_the_end


async def test_a_command_whose_caller_is_gone_ends_first_and_its_failure_is_no_news() -> None:
    begun, may_fail = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_fail.wait()
        raise ValueError("the ranks are gone")

    others = asyncio.all_tasks()
    caller = asyncio.create_task(_to_the_end(work()))
    await begun.wait()
    [command] = asyncio.all_tasks() - others - {caller}
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not command._log_traceback  # what asyncio looks at once nobody knows the task any more
