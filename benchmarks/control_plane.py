"""Time of the server's own work (accepting, queueing, answering), on a backend that computes nothing.

    python benchmarks/control_plane.py [--rounds 5] [--database-url URL]

Bare is a FastAPI route that reads a body of the same size and answers, under the same uvicorn, asked by the
same client (aiohttp) in the same run. Times of concurrent requests are from the start of all to each answer.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from fastapi import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fakes import FakeBackend
from tinker_server.__main__ import listen, loop_factory
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.app import create_app
from tinker_server.observability.progress import Processes
from tinker_server.settings import Settings
from tinker_server.web.server import Server

PROTOBUF = {"Content-Type": "application/x-protobuf"}
HEADERS = {"X-API-Key": "tml-benchmark", "Accept": "application/x-protobuf, application/json"}
SMALL_BYTES, SMALL_COUNT = 1_000, 200
LARGE_BYTES, LARGE_COUNTS = 300_000, (64, 200)
HEARTBEAT_EVERY_S = 0.02
LANES, OPERATIONS = 16, 100


def serve(ready: Connection, data_dir: Path, database_url: str) -> None:
    """Run the server in a process of its own, and send its port."""
    listener = listen("127.0.0.1", 0)

    async def run() -> None:
        app = create_app(Settings(data_dir=data_dir, database_url=database_url), FakeBackend())

        @app.post("/bare")
        async def bare(request: Request) -> dict[str, int]:
            return {"size": len(await request.body())}

        server = Server(app, Processes())
        async with server.listening(listener), app.router.lifespan_context(app):
            server.open(app.state.services.drain)
            ready.send(listener.getsockname()[1])
            await server.wait_closed()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


@contextmanager
def served(data_dir: Path, database_url: str) -> Iterator[str]:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, data_dir, database_url))
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.terminate()
        process.join()


def forward_backward(model_id: str, seq_id: int, size_bytes: int) -> bytes:
    """Make a request of about this size: one datum of text and its targets."""
    tokens = (size_bytes - 200) // 12
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4 * tokens)
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = bytes(8 * tokens), pb.DTYPE_INT64
    targets.shape.append(tokens)
    return message.SerializeToString()


class Client:
    """One caller with many connections."""

    def __init__(self, http: aiohttp.ClientSession, api: str) -> None:
        self._http = http
        self._api = api

    async def post(self, path: str, body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        sent = {"json": body} if isinstance(body, dict) else {"data": body}
        async with self._http.post(f"{self._api}{path}", headers=headers, **sent) as answer:
            read = await answer.read()
            assert answer.status in (200, 204, 408), (answer.status, read[:200])
            return None if answer.status == 408 else await answer.json() if read[:1] == b"{" else read

    async def result(self, request_id: str) -> Any:
        while (answer := await self.post("/retrieve_future", {"request_id": request_id})) is None:
            pass
        return answer

    async def session(self) -> str:
        session_id: str = (await self.post("/create_session", {}))["session_id"]
        return session_id

    async def model(self, session_id: str, number: int) -> str:
        body = {"session_id": session_id, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 8}}
        model_id: str = (await self.result((await self.post("/create_model", body))["request_id"]))["model_id"]
        return model_id


async def timed(calls: list[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Return the seconds from the start of all calls to the end of each."""
    started = time.perf_counter()

    async def one(call: Callable[[], Awaitable[Any]]) -> float:
        await call()
        return time.perf_counter() - started

    return sorted(await asyncio.gather(*map(one, calls)))


async def accept(client: Client, session_id: str, model_id: str, first: int, count: int, size: int) -> dict[str, float]:
    """Time concurrent submits of one model, with heartbeats meanwhile; in ms."""
    bodies = [forward_backward(model_id, first + i, size) for i in range(count)]
    beats: list[float] = []
    done = asyncio.Event()

    async def beat() -> None:
        while not done.is_set():
            started = time.perf_counter()
            await client.post("/session_heartbeat", {"session_id": session_id})
            beats.append(time.perf_counter() - started)
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(2 * HEARTBEAT_EVERY_S)
    accepted: list[str] = []

    async def submit(body: bytes) -> None:
        accepted.append((await client.post("/forward_backward", body, PROTOBUF))["request_id"])

    times = await timed([partial(submit, body) for body in bodies])
    done.set()
    await beating
    assert len(set(accepted)) == count, "a submit was lost"
    for request_id in accepted:
        await client.result(request_id)
    bare = Client(client._http, client._api.removesuffix("/api/v1"))
    bare_times = await timed([partial(bare.post, "/bare", body, PROTOBUF) for body in bodies])
    return {
        "p50": 1e3 * statistics.median(times),
        "p99": 1e3 * times[int(0.99 * count)],
        "bare p99": 1e3 * bare_times[int(0.99 * count)],
        "heartbeat max": 1e3 * max(beats),
    }


async def throughput(client: Client, session_id: str, first_model: int) -> float:
    """Return futures per second, submitted and fetched, over models that each send an operation when one is done."""
    models = [await client.model(session_id, first_model + lane) for lane in range(LANES)]

    async def lane(model_id: str) -> None:
        for number in range(1, OPERATIONS + 1):
            submitted = await client.post(
                "/forward_backward", forward_backward(model_id, number, SMALL_BYTES), PROTOBUF
            )
            await client.result(submitted["request_id"])

    started = time.perf_counter()
    await asyncio.gather(*map(lane, models))
    return LANES * OPERATIONS / (time.perf_counter() - started)


def size_bytes(data_dir: Path) -> int:
    return sum(file.stat().st_size for file in data_dir.glob("tinker-server.db*"))


async def measure(url: str, rounds: int, data_dir: Path) -> None:
    server = psutil.Process().children()[-1]
    memory = server.memory_info().rss
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=HEADERS) as http:
        client = Client(http, f"{url}/api/v1")
        session_id = await client.session()
        before = size_bytes(data_dir)
        rates = [await throughput(client, session_id, LANES * number) for number in range(rounds)]
        print(f"futures completed a second: {statistics.median(rates):.0f}")
        if before:
            grown = (size_bytes(data_dir) - before) / (rounds * LANES * OPERATIONS) * 1000
            print(f"database growth: {grown / 1e6:.2f} MB per 1,000 requests of {SMALL_BYTES} bytes")
        for count, size in ((SMALL_COUNT, SMALL_BYTES), *((count, LARGE_BYTES) for count in LARGE_COUNTS)):
            model_id = await client.model(session_id, 10**6 + count + size)
            measured = [
                await accept(client, session_id, model_id, 1 + count * number, count, size)
                for number in range(rounds + 1)
            ][1:]  # the first opens the connections
            medians = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
            print(
                f"{count} submits of {size // 1000} kB: "
                + ", ".join(f"{key} {value:.0f} ms" for key, value in medians.items()),
                flush=True,
            )
        await asyncio.sleep(2)
        print(f"memory of the server: {memory / 1e6:.0f} MB at first, {server.memory_info().rss / 1e6:.0f} MB now")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--database-url", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, served(Path(directory), args.database_url) as url:
        asyncio.run(measure(url, args.rounds, Path(directory)))
