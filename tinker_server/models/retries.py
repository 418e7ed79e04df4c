"""How often work is done again that was interrupted through no fault of its own."""

from dataclasses import dataclass

from tinker_server.backends.protocol import ModelLost, ProcessDied
from tinker_server.errors import DatabaseUnavailable


@dataclass
class Retries:
    """The interruptions that a piece of work may still have. The last of each kind fails it."""

    deaths: int = 2
    """A process died under it."""
    losses: int = 5
    """Its model was lost, or not restored before it began."""
    outages: int = 4
    """The database did not answer for half a minute, which interrupts no change of a model."""
    attempt: int = 1

    def allow(self, error: Exception) -> bool:
        """Count an interruption, and return whether the work may be done again. Any other error fails the work."""
        self.attempt += 1
        match error:
            case ProcessDied():
                self.deaths -= 1
                return self.deaths > 0
            case ModelLost():
                self.losses -= 1
                return self.losses > 0
            case DatabaseUnavailable():
                self.outages -= 1
                return self.outages > 0
        return False
