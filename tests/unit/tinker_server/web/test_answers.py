"""An owner's answers and bodies do not fill the passes of the event loop, for which other owners' requests wait."""

import asyncio
from collections import Counter
from types import SimpleNamespace

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tinker_server.observability.metrics import Metrics
from tinker_server.web.gate import ANSWERS_IN_A_PASS, PIECES_IN_A_PASS, BodyLimit, Measured
from tinker_server.web.ledger import Ledger


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


async def test_many_bodies_of_an_owner_are_read_few_pieces_in_a_pass_and_those_of_another_owner_in_each() -> None:
    num_bodies, num_pieces, passes = 64, 20, 0
    answers = asyncio.Queue[Message]()
    read: Counter[tuple[str, int]] = Counter()
    """Pieces behind a body's first, by owner and pass."""

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    limit = BodyLimit(read_all, num_pieces)
    services = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(ledger=Ledger(num_bodies << 16))))

    async def send_body(owner: str) -> int:
        """Return the passes that a body took."""
        left, began = num_pieces, passes

        async def receive() -> Message:
            nonlocal left
            read[owner, passes] += left < num_pieces
            left -= 1
            return {"type": "http.request", "body": b"x", "more_body": left > 0}

        state, head = {"owner": owner}, [(b"content-length", str(num_pieces).encode())]
        scope = {"type": "http", "path": "/api/v1/asample", "headers": head, "state": state, "app": services}
        await limit(scope, receive, answers.put)
        return passes - began

    counting = asyncio.create_task(count())
    flood = [asyncio.create_task(send_body("flood")) for _ in range(num_bodies)]
    await asyncio.sleep(0)
    assert await send_body("other") <= 2 * num_pieces
    assert not any(body.done() for body in flood)
    await asyncio.gather(*flood)
    counting.cancel()
    assert answers.empty()
    assert max(pieces for (owner, _), pieces in read.items() if owner == "flood") <= PIECES_IN_A_PASS
