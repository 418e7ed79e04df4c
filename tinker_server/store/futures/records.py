"""An accepted operation as it is stored, and what is known of those before it."""

import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from api_schemas.base import Request

UNLOAD_SUFFIX = ":unload"
"""Suffix of the lane that holds a model's unload_model, as number 0: it follows whatever the model has queued."""


class ImagePlace(NamedTuple):
    """Where a body has an image."""

    start: int
    size_bytes: int
    digest: str
    """SHA-256 of the image as it lies in the body, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a client asked for under a number, with the bytes it came as."""

    operation_kind: str
    """A name in the table OPERATIONS, such as `optim_step`."""
    lane: str
    """model_id for training operations, sampling_session_id for samples."""
    seq_id: int
    body: bytes | None
    """None where it is left in the database until it is needed."""
    content_type: str
    owner: str
    digest: str = ""
    """Hash of the body: an equal one under the same number is a repeat."""
    size_bytes: int = 0
    """Of the body."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    accepted_at: float = field(default_factory=time.time, compare=False)
    """In Unix seconds."""
    request: Request | None = field(default=None, compare=False, repr=False)
    """The decoded body, where it is at hand and will be needed soon. It is not stored."""
    tries: int | None = None
    """Of one that an earlier server left unfinished: how many servers began it since then, and did not end it."""
    images: tuple[ImagePlace, ...] = ()
    """In the body, in order: what is stored once, though other bodies have it too."""
    traceparent: str = field(default="", compare=False, repr=False)
    """Whose trace it belongs to, as its client sent it (W3C Trace Context). It is not stored."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a submit is answered."""

    request_id: str
    is_new: bool
    """Whether it must be run: it is neither a repeat of one that runs or waits, nor finished."""


@dataclass(frozen=True, slots=True)
class PastOperation:
    """One that has ended."""

    seq_id: int
    operation_kind: str
    failed: bool
    failure_category: str | None
    """Of a failed one: `user` or `server`."""
