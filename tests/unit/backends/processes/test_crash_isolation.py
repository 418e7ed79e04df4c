"""The culprit of crashes is found, and nothing else fails. Crashes are those of an object."""

import asyncio

from tinker_server.backends.processes.crash_isolation import CrashIsolation, Suspect


class Process:
    """Crashes under any work that is deadly, and all that runs in it then begins again in the next."""

    def __init__(self) -> None:
        self.isolation = CrashIsolation(is_exclusive=True)
        self.crashes: list[set[str]] = []
        """Names of the work that ran at each crash."""
        self._inside: set[str] = set()
        self._crash = asyncio.Event()

    async def running(self) -> asyncio.Event:
        return self._crash

    async def do(self, name: str, owner: str, deadly: bool = False) -> bool:
        """Return True if it was done."""
        work = Suspect(owner)
        try:
            while not work.is_culprit:
                async with self.isolation.admit(work, self.running) as crash:
                    self._inside.add(name)
                    await asyncio.sleep(0.01)
                    if deadly and not crash.is_set():
                        self.crashes.append(self._inside)
                        self._crash, self._inside = asyncio.Event(), set()
                        crash.set()
                    await asyncio.sleep(0.01)
                    self._inside.discard(name)
                    if not crash.is_set():
                        return True
                    self.isolation.note_crash(crash)
            return False
        finally:
            self.isolation.release(work)


async def test_suspects_run_by_owner_then_in_eighths_until_the_culprit_is_alone_and_all_else_is_done() -> None:
    process = Process()
    many = [asyncio.create_task(process.do(f"good {number}", "one")) for number in range(19)]
    bad = asyncio.create_task(process.do("bad", "one", deadly=True))
    other = asyncio.create_task(process.do("other", "another"))
    async with asyncio.timeout(20):
        assert await asyncio.gather(*many, other) == [True] * 20
        assert not await bad
    assert [len(names) for names in process.crashes] == [21, 20, 3, 1]
    assert all("bad" in names for names in process.crashes)
    assert not any("other" in names for names in process.crashes[1:])


async def test_suspects_run_in_order_and_a_newcomer_waits_for_them_only_if_they_run_apart() -> None:
    assert await _order(is_exclusive=True) == ["first", "second", "newcomer"]
    assert await _order(is_exclusive=False) == ["newcomer", "first", "second"]


async def _order(*, is_exclusive: bool) -> list[str]:
    isolation, found = CrashIsolation(is_exclusive=is_exclusive), list[str]()

    async def work(name: str, suspect: Suspect) -> None:
        async with isolation.admit(suspect, lambda: asyncio.sleep(0.05 if name == "first" else 0)):
            found.append(name)
        isolation.release(suspect)

    first, second = Suspect(), Suspect()
    isolation.isolate([first, second], 2)
    async with asyncio.timeout(20):
        await asyncio.gather(work("newcomer", Suspect()), work("second", second), work("first", first))
    return found
