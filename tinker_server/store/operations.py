"""An accepted operation as it is stored."""

import uuid
from dataclasses import dataclass, field

from api_schemas.base import Request


@dataclass(frozen=True, slots=True)
class Operation:
    """What a client asked for under a number, with the bytes it came as."""

    operation_kind: str
    """A name in the table OPERATIONS, such as `optim_step`."""
    lane: str
    """model_id for training operations, sampling_session_id for samples."""
    seq_id: int
    body: bytes
    content_type: str
    owner: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    request: Request | None = field(default=None, compare=False, repr=False)
    """The decoded body, where it is at hand and will be needed soon. It is not stored."""
