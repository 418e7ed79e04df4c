"""`tinker-server join` and `leave`: another machine gives a server its engines, or stops doing so."""

import argparse
import asyncio
import signal

from tinker_server.command_line import resolve_models, split_model
from tinker_server.embedded import DIRECTORIES


async def belong(arguments: argparse.Namespace) -> None:
    """Run join until the machine has left, or leave. Raises StartFailed, BackendFailed, and CancelledError when
    interrupted."""
    from tinker_server.backends.cluster.join import (  # slow to import: brings transformers
        join,
        leave,
        offer_of,
        until_answered,
    )

    address, token_file, name = arguments.address, arguments.token_file, arguments.name
    if arguments.command == "leave":
        await leave(address, token_file, name)
        print(f"{name} leaves")
        return
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    fetched = {name: None for name in arguments.model if "=" not in name and name not in DIRECTORIES}
    given = dict(split_model(name) for name in arguments.model if name not in fetched)
    models = fetched | resolve_models(given)
    await join(await until_answered(lambda: offer_of(name, address, token_file, arguments.data_dir, models)))
