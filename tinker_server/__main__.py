"""The command line: `tinker-server serve --model NAME=DIRECTORY`, `tinker-server keys add NAME`."""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

from tinker_server.app import create_app
from tinker_server.auth import keys
from tinker_server.auth.proofs import verify
from tinker_server.backends.protocol import BackendFailed, Unavailable
from tinker_server.command_line import change_keys, parse, read_settings
from tinker_server.commands.admin import administrate
from tinker_server.commands.backup import back_up, restore
from tinker_server.commands.doctor import diagnose, read_own_layout
from tinker_server.commands.join import belong
from tinker_server.commands.keyless_runs import advise
from tinker_server.commands.status import Status
from tinker_server.commands.tables import show
from tinker_server.errors import DatabaseUnavailable, StartDelayed, StartFailed, Superseded, start_failure
from tinker_server.observability import log_config, progress
from tinker_server.settings import Settings
from tinker_server.web.server import BACKLOG, Server

log = logging.getLogger(__name__)


def main() -> int:
    """Run a command of the command line.

    Exit codes: 0 stopped or done, 2 the command or the server failed, 75 it failed for a reason that may pass, 130
    interrupted at start, 141 whoever read the output had enough, as `head`.
    """
    log_config.configure()
    try:
        code = run(parse(sys.argv[1:]))
        sys.stdout.flush()
    except (StartFailed, BackendFailed, DatabaseUnavailable) as error:
        print(f"tinker-server: {error}", file=sys.stderr)
        return os.EX_TEMPFAIL if may_pass(error) else 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left as it ends
        return 128 + signal.SIGPIPE
    return code


def run(arguments: argparse.Namespace) -> int:
    """Run a command, and return its exit code. Raises StartFailed, BackendFailed, DatabaseUnavailable."""
    if arguments.command == "status":
        asked = Status.fetch(arguments.url, arguments.key)
        if arguments.json:
            print(asked.as_json())
        else:
            show(asked.as_tables())
        return 0
    if arguments.command == "admin":
        administrate(arguments)
        return 0
    if arguments.command in ("join", "leave"):
        with asyncio.Runner() as runner:
            runner.run(belong(arguments))
        return 0
    settings = read_settings(arguments)
    log_config.configure(settings.log_level, settings.log_format)
    if arguments.command != "serve":
        return run_once(arguments, settings)
    raise_file_limit()
    listener = listen(settings.host, settings.port)
    require_keys_beyond_loopback(settings, listener)
    # asyncio.run accepts no loop factory before Python 3.12
    with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(settings, listener))
    return 0


def may_pass(error: Exception) -> bool:
    """Return whether the same command may succeed later. Not once another server has taken the database."""
    return isinstance(error, StartDelayed | Unavailable | DatabaseUnavailable) and not isinstance(error, Superseded)


def run_once(arguments: argparse.Namespace, settings: Settings) -> int:
    """Run keys, doctor, verify, backup or restore. Raises StartFailed, BackendFailed."""
    if arguments.command == "keys":
        change_keys(arguments, settings)
        if arguments.action == "add":
            with asyncio.Runner() as runner:
                print(runner.run(advise(settings)), end="", file=sys.stderr)  # scripts read the key from the output
        return 0
    if arguments.command == "doctor":
        with asyncio.Runner() as runner:
            own = runner.run(read_own_layout(settings.resolve_database_url()))
        config, shows = settings.resolve_backend(), arguments.changes
        diagnose(config, arguments.gpu, own, as_json=arguments.json, shows_changes=shows)
        return 0
    if arguments.command == "verify":
        print(f"{arguments.file}: signed by this server: {verify(settings.data_dir, arguments.file)}")
        return 0
    do, where = (back_up, "Backed up to") if arguments.command == "backup" else (restore, "Restored from")
    with asyncio.Runner() as runner:
        print(f"{where} {arguments.directory}: {runner.run(do(settings, arguments.directory.absolute()))}.")
    return 0


def raise_file_limit() -> None:
    """Raise the limit of open files: each held poll is a connection, and there may be thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. It is made before the models are loaded, so that a port in use is reported at once.

    A socket that is only bound lets another server bind the same port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            stack.pop_all()
    except (OSError, UnicodeError) as error:  # the latter for what is no name of a host
        reason = error.strerror if isinstance(error, OSError) else error
        raise start_failure(f"cannot listen on {host} port {port}: {reason}", error) from None
    return listener


def require_keys_beyond_loopback(settings: Settings, listener: socket.socket) -> None:
    """Refuse to listen beyond loopback without keys, since every request is then accepted. Raises StartFailed."""
    path = settings.resolve_keys_file()
    has_keys = bool(keys.read(path))  # a file that cannot be read is reported before anything is loaded
    if not has_keys and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        raise StartFailed(
            f"no API keys in {path}, so only this machine may connect: make one with `{keys.adding(path)}`,"
            " or listen on 127.0.0.1"
        )


def describe(settings: Settings, url: str) -> str:
    """Return sentences on what is served and where, for the operator who has waited for it."""
    path = settings.resolve_keys_file()
    names = len({key.name for key in keys.read(path).values()})
    has_keys = f"API keys: {names} owner{'' if names == 1 else 's'}."
    access = has_keys if path.exists() else "No API keys: any tml-… key works, from this machine only."
    return (
        f"API and dashboard: {url} Models: {', '.join(settings.backend.models)}. Data: {settings.data_dir.resolve()}."
        f" {access}"
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop if it is installed; None stands for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Load the models and serve. The first SIGINT or SIGTERM drains and stops."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None

    def on_signal(act: Callable[[], object]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, act)

    def interrupt() -> None:
        on_signal(lambda: log.info("already stopping"))  # a second cancellation would cut the clean-up short
        this.cancel()

    on_signal(interrupt)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    began = loop.time()

    def announce() -> None:
        log.info("Ready in %.0f s. %s", loop.time() - began, describe(settings, url))
        if not sys.stdout.isatty():
            print(url, flush=True)  # for scripts: on a terminal the line above has it

    log.info("loading %s", ", ".join(f"{n} from {s}" for n, s in settings.backend.models.items()))
    with progress.show() as shown:
        app = create_app(settings, on_loading=shown.on_loading)
        server = Server(app, shown.processes)
        async with server.listening(listener), app.router.lifespan_context(app):
            on_signal(lambda: server.handle_exit(signal.SIGINT, None))
            server.open(app.state.services.drain)
            announce()
            await server.wait_closed()
            log.info("stopping")
            app.state.services.storage.lease.require()  # raises if a lost lease, not a signal, stopped it
        log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
