"""Bounds what each owner has in flight, and so what its requests hold in memory and in the database."""

from collections.abc import Iterator
from contextlib import contextmanager

from tinker_server.errors import Busy

MAX_IMAGE_BYTES = 512 << 20
"""Pixels of an owner's image prompts in flight, at three bytes each after resizing: 682 images of 512 x 512."""
MAX_QUEUED = 10_000
"""Training operations of an owner that wait, however small: each is a row, and some objects in memory."""


class Budget:
    """Several amounts for each owner, named by what they count: what an owner has in flight takes nothing from
    another."""

    def __init__(self, most: dict[str, int]) -> None:
        self._most = most
        self._in_flight: dict[str, list[int]] = {}

    def enter(self, owner: str, *amounts: int, forced: bool = False) -> None:
        """Let a request in and count it. Raises Busy where there is no room, unless `forced`. A request that is larger
        than all room is let in alone."""
        in_flight = self._in_flight.setdefault(owner, [0] * len(self._most))
        for used, amount, (what, most) in zip(in_flight, amounts, self._most.items(), strict=True):
            if amount and used and used + amount > most and not forced:
                raise Busy(f"{used} {what} are in flight; {most} are allowed; send this one again a little later")
        for number, amount in enumerate(amounts):
            in_flight[number] += amount

    def leave(self, owner: str, *amounts: int) -> None:
        """Count what has ended."""
        in_flight = self._in_flight.setdefault(owner, [0] * len(self._most))
        for number, amount in enumerate(amounts):
            in_flight[number] -= amount
        if not any(in_flight):
            del self._in_flight[owner]

    @contextmanager
    def count(self, owner: str, *amounts: int) -> Iterator[None]:
        """Count these amounts while the block runs. Raises Busy."""
        self.enter(owner, *amounts)
        try:
            yield
        finally:
            self.leave(owner, *amounts)

    @property
    def totals(self) -> list[int]:
        """The amounts of all owners together."""
        return [sum(owners) for owners in zip(*self._in_flight.values(), strict=True)] or [0] * len(self._most)


class Admission:
    """The budget of samples and that of training operations."""

    def __init__(self, max_sequences: int, max_sample_bytes: int, max_queued_bytes: int) -> None:
        self.samples = Budget(
            {
                "samples": max_sequences,
                "bytes of prompts": max_sample_bytes,
                "bytes of images' pixels": MAX_IMAGE_BYTES,
            }
        )
        """By sequences, so that a request for a thousand counts as a thousand, by the prompts' bytes, and by the pixels
        of their images, once for all samples of a prompt."""
        self.queued = Budget({"training operations": MAX_QUEUED, "bytes of training operations": max_queued_bytes})
