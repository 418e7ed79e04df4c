"""An owner's answers do not fill the passes of the event loop, for which other owners' requests wait."""

import asyncio
from collections import Counter
from types import SimpleNamespace

from starlette.responses import Response
from starlette.types import Message

from tinker_server.observability.metrics import Metrics
from tinker_server.web.gate import ANSWERS_IN_A_PASS, Measured


class Loop:
    """Counts its passes, while requests that are answered at once ask again at once."""

    def __init__(self) -> None:
        self.app = Measured(Response())
        self.passes = 0
        self.answered: Counter[int] = Counter()
        """Answers by pass."""
        self._services = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(metrics=Metrics())))

    async def count(self) -> None:
        while True:
            self.passes += 1
            await asyncio.sleep(0)

    async def ask(self, owner: str) -> int:
        """Return the passes for which a request has waited."""
        began = self.passes
        scope = {"type": "http", "method": "GET", "state": {"owner": owner}, "app": self._services}
        await self.app(scope, receive_nothing, self._note)
        return self.passes - began

    async def ask_forever(self, owner: str) -> None:
        while True:
            await self.ask(owner)
            await asyncio.sleep(0)  # for the next request

    async def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answered[self.passes] += 1


async def receive_nothing() -> Message:
    raise AssertionError("the request has no body")


async def test_many_connections_of_an_owner_are_answered_few_in_a_pass_and_another_owner_in_the_same() -> None:
    loop = Loop()
    flood = [asyncio.create_task(work) for work in (loop.count(), *(loop.ask_forever("flood") for _ in range(64)))]
    await asyncio.sleep(0)
    for _ in range(50):
        assert await loop.ask("other") == 0
        await asyncio.sleep(0)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    of_flood = loop.answered - Counter(dict.fromkeys(loop.answered, 1))
    assert max(of_flood.values()) <= ANSWERS_IN_A_PASS
    assert sum(of_flood.values()) > 50
