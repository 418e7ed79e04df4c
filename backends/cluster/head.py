"""Run the process that has Ray's head beneath it: `python -m backends.cluster.head FD`. Only here is Ray imported."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backends.cluster.agent import Agent
from backends.cluster.commands import EndProcess, StartHead, StartProcess
from backends.cluster.offer import Offer
from backends.cluster.ray_commands import NODE_LABEL, RayEnded, ray_running
from backends.processes.launcher import Guarded
from backends.processes.rpc import OnPart, serve_async
from backends.protocol import BackendFailed

HEAD = "head"
"""Name of the serving machine's own node."""
_START_S = 60.0
_RETRY_S = 0.3
_NODE_S = 60.0
"""Longest time from a machine's joining until Ray knows it."""


async def start_head(command: StartHead, stack: contextlib.AsyncExitStack) -> None:
    """Start Ray, which ends with `stack`, and connect to it; the process ends if Ray does. Raises BackendFailed."""
    arguments = ["--head", "--node-ip-address", command.address, "--port", str(command.port)]
    arguments += ["--include-dashboard", "false", "--ray-client-server-port", str(command.port + 1)]
    arguments += ["--labels", f"{NODE_LABEL}={HEAD}"]
    try:
        async with asyncio.timeout(_START_S):
            async with contextlib.AsyncExitStack() as unless_started:
                running = await unless_started.enter_async_context(ray_running(arguments, {}))
                ended = await _until_open(running, command)
                connect = partial(ray.init, log_to_driver=False, logging_level="ERROR", namespace="tinker")
                await asyncio.to_thread(connect, f"{command.address}:{command.port}")
                stack.push_async_exit(unless_started.pop_all())
    except (TimeoutError, ConnectionError, RuntimeError) as error:
        raise BackendFailed(f"Ray's head does not start: {error or 'it takes too long'}") from None
    ended.add_done_callback(lambda _: os._exit(1))  # the server notices, and starts both again


async def _until_open(running: Guarded, command: StartHead) -> asyncio.Task[int]:
    """Return the task that ends with Ray, once its port is open. Raises RayEnded."""
    ended = asyncio.create_task(running.wait())
    while not ended.done():
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(command.address, command.port)
            writer.close()
            return ended
        await asyncio.sleep(_RETRY_S)
    raise RayEnded(f"Ray's head does not start on port {command.port}")


class Agents:
    """The actors on the machines, one each, made when it is first needed."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}
        """By Ray's number of the machine's present Ray."""

    async def start(self, command: StartProcess) -> int:
        """Start a process on a machine. Raises BackendFailed."""
        with _failing(command.offer):
            agent = await self._agent(command.offer)
            return int(await agent.start.remote(command.key, command.spec, command.seat))

    async def end(self, command: EndProcess) -> None:
        """End a process on a machine. Raises BackendFailed."""
        with _failing(command.offer):
            agent = await self._agent(command.offer)
            await agent.end.remote(command.key, command.grace_s)

    async def _agent(self, offer: Offer) -> Any:
        async with asyncio.timeout(_NODE_S):
            while (node := await asyncio.to_thread(_node, offer.ray_label)) is None:  # noqa: ASYNC110 - Ray has no event
                await asyncio.sleep(_RETRY_S)
        if (agent := self._agents.get(node)) is None:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            made = ray.remote(Agent).options(num_cpus=0, scheduling_strategy=where)
            agent = self._agents[node] = made.remote(offer)
        return agent


@contextlib.contextmanager
def _failing(offer: Offer) -> Iterator[None]:
    """Raise BackendFailed for whatever Ray raises."""
    try:
        yield
    except TimeoutError:
        raise BackendFailed(f"Ray does not know the machine {offer.name}") from None
    except (RayError, OSError) as error:
        cause = getattr(error, "cause", None) or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
        raise BackendFailed(f"the machine {offer.name}: {reason}") from error


def _node(label: str) -> str | None:
    """Return Ray's number of the machine with that label, if it is there."""
    found = (node for node in ray.nodes() if node["Alive"] and node["Labels"].get(NODE_LABEL) == label)
    return next((str(node["NodeID"]) for node in found), None)


async def main() -> None:
    """Serve the server's commands until it closes its end."""
    agents = Agents()
    async with contextlib.AsyncExitStack() as stack:

        async def handle(command: StartHead | StartProcess | EndProcess, _: OnPart) -> int | None:
            match command:
                case StartHead():
                    await start_head(command, stack)
                case StartProcess():
                    return await agents.start(command)
                case EndProcess():
                    await agents.end(command)
            return None

        await serve_async(handle)


if __name__ == "__main__":
    asyncio.run(main())
