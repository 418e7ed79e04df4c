"""An actor on each machine, which starts the processes of models there with the launcher. Imports no Ray.

A process gets an end of a connection to the server as its own: what it sends and receives is as on the server's
machine, and nothing lies between.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from pathlib import Path

from tinker_server.backends.cluster.handshake import connect
from tinker_server.backends.cluster.lines import Lines
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.cluster.token import read_token
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.guarded import Guarded
from tinker_server.backends.processes.launcher import Place, launch_at, restore_environment

_LAST_WORDS_S = 0.1
"""Time for the server to read the answers that a process sent just before it ended."""


class Agent:
    """Starts and ends the processes of a machine. All of them end with it."""

    def __init__(self, offer: Offer) -> None:
        restore_environment(offer.environment)
        directory = Path(offer.data_dir)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(offer.received_dir, ignore_errors=True)  # another server may have sent other weights of that name
        self._lines = Lines(directory, offer.name, offer.server, read_token(Path(offer.token_file)))
        sys.stderr = self._lines.file  # Ray's own file for it ends with Ray
        self._forwarding: asyncio.Task[None] | None = None
        self._offer = offer
        self._processes: dict[str, Guarded] = {}
        self._watching: set[asyncio.Task[None]] = set()

    async def start(self, key: str, spec: ModelSpec, place: Place) -> int:
        """Start a process of a model; return its number. Raises BackendFailed, OSError."""
        if self._forwarding is None:
            self._forwarding = asyncio.create_task(self._lines.forward())
        token = read_token(Path(self._offer.token_file))
        connection = await connect(self._offer.server, token, ask="process", key=key)
        ours: socket.socket = connection.writer.get_extra_info("socket")
        with socket.socket(fileno=os.dup(ours.fileno())) as its:
            connection.writer.transport.abort()  # closes ours alone; the server waits until the process is there
            process = await launch_at(its, spec, place)
            ending = socket.socket(fileno=os.dup(its.fileno()))
        self._processes[key] = process
        watching = asyncio.create_task(self._watch(key, process, ending))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return process.pid

    async def end(self, key: str, grace_s: float) -> None:
        """End a process, if it does not end by itself in so many seconds."""
        if (process := self._processes.get(key)) is not None:
            await process.end(grace_s)

    async def _watch(self, key: str, process: Guarded, connection: socket.socket) -> None:
        """Shut the connection down when the process has ended: what it has started still holds its end."""
        await process.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        with connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        await process.end(0)
        del self._processes[key]
