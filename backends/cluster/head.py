"""Run the process that has Ray's head beneath it, or uses a Ray that was there before: `python -m
tinker_server.backends.cluster.head
FD`. Only it imports Ray."""

import asyncio
import contextlib
import logging
import os
from functools import partial

import ray

from tinker_server.backends.cluster.commands import EndProcess, StartHead, StartProcess, UseRay
from tinker_server.backends.cluster.nodes import Agents, Members
from tinker_server.backends.cluster.ray_commands import NODE_LABEL, RayEnded, ray_running, require_guarded
from tinker_server.backends.processes.guarded import Guarded
from tinker_server.backends.processes.rpc import OnPart, serve_async
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
HEAD = "head"
"""Name of the serving machine's own node."""
_START_S = 60.0
_RETRY_S = 0.3
connect = partial(ray.init, log_to_driver=False, logging_level="ERROR", namespace="tinker")


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
                await asyncio.to_thread(connect, f"{command.address}:{command.port}")
                stack.push_async_exit(unless_started.pop_all())
    except (TimeoutError, ConnectionError, RuntimeError) as error:
        raise BackendFailed(f"Ray's head does not start: {error or 'it takes too long'}") from None
    ended.add_done_callback(lambda _: os._exit(1))  # the server notices, and starts both again


async def use_ray(command: UseRay, stack: contextlib.AsyncExitStack) -> None:
    """Connect to a Ray cluster that exists, and have its nodes join the server. Raises BackendFailed."""
    await require_guarded(command.address)
    try:
        await asyncio.to_thread(connect, command.address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BackendFailed(
            f"this machine cannot use the Ray cluster at {command.address}, of which it must be a node itself: {reason}"
        ) from None
    inviting = asyncio.create_task(Members(command.invitation).invite(), name="members")

    def exit_with_ray(invited: "asyncio.Task[None]") -> None:
        if not invited.cancelled():  # Ray is gone: the server notices, and starts this process again
            log.error("the Ray cluster at %s is gone: %s", command.address, invited.exception())
            os._exit(1)

    inviting.add_done_callback(exit_with_ray)
    stack.callback(inviting.cancel)


async def _until_open(running: Guarded, command: StartHead) -> asyncio.Task[int | None]:
    """Return the task that ends with Ray, once its port is open. Raises RayEnded."""
    ended = asyncio.create_task(running.wait())
    while not ended.done():
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(command.address, command.port)
            writer.close()
            return ended
        await asyncio.sleep(_RETRY_S)
    raise RayEnded(f"Ray's head does not start on port {command.port}")


async def main() -> None:
    """Serve the server's commands until it closes its end."""
    agents = Agents()
    async with contextlib.AsyncExitStack() as stack:

        async def handle(command: StartHead | UseRay | StartProcess | EndProcess, _: OnPart) -> int | None:
            match command:
                case StartHead():
                    await start_head(command, stack)
                case UseRay():
                    await use_ray(command, stack)
                case StartProcess():
                    return await agents.start(command)
                case EndProcess():
                    await agents.end(command)
            return None

        await serve_async(handle)


if __name__ == "__main__":
    asyncio.run(main())
