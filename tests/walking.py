"""The walk of an operation: the calls of our own functions from the bytes of its request to its command to a process.

The server is real up to the socket of its processes, where doubles answer the commands.
"""

import asyncio
import contextlib
import inspect
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from tests.fakes import FakeBackend
from tests.specs import tiny_spec
from tinker_server.__main__ import listen
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.inputs import EncodedTextChunk
from tinker_server.api_schemas.sampling import SampledSequence, SampleResponse
from tinker_server.api_schemas.training import ForwardBackwardOutput, OptimStepResponse
from tinker_server.app import create_app
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import Others
from tinker_server.backends.processes.messages import STREAM_LIMIT, Outbox, read_message
from tinker_server.backends.processes.rpc import Child, Process
from tinker_server.backends.processes.spans import ANSWERED
from tinker_server.backends.sampler import commands as engine_commands
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer import commands as rank_commands
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.observability.progress import Processes
from tinker_server.settings import Settings
from tinker_server.web.server import Server

ROOT = Path(__file__).parents[1]
OURS = f"{ROOT / 'tinker_server'}/"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Newer Pythons have some of them inline."""
BACKGROUND = {"housekeeping", "keeping datums of a step", "recording the machine's load", "restoring lost models"}
"""Tasks that work for no operation."""
STAGES = {
    "bytes -> handler": ("BoundedHttp.data_received",),
    "handler -> writer": ("optim_step", "forward_backward", "asample"),
    "writer -> committed": ("BatchWriter.put",),
    "committed -> lane": ("FutureQueue._accept",),
    "lane -> socket": ("Lane.take", "Samples._run"),
}
"""Each stage, with the functions whose call begins it and is the first of its calls."""
HANDLER, COMMITTED = "handler -> writer", ("committed -> lane", "lane -> socket")
END = "Outbox.send"
"""The last call of the last stage."""
ACCEPTS = ("Actor.accept", "Samples.accept")
"""What the request's task does after this is its answer, which is no part of the walk."""
HEADERS = {
    "accept-encoding": "gzip, deflate, zstd",
    "accept": "application/x-protobuf, application/json",
    "user-agent": "AsyncTinker/Python 0.38.0",
    "x-stainless-package-version": "0.38.0",
    "x-stainless-os": "Linux",
    "x-stainless-arch": "x64",
    "x-stainless-runtime": "CPython",
    "x-stainless-runtime-version": "3.11.7",
    "x-stainless-async": "async:asyncio",
    "x-idempotency-key": "stainless-python-retry-c098329e-d262-4e09-b533-2c6cd9999d6d",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "60",
    "x-api-key": "tml-test",
    "host": "127.0.0.1",
}
"""As the SDK sends them."""


class Walk:
    """The calls by stage, in every thread that was started after it."""

    def __init__(self) -> None:
        self.calls: dict[str, list[str]] = {}
        self._ahead: list[str] = []
        """Stages that have not begun."""
        self._stage: str | None = None
        self._is_counting = False
        self._edge: asyncio.Task[Any] | None = None
        """The request's own task."""
        self._frames: set[FrameType] = set()
        """Those that were counted: a coroutine's is entered once more each time that it goes on."""
        threading.setprofile(self._profile)

    def close(self) -> None:
        threading.setprofile(None)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the walk of the one operation that is submitted while the block runs."""
        self.calls, self._ahead = {stage: [] for stage in STAGES}, list(STAGES)
        self._stage, self._edge, self._is_counting = None, None, True
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._is_counting = False
            self._frames.clear()

    @property
    def has_ended(self) -> bool:
        return not self._is_counting

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self._is_counting or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_name in COMPREHENSIONS:
            return
        if frame in self._frames or _goes_on(frame):
            return
        self._frames.add(frame)
        self._count(frame, code)

    def _count(self, frame: FrameType, code: CodeType) -> None:
        task = _current_task()
        if task is not None and task.get_name() in BACKGROUND:
            return
        if self._ahead and code.co_qualname in STAGES[self._ahead[0]]:
            self._stage = self._ahead.pop(0)
            if self._stage == HANDLER:
                self._edge = task
        if self._stage is None or (self._stage in COMMITTED and task is self._edge and not _is_below(frame, ACCEPTS)):
            return
        path = code.co_filename.removeprefix(f"{ROOT}/")
        self.calls[self._stage].append(f"{path}: {code.co_qualname}")
        if not self._ahead and code.co_qualname == END:
            self._is_counting = False


def _goes_on(frame: FrameType) -> bool:
    """Return whether a coroutine or generator that began earlier goes on: RESUME, at which a frame is entered, has an
    argument that tells."""
    flags = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return bool(frame.f_code.co_flags & flags) and bool(frame.f_code.co_code[frame.f_lasti + 1] & 3)


def _is_below(frame: FrameType, names: Collection[str]) -> bool:
    at: FrameType | None = frame
    while at is not None and at.f_code.co_qualname not in names:
        at = at.f_back
    return at is not None


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None


@dataclass
class Client:
    """One connection to the server, on which a request follows the answer of the one before."""

    walk: Walk
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, path: str, body: bytes, content_type: str) -> tuple[int, bytes]:
        """Return status and body of the answer."""
        fields = HEADERS | {"content-type": content_type, "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"POST /api/v1/{path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"(?mi)^content-length: (\d+)", answer)
        assert length is not None, answer
        return int(answer.split()[1]), await self.reader.readexactly(int(length[1]))

    async def post(self, path: str, /, **body: object) -> Any:
        status, answer = await self.send(path, json.dumps(body).encode(), wire.JSON)
        assert status == 200, answer
        return json.loads(answer)

    async def complete(self, submitted: dict[str, str]) -> None:
        """Wait for the result of an operation."""
        body = json.dumps({"request_id": submitted["request_id"]}).encode()
        while (answer := await self.send("retrieve_future", body, wire.JSON))[0] == 408:
            pass
        assert answer[0] == 200 and b'"error"' not in answer[1], answer

    async def operate(self, path: str, body: bytes, content_type: str) -> None:
        """Submit an operation, and wait for its result."""
        await self.complete(await self._submit(path, body, content_type))

    async def walk_of(self, path: str, body: bytes, content_type: str) -> dict[str, list[str]]:
        """Return the calls of an operation by stage."""
        with self.walk.counting():
            submitted = await self._submit(path, body, content_type)
            async with asyncio.timeout(20):
                while not self.walk.has_ended:  # noqa: ASYNC110 - nobody sets an event, and a poll would be counted
                    await asyncio.sleep(0.001)
        await self.complete(submitted)
        return self.walk.calls

    async def _submit(self, path: str, body: bytes, content_type: str) -> dict[str, str]:
        status, answer = await self.send(path, body, content_type)
        assert status == 200, answer
        submitted: dict[str, str] = json.loads(answer)
        return submitted


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Client]:
    """Serve one base model, `tiny`, in this event loop."""
    async with AsyncExitStack() as stack:
        walk = Walk()
        stack.callback(walk.close)
        backend, spec = FakeBackend(), tiny_spec(directory)
        trainer, sampler = TrainerClient(spec, _start_rank), SamplerPool(spec, _start_engine)
        for started in (trainer, sampler):
            await started.start()
            stack.push_async_callback(started.stop)
        model: Any = backend.tiny
        model.trainer, model.sampler = trainer, sampler  # real ones
        app = create_app(Settings(data_dir=directory / "data", drain_s=1, poll_hold_s=1), backend)
        listener, server = listen("127.0.0.1", 0), Server(app, Processes())
        await stack.enter_async_context(app.router.lifespan_context(app))
        await stack.enter_async_context(server.listening(listener))
        server.open(app.state.services.drain)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        yield Client(walk, reader, writer)
        writer.close()


async def _start_rank(_: ModelSpec, __: Others) -> list[Child]:
    return [await _double("trainer tiny rank 0", _as_a_rank)]


async def _start_engine(_: ModelSpec) -> list[Child]:
    return [await _double("sampler tiny", _as_an_engine)]


async def _double(name: str, answer: Callable[[Any], object]) -> Child:
    """Return the connection to a double of a process, which answers commands at once."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)
    serving = asyncio.create_task(_serve(theirs, answer))

    async def end(_: float) -> None:
        await serving

    return Child(name, Process(os.getpid(), end), reader, writer)


async def _serve(connection: socket.socket, answer: Callable[[Any], object]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=STREAM_LIMIT)
    outbox = Outbox(writer, "the server")
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            call_id, command = await read_message(reader)
            now_ns = time.time_ns()
            outbox.send((call_id, ANSWERED, answer(command), (now_ns, now_ns)))
    outbox.close()


def _as_a_rank(command: Any) -> object:
    match command:
        case rank_commands.Start():
            return LoadCheck([1, 2], [-1.0])
        case rank_commands.CreateModel():
            return rank_commands.Made(1 << 20, "own")
        case rank_commands.ComputeMicrobatch(_, order):
            output = ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": np.zeros(1, np.float32)}], metrics={})
            return rank_commands.ComputedMicrobatch([(number, output) for number in order], order)
        case rank_commands.OptimStep():
            return OptimStepResponse(metrics={"grad_norm": 1.0})
        case rank_commands.Snapshot(_, directory):
            directory.mkdir(parents=True)
    return None


def _as_an_engine(command: Any) -> object:
    match command:
        case engine_commands.Sample(task):
            num_tokens = task.params.max_tokens
            assert num_tokens is not None
            tokens, scores = np.zeros(num_tokens, np.int32), np.full(num_tokens, -1, np.float32)
            sequence = SampledSequence(stop_reason="length", tokens=tokens, logprobs=scores)
            length = sum(len(chunk.tokens) for chunk in task.prompt.chunks if isinstance(chunk, EncodedTextChunk))
            prompt_scores = np.append(np.nan, np.full(length - 1, -1)).astype(np.float32)
            return SampleResponse(sequences=[sequence], prompt_logprobs=prompt_scores if task.scores.logprobs else None)
    return None
