"""An operation as it is accepted, and its result as it is stored and sent."""

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from tinker_server.api_schemas.base import Request
from tinker_server.errors import failure, shorten
from tinker_server.store.records import Step

log = logging.getLogger(__name__)
UNLOAD_SUFFIX = ":unload"
"""Suffix of the lane that holds a model's unload_model, as number 0: it follows whatever the model has queued."""


class ImagePlace(NamedTuple):
    """The position of an image in a body."""

    start: int
    size_bytes: int
    digest: str
    """SHA-256 of the image as it lies in the body, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A client's request under a number, with the bytes it came as."""

    operation_kind: str
    """A name in the table OPERATIONS, such as `optim_step`."""
    lane: str
    """model_id for training operations, sampling_session_id for samples."""
    seq_id: int
    body: bytes | None
    """None while it stays in the database until it is needed."""
    content_type: str
    owner: str
    digest: str = ""
    """Hash of the body: an equal hash under the same number is a repeat."""
    size_bytes: int = 0
    """Bytes of the body."""
    image_bytes: int = field(default=0, compare=False)
    """Bytes of the pixels of a sample's images. They are not stored."""
    answer_bytes: int = field(default=0, compare=False)
    """Bytes of tensors that its result will have, if its body says so. They are not stored."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    accepted_at: float = field(default_factory=time.time, compare=False)
    """Unix seconds."""
    request: Request | None = field(default=None, compare=False, repr=False)
    """The decoded body, if it is at hand and will be needed soon. It is not stored."""
    tries: int | None = None
    """Servers that began the operation after an earlier server left it unfinished, and did not finish it either. None
    for an operation that this server accepted."""
    images: tuple[ImagePlace, ...] = ()
    """The body's images in order. Each is stored once, even if other bodies have it too."""
    traceparent: str = field(default="", compare=False, repr=False)
    """The trace it belongs to, as its client sent it (W3C Trace Context). It is not stored."""

    def __str__(self) -> str:
        """Return its name in log lines."""
        return f"{self.operation_kind} {self.seq_id} of {self.lane}"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to a submit."""

    request_id: str
    is_new: bool
    """True if it must be run: it is no repeat of an operation that waits, runs or has finished."""


@dataclass(frozen=True, slots=True)
class PastOperation:
    """An operation that has ended."""

    seq_id: int
    operation_kind: str
    failed: bool
    failure_category: str | None
    """`user` or `server` if it failed."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished operation's answer, as bytes ready to send."""

    body: bytes
    content_type: str
    failed: bool = False
    failure_category: str | None = None
    """`user` or `server` if it failed."""
    finished_at: float = field(default_factory=time.time)
    operation_kind: str = ""
    """The queue fills it in, with the operation's lane, number and owner."""
    lane: str = ""
    seq_id: int = 0
    owner: str = ""
    step: Step | None = None
    """A step for the run's curves, recorded in the same transaction."""
    loaded_directory: str | None = None
    """Directory of the checkpoint that a load_weights read: its path may be another's later."""
    position: int | None = None
    """Position in the log of its model, which needs the operation again. None if the operation changed nothing."""

    @classmethod
    def of_error(cls, error: Exception) -> "Result":
        """Return the answer of an operation that failed with this error."""
        said = failure(error)
        return cls(said.model_dump_json().encode(), "application/json", True, said.category)

    @classmethod
    def of_failure(cls, operation: Operation, error: Exception) -> "Result":
        """Log that an operation failed, and return its result."""
        log.info("%s failed: %s", operation, shorten(str(error)))
        return cls.of_error(error)
