"""How often work is done again that was interrupted through no fault of its own."""

from collections import Counter
from dataclasses import dataclass, field

from backends.protocol import ModelLost, ProcessDied
from tinker_server.errors import DatabaseUnavailable


@dataclass
class Retries:
    """The interruptions of one piece of work. Each limit is the number of interruptions after which it fails."""

    deaths: int = 2
    """A process died under it."""
    losses: int = 5
    """Its model was lost, or not restored before it began."""
    outages: int = 4
    """The database did not answer for half a minute, which interrupts no change of a model."""
    seen: Counter[str] = field(default_factory=Counter)

    def allow(self, error: Exception) -> bool:
        """Count an interruption, and return whether the work may be done again. Any other error does not interrupt:
        the work has failed."""
        match error:
            case ProcessDied():
                kind, limit = "death", self.deaths
            case ModelLost():
                kind, limit = "loss", self.losses
            case DatabaseUnavailable():
                kind, limit = "outage", self.outages
            case _:
                return False
        self.seen[kind] += 1
        return self.seen[kind] < limit
