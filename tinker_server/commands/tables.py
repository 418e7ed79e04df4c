"""Tables on the terminal."""

import sys

from rich.console import Console, RenderableType

_WIDTH = 160
"""Where nobody's terminal has one."""


def show(table: RenderableType) -> None:
    """Print it as it is: `:train:` in the id of a run is no picture of a train, and [] in a name no colour."""
    console(None if sys.stdout.isatty() else _WIDTH).print(table)


def console(width: int | None) -> Console:
    """What prints."""
    return Console(width=width, emoji=False, markup=False, highlight=False)
