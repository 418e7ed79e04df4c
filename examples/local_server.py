"""Run the server as a child process while an example needs it. Independent of models and clients."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 300  # the first start of vLLM on a slow machine takes more than a minute
STOP_TIMEOUT_S = 20
GIB = 1 << 30
Result = TypeVar("Result")


class TooSmall(Exception):
    """The machine has too little memory or disk; the message has the numbers."""


@dataclass(frozen=True)
class Needs:
    """Bytes that a server with its client needs of the machine."""

    memory: int
    disk: int

    def require(self, directory: Path) -> None:
        """Raise TooSmall if less memory is available, or less of the disk that has the directory is free."""
        parent = next(path for path in (directory, *directory.parents) if path.exists())
        has = {"memory": psutil.virtual_memory().available, "disk": psutil.disk_usage(str(parent)).free}
        for name, needed in (("memory", self.memory), ("disk", self.disk)):
            if has[name] < needed:
                place = f" at {parent}" if name == "disk" else ""
                raise TooSmall(
                    f"{needed / GIB:.1f} GiB of {name} are needed{place}, and {has[name] / GIB:.1f} GiB are free"
                )


class ServerDied(Exception):
    """The server ended, or did not start in time; the message holds the end of its log."""


@dataclass(frozen=True)
class LocalServer:
    base_url: str
    log: Path
    process: asyncio.subprocess.Process

    def last_lines(self, count: int) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def death(self, what: str) -> ServerDied:
        return ServerDied("\n".join([f"{what}; the end of {self.log}:", *self.last_lines(30)]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def wait_until_healthy(server: LocalServer, console: Console) -> None:
    """Show the newest line of the server's log until it answers."""
    started = time.monotonic()
    async with httpx.AsyncClient() as http:
        with console.status("starting the server") as status:
            while (waited_s := time.monotonic() - started) < START_TIMEOUT_S:
                if server.process.returncode is not None:
                    raise server.death(f"the server ended with status {server.process.returncode}")
                try:
                    response = await http.get(f"{server.base_url}/api/v1/healthz")
                    if response.status_code == 200 and response.json() == {"status": "ok"}:
                        console.print(f"server ready at {server.base_url} after {waited_s:.0f} s")
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                line = Text.from_ansi("".join(server.last_lines(1))).plain
                shown = Text(f"starting the server, {waited_s:.0f} s  {line}", overflow="ellipsis", no_wrap=True)
                status.update(shown)
                await asyncio.sleep(0.5)
    raise server.death(f"the server was not ready after {START_TIMEOUT_S} s")


@asynccontextmanager
async def local_server(arguments: list[str], log: Path, console: Console) -> AsyncIterator[LocalServer]:
    """Run `python -m tinker_server serve` with `arguments` on a free port, healthy on entry, stopped on exit."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinker_server", "serve", "--port", str(port), *arguments),
            cwd=ROOT,
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops the server in order
        )
    server = LocalServer(f"http://127.0.0.1:{port}", log, process)
    try:
        await wait_until_healthy(server, console)
        yield server
    finally:
        await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Ask the server to end, then end whatever is left of its process group."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left
    await process.wait()


async def while_alive(server: LocalServer, work: Coroutine[None, None, Result]) -> Result:
    """Return the result of `work`. Raises ServerDied as soon as the server ends."""
    job = asyncio.create_task(work)
    death = asyncio.create_task(server.process.wait())
    try:
        await asyncio.wait({job, death}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise server.death(f"the server ended with status {death.result()}")
    finally:
        job.cancel()
        death.cancel()
