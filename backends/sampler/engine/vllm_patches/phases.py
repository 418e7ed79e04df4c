"""What an engine does as it starts, and since when."""

import time


class Phases:
    """The phases of a start, in order."""

    def __init__(self) -> None:
        self._began: list[tuple[str, float]] = []

    def begin(self, doing: str) -> None:
        """Note that a phase begins, and so the one before ends."""
        self._began.append((doing, time.monotonic()))

    def ages(self) -> list[tuple[str, float]]:
        """Return each phase with the seconds since it began."""
        now_s = time.monotonic()
        return [(doing, now_s - began_s) for doing, began_s in self._began]
