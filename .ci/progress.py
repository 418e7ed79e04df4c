"""Shows the progress of pip, whose plain output it reads: .ci/progress.py MEGABYTES SECONDS < output

MEGABYTES is about what all packages together have, and SECONDS the time that the set-up has taken before. On a terminal
one line is renewed each second; elsewhere a line is written for each large package.
"""

import re
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote

_COMING = re.compile(r"\s*(?:Downloading|Using cached) (?P<file>\S+) \((?P<size>[\d.]+) (?P<unit>bytes|kB|MB|GB)\)")
_LOCAL = re.compile(r"\s*Processing (?P<file>\S+\.whl)")
_MEGABYTES = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_LARGE_MB = 20.0
"""A package of so many megabytes has a line of its own where the output is no terminal."""
_WIDTH = 78


class Progress:
    """What pip has said so far."""

    def __init__(self, expected_mb: float) -> None:
        self._expected_mb = expected_mb
        self.done_mb = 0.0
        self.doing = "looking for packages"

    def read(self, line: str) -> float:
        """Take in a line of pip's output; return the megabytes of the package that it begins to fetch, 0 for none."""
        size_mb = 0.0
        if found := _COMING.match(line):
            size_mb = float(found["size"]) * _MEGABYTES[found["unit"]]
        elif found := _LOCAL.match(line):
            size_mb = _local_mb(Path(found["file"]))
        elif line.startswith("Installing collected packages"):
            self.doing = f"installing {line.count(',') + 1} packages"
        if size_mb:
            self.done_mb += size_mb
            self.doing = f"{_package(found['file'])} ({size_mb:.0f} MB)" if found and size_mb >= 1 else self.doing
        return size_mb

    def line(self, seconds: float) -> str:
        """Describe it in one line."""
        return f"[set-up {seconds:.0f}s] {self.done_mb:.0f} of about {self._expected_mb:.0f} MB: {self.doing}"


def _package(file: str) -> str:
    """Return the name of the package in a wheel's file."""
    return unquote(file.rpartition("/")[2]).partition("-")[0]


def _local_mb(wheel: Path) -> float:
    try:
        return wheel.stat().st_size * 1e-6
    except OSError:
        return 0.0


def main(expected_mb: float, before_s: float) -> None:
    """Read pip's output to its end."""
    progress, began, is_terminal = Progress(expected_mb), time.monotonic() - before_s, sys.stdout.isatty()
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(1):
            print(f"\r{progress.line(time.monotonic() - began):{_WIDTH}.{_WIDTH}}", end="", flush=True)
        print()

    renewing = threading.Thread(target=renew)
    if is_terminal:
        renewing.start()
    for line in sys.stdin:
        size_mb = progress.read(line)
        if not is_terminal and (size_mb >= _LARGE_MB or line.startswith("Installing collected")):
            print(progress.line(time.monotonic() - began), flush=True)
    has_ended.set()
    if is_terminal:
        renewing.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
