"""The command line: `tinker-server serve --model NAME=DIRECTORY`."""

import argparse
import asyncio
import contextlib
import logging
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from backends.config import BackendConfig
from backends.protocol import BackendFailed
from tinker_server.app import create_app
from tinker_server.errors import StartFailed
from tinker_server.server import Server
from tinker_server.settings import Settings

log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def main() -> int:
    """Serve until told to stop. Exit codes: 0 stopped, 2 could not start, 130 interrupted at start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("uvicorn", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = read_settings(sys.argv[1:])
        raise_file_limit()
        listener = listen(settings.host, settings.port)
        # uvloop when it is there; asyncio.run takes no loop factory before Python 3.12
        with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, listener))
    except (StartFailed, BackendFailed) as error:
        print(f"tinker-server: {error}", file=sys.stderr)
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    return 0


def read_settings(arguments: list[str]) -> Settings:
    """The environment's settings with the command line's in their place. Raises StartFailed."""
    parser = argparse.ArgumentParser(prog="tinker-server", description="A self-hosted server for the tinker SDK.")
    parser.add_argument("command", nargs="?", choices=["serve"], default="serve")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (8000)")
    parser.add_argument("--data-dir", type=Path, help="database, checkpoints, scratch files (tinker-data)")
    parser.add_argument("--database-url", help="SQLAlchemy URL (SQLite in the data directory)")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="serve a base model, a directory or a hub id, under a name; may be repeated",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="where to compute (auto)")
    parser.add_argument("--ranks", type=int, help="trainer processes per base model (1)")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        settings = Settings()
        own = {name: given[name] for name in ("host", "port", "data_dir", "database_url") if name in given}
        backend = settings.backend.model_dump(exclude_unset=True)
        backend |= {name: given[name] for name in ("device", "ranks") if name in given}
        backend["models"] = checked_models(backend.get("models", {}) | dict(map(split_model, given["model"])))
        return Settings(**own, backend=BackendConfig.model_validate(backend))
    except ValidationError as error:
        problem: Any = error.errors()[0]
        raise StartFailed(f"setting {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def split_model(text: str) -> tuple[str, str]:
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        raise StartFailed(f"--model {text}: write NAME=DIRECTORY or NAME=HUB_ID")
    return name, source


def checked_models(models: dict[str, str]) -> dict[str, str]:
    """Name to absolute directory or hub id. Raises StartFailed where there is neither, or no model at all."""
    if not models:
        raise StartFailed("no models to serve: give --model NAME=DIRECTORY or NAME=HUB_ID")
    checked = {}
    for name, source in models.items():
        directory = Path(source).expanduser()
        if directory.is_dir():
            checked[name] = str(directory.resolve())
        elif _HUB_ID.fullmatch(source) and not source.startswith("."):
            checked[name] = source
        else:
            raise StartFailed(f"model {name}: there is no directory {source}, and a hub id looks like org/name")
    return checked


def raise_file_limit() -> None:
    """Every held poll is an open connection, and there may be thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before the models are loaded: a port in use should be told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
    except OSError as error:
        raise StartFailed(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Load the models, serve, and on the first SIGINT or SIGTERM drain and stop."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None

    def on_signal(act: Callable[[], object]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, act)

    def interrupt() -> None:
        on_signal(lambda: log.info("stopping already"))  # a second cancellation would cut the clean-up short
        this.cancel()

    on_signal(interrupt)
    app = create_app(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("loading %s", ", ".join(f"{n} from {s}" for n, s in settings.backend.models.items()))
    async with app.router.lifespan_context(app):
        server = Server(app, app.state.services.drain, lambda: print(url, flush=True))
        on_signal(lambda: server.handle_exit(signal.SIGINT, None))
        await server.serve(sockets=[listener])
        log.info("stopping")


if __name__ == "__main__":
    sys.exit(main())
