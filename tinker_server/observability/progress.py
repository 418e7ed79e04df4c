"""Progress of starting processes: on a terminal a bar for each, elsewhere lines in the log."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from tinker_server.backends.protocol import Loading

log = logging.getLogger(__name__)
LINES_S = 10.0
"""Seconds between two log lines of a process."""
_REDRAWN_PER_S = 4
_BAR_COLUMNS = 20
_LAST_LINES_S = 2.0
"""Seconds to wait for the last output of ended children. A child that is still alive must not delay the end."""


@contextlib.contextmanager
def show() -> Iterator["Bars | Lines"]:
    """Show the progress that the result's `on_loading` gets on standard error within the block."""
    terminal = sys.stderr
    if terminal.isatty() and not Console(file=terminal).is_dumb_terminal:
        with Bars(terminal) as bars:
            yield bars
    else:
        yield Lines()


class Processes:
    """Processes that are starting, in order of their first report."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[float, Loading]] = {}

    def __bool__(self) -> bool:
        return bool(self._now)

    def note(self, process: str, loading: Loading | None) -> None:
        """Implement OnLoading."""
        if loading is None:
            self._now.pop(process, None)
        else:
            began, _ = self._now.get(process, (time.monotonic(), None))
            self._now[process] = began, loading

    def rows(self) -> list[tuple[str, Loading, float]]:
        """Return each process with its progress and the seconds since its first report."""
        return [(name, loading, time.monotonic() - began) for name, (began, loading) in list(self._now.items())]


class Lines:
    """Logs a line for each starting process every few seconds; its readiness is logged elsewhere."""

    def __init__(self, every_s: float = LINES_S) -> None:
        self._every_s = every_s
        self.processes = Processes()
        self._next: asyncio.TimerHandle | None = None

    def on_loading(self, process: str, loading: Loading | None) -> None:
        """Implement OnLoading."""
        self.processes.note(process, loading)
        if self._next is not None and not self.processes:
            self._next.cancel()
            self._next = None
        elif self._next is None and self.processes:
            self._next = asyncio.get_running_loop().call_later(self._every_s, self._log_progress)

    def _log_progress(self) -> None:
        for process, loading, seconds in self.processes.rows():
            parts = [loading.doing, amount(loading), f"{seconds:.0f} s"]
            log.info("loading: %s %s", process, ", ".join(filter(None, parts)))
        self._next = asyncio.get_running_loop().call_later(self._every_s, self._log_progress)


class Bars:
    """A bar for each starting process on `terminal`, redrawn in place.

    While this is open, everything else that this process and its children write to standard error is copied by a thread
    to a place above the bars. Written directly, the next redraw would erase it. So this is opened before any child.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._console = Console(file=terminal)
        self.processes = Processes()
        self._live: Live | None = None
        self._sharing = contextlib.ExitStack()
        self._copying: threading.Thread

    def __enter__(self) -> "Bars":
        self._share()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._draw(is_needed=False)
        self._sharing.close()
        self._copying.join(_LAST_LINES_S)

    def on_loading(self, process: str, loading: Loading | None) -> None:
        """Implement OnLoading."""
        self.processes.note(process, loading)
        self._draw(is_needed=bool(self.processes))

    def _draw(self, *, is_needed: bool) -> None:
        """Start or stop drawing. A terminal that has closed raises nothing."""
        with contextlib.suppress(OSError):
            if is_needed and self._live is None:
                self._live = Live(
                    console=self._console,
                    get_renderable=self._table,
                    refresh_per_second=_REDRAWN_PER_S,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            elif self._live is not None and not is_needed:
                live, self._live = self._live, None
                live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(5):
            table.add_column(no_wrap=True)
        for process, loading, seconds in self.processes.rows():
            known = loading.total_bytes > 0
            bar = ProgressBar(loading.total_bytes or None, loading.done_bytes, _BAR_COLUMNS, pulse=not known)
            table.add_row(process, bar, f"{seconds:.0f} s", loading.doing, amount(loading))
        return table

    def _share(self) -> None:
        reading, writing = os.pipe()
        writer = self._sharing.enter_context(os.fdopen(writing, "w", buffering=1))
        self._sharing.enter_context(contextlib.redirect_stderr(writer))
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._terminal:
                handler.setStream(writer)
                self._sharing.callback(handler.setStream, self._terminal)
        self._copying = threading.Thread(target=self._copy, args=(reading,), name="standard error", daemon=True)
        self._copying.start()

    def _copy(self, reading: int) -> None:
        """Copy lines until all writers have closed. Lines that the terminal refuses are lost: writers must not wait."""
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(OSError, ValueError):
                    self._console.print(line.rstrip("\n"), markup=False, highlight=False, emoji=False, soft_wrap=True)


def amount(loading: Loading) -> str:
    """Format done and total bytes; empty if the total is unknown."""
    if not loading.total_bytes:
        return ""
    unit, suffix = pick_unit_and_suffix(loading.total_bytes, ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024)
    digits = 0 if unit == 1 else 1
    return f"{loading.done_bytes / unit:.{digits}f} of {loading.total_bytes / unit:.{digits}f} {suffix}"
