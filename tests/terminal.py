"""A terminal: what a person sees of what programs write to it."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from struct import pack
from termios import TIOCSWINSZ

_PIECE = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Terminal:
    """Programs write to the descriptor `end`."""

    def __init__(self) -> None:
        self._master, self.end = os.openpty()
        ioctl(self.end, TIOCSWINSZ, pack("HHHH", 50, 160, 0, 0))
        self._written = b""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while piece := os.read(self._master, 1 << 16):
                self._written += piece

    def close(self) -> list[str]:
        """The lines at the end."""
        os.close(self.end)
        self._reading.join(10)
        os.close(self._master)
        return self.lines()

    def lines(self) -> list[str]:
        """The lines now, from text, ends of lines, and the control codes that rich uses."""
        screen, row, column = [""], 0, 0
        for piece in _PIECE.finditer(self._written.decode(errors="replace")):
            number, command = piece[1], piece[2]
            if piece[0] == "\r":
                column = 0
            elif piece[0] == "\n":
                row += 1
                screen += [""] * (row + 1 - len(screen))
            elif command == "A":
                row = max(0, row - int(number or 1))
            elif command == "K":
                screen[row] = ""
            elif command is None:
                screen[row] = screen[row][:column].ljust(column) + piece[0] + screen[row][column + len(piece[0]) :]
                column += len(piece[0])
        return [line.rstrip() for line in screen if line.strip()]

    def wait(self, stands: Callable[[list[str]], bool], limit_s: float = 60) -> list[str]:
        """The lines, once they are as asked for; fails after so long."""
        ends = time.monotonic() + limit_s
        while not stands(lines := self.lines()):
            assert time.monotonic() < ends, f"the terminal shows {lines}"
            time.sleep(0.05)
        return lines


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """For a test that closes it itself, or fails."""
    one = Terminal()
    try:
        yield one
    finally:
        with contextlib.suppress(OSError):
            one.close()
