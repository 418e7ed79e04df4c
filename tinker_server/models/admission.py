"""How much an owner may have waiting at once: a bound on what its requests hold in memory and in the database."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from tinker_server.errors import Busy

MAX_IMAGE_BYTES = 512 << 20
"""Pixels of an owner's image prompts in flight, at three bytes each after resizing: 682 images of 512 x 512."""
MAX_QUEUED = 10_000
"""Training operations of an owner that wait, however small: each is a row, and some objects in memory."""


class Budget:
    """So much of something for each owner: what one has in flight takes nothing from another."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._in_flight: defaultdict[str, int] = defaultdict(int)

    def require(self, owner: str, amount: int) -> None:
        """Raises Busy where there is no room. What is larger than all room is let in alone."""
        used = self._in_flight.get(owner, 0)
        if amount and used and used + amount > self._most:
            raise Busy(
                f"{used} {self._what} are in flight; {self._most} are allowed; send this one again a little later"
            )

    def enter(self, owner: str, amount: int) -> None:
        """Count what was let in."""
        self._in_flight[owner] += amount

    def leave(self, owner: str, amount: int) -> None:
        """It has ended."""
        self._in_flight[owner] -= amount
        if not self._in_flight[owner]:
            del self._in_flight[owner]

    @contextmanager
    def counted(self, owner: str, amount: int) -> Iterator[None]:
        """Count so much while the block runs. Raises Busy."""
        self.require(owner, amount)
        self.enter(owner, amount)
        try:
            yield
        finally:
            self.leave(owner, amount)

    @property
    def total(self) -> int:
        """Of all owners."""
        return sum(self._in_flight.values())


class Admission:
    """Of samples, by sequences and by bytes of prompts and images; of training, by what waits and its bytes."""

    def __init__(self, max_sequences: int, max_sample_bytes: int, max_queued_bytes: int) -> None:
        self.queued = Budget(MAX_QUEUED, "training operations")
        self.sequences = Budget(max_sequences, "samples")
        self.sample_bytes = Budget(max_sample_bytes, "bytes of prompts")
        self.image_bytes = Budget(MAX_IMAGE_BYTES, "bytes of images' pixels")
        self.queued_bytes = Budget(max_queued_bytes, "bytes of training operations")

    def require_queued(self, owner: str, size_bytes: int) -> None:
        """Raises Busy where one more training operation has no room."""
        self.queued.require(owner, 1)
        self.queued_bytes.require(owner, size_bytes)

    def enter_queued(self, owner: str, size_bytes: int) -> None:
        """Count a training operation."""
        self.queued.enter(owner, 1)
        self.queued_bytes.enter(owner, size_bytes)

    def leave_queued(self, owner: str, size_bytes: int) -> None:
        """It has ended."""
        self.queued.leave(owner, 1)
        self.queued_bytes.leave(owner, size_bytes)

    def enter_sample(self, owner: str, num_samples: int, size_bytes: int, image_bytes: int) -> None:
        """One request for a thousand samples counts as a thousand; its images count once. Raises Busy."""
        self.sequences.require(owner, num_samples)
        self.sample_bytes.require(owner, size_bytes)
        self.image_bytes.require(owner, image_bytes)
        self.force_sample(owner, num_samples, size_bytes, image_bytes)

    def force_sample(self, owner: str, num_samples: int, size_bytes: int, image_bytes: int) -> None:
        """Count a request that was let in by an earlier server."""
        self.sequences.enter(owner, num_samples)
        self.sample_bytes.enter(owner, size_bytes)
        self.image_bytes.enter(owner, image_bytes)

    def leave_sample(self, owner: str, num_samples: int, size_bytes: int, image_bytes: int) -> None:
        """It has ended."""
        self.sequences.leave(owner, num_samples)
        self.sample_bytes.leave(owner, size_bytes)
        self.image_bytes.leave(owner, image_bytes)
