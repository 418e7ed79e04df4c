"""`tinker-server join` and `leave`: another machine gives a server its engines, or stops doing so."""

import argparse
import asyncio
import signal

from backends.cluster.join import Joining, leave


async def belong(arguments: argparse.Namespace) -> None:
    """Run join until the machine has left, or leave. Raises BackendFailed, and CancelledError when interrupted."""
    if arguments.command == "leave":
        await leave(arguments.address, arguments.token_file, arguments.name)
        print(f"{arguments.name} leaves")
        return
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    await Joining(arguments.address, arguments.token_file, arguments.name).run()
