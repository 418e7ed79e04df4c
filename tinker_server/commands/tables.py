"""Printing of tables on the terminal."""

import sys

from rich.console import Console, RenderableType

_WIDTH = 160
"""Width if the output is not a terminal."""


def show(table: RenderableType) -> None:
    """Print a table literally: `:train:` in the id of a run is not an emoji, and [] in a name is not markup."""
    console(None if sys.stdout.isatty() else _WIDTH).print(table)


def console(width: int | None) -> Console:
    """Return a console that prints text literally."""
    return Console(width=width, emoji=False, markup=False, highlight=False)
