"""Printing of tables on the terminal."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from tinker_server.auth.key import Key

_WIDTH = 160
"""Width if the output is not a terminal."""


def show(table: RenderableType) -> None:
    """Print a table literally: `:train:` in the id of a run is not an emoji, and [] in a name is not markup."""
    console(None if sys.stdout.isatty() else _WIDTH).print(table)


def console(width: int | None) -> Console:
    """Return a console that prints text literally."""
    return Console(width=width, emoji=False, markup=False, highlight=False)


def compact_table(*names: str, title: str | None = None) -> Table:
    """Return a table whose rows are a line each: on a narrow terminal the first column is cut short, and no other.

    The first column has ids or names without a space, which are in `--json` as a whole.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, no_wrap=number > 0, overflow="ellipsis")
    return table


def moment(at: float | None, missing: str) -> str:
    """Format a time in UTC, to the minute; None as `missing`."""
    return missing if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def day(at: float | None, missing: str) -> str:
    """Format the day of a time in UTC; None as `missing`."""
    return moment(at, missing).partition(" ")[0]


def keys_table(keys: Sequence[Key], used_at: Mapping[str, float]) -> Table:
    """Make a table of API keys, with the times of their last use by fingerprint."""
    table, now = compact_table("name", "key", "scope", "created", "expires", "last used"), time.time()
    for key in keys:
        expires = day(key.expires_at, "never") if key.is_valid(now) else "has expired"
        scope = "all, admin" if key.is_admin else key.scope
        created, used = day(key.created_at, "unknown"), moment(used_at.get(key.fingerprint), "never")
        table.add_row(key.name, key.id, scope, created, expires, used)
    return table
