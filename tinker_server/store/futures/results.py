"""Results of finished operations."""

import time
from dataclasses import dataclass, field

from tinker_server.errors import failure
from tinker_server.store.futures.notifications import Target
from tinker_server.store.records import Step


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished operation answers, as bytes ready to send."""

    body: bytes
    content_type: str
    failed: bool = False
    failure_category: str | None = None
    """Of a failed one: `user` or `server`."""
    finished_at: float = field(default_factory=time.time)
    operation_kind: str = ""
    """The store fills it in, with the operation's lane, number and owner."""
    lane: str = ""
    seq_id: int = 0
    owner: str = ""
    step: Step | None = None
    """What is recorded of it for its run's curves, in the same transaction."""
    position: int | None = None
    """In the log of its model, which needs the operation again; none: it changed nothing."""

    @classmethod
    def of_error(cls, error: Exception) -> "Result":
        """What an operation answers that failed with this."""
        said = failure(error)
        return cls(said.model_dump_json().encode(), "application/json", True, said.category)

    @property
    def completion(self) -> tuple[Target, int]:
        """Whose log of finished samples it is in, and at which cursor."""
        return Target.of(self.lane, self.seq_id), round(self.finished_at * 1e6)
