"""How many samples may be in flight: a bound on what waiting requests hold in memory and in the database."""

from tinker_server.errors import Busy


class Admission:
    """Counts sequences, not requests: one request for a thousand samples is a thousand."""

    def __init__(self, max_sequences: int, max_bytes: int) -> None:
        self._max_sequences = max_sequences
        self._max_bytes = max_bytes
        self.num_sequences = 0
        self.size_bytes = 0

    def enter(self, num_sequences: int, size_bytes: int) -> None:
        """Raises Busy where there is no room. A request larger than all room is let in alone."""
        crowded = self.num_sequences + num_sequences > self._max_sequences or (
            self.size_bytes + size_bytes > self._max_bytes
        )
        if crowded and self.num_sequences:
            raise Busy(
                f"{self.num_sequences} samples ({self.size_bytes} bytes of prompts) are in flight;"
                f" {self._max_sequences} ({self._max_bytes} bytes) are allowed; send this one again a little later"
            )
        self.force(num_sequences, size_bytes)

    def force(self, num_sequences: int, size_bytes: int) -> None:
        """Count a request that was let in by an earlier server."""
        self.num_sequences += num_sequences
        self.size_bytes += size_bytes

    def leave(self, num_sequences: int, size_bytes: int) -> None:
        self.num_sequences -= num_sequences
        self.size_bytes -= size_bytes
