"""An API key: its owner, scope and times, and its line in the file of keys. Knows neither the file nor requests."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

Scope = Literal["all", "sample", "metrics"]
"""`all`: everything of its owner. `sample`: only sampling and chats. `metrics`: only /metrics."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
SHA = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_FIELDS = {"created", "expires", "scope", "role"}
_ID_DIGITS = 8
"""Digits of the hash that tell an owner's keys apart on a screen."""
FORM = "'NAME sha256:HASH', perhaps with created=TIME, expires=TIME, scope=SCOPE or role=admin after it"


@dataclass(frozen=True)
class Key:
    """A key, which is known by its hash alone."""

    name: str
    """The owner of what is made with it."""
    hashed: str
    """`sha256:` and 64 hexadecimal digits."""
    scope: Scope = "all"
    is_admin: bool = False
    """True if it may also see and stop the work of all owners."""
    created_at: float | None = None
    """Unix seconds; None if the file does not say."""
    expires_at: float | None = None
    """Unix seconds from which the key is unknown; None: never."""

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that identify the key without revealing it."""
        return self.hashed.removeprefix(SHA)

    @property
    def id(self) -> str:
        """The beginning of the fingerprint, by which people name the key."""
        return self.fingerprint[:_ID_DIGITS]

    def is_valid(self, now: float) -> bool:
        """Return whether the key has not expired by `now`, in Unix seconds."""
        return self.expires_at is None or now < self.expires_at

    def line(self) -> str:
        """Return the key's line in the file."""
        return " ".join([self.name, self.hashed, *self._fields()])

    def _fields(self) -> Iterator[str]:
        for name, at in (("created", self.created_at), ("expires", self.expires_at)):
            if at is not None:
                yield f"{name}={datetime.fromtimestamp(at, UTC):{_TIME}}"
        if self.scope != "all":
            yield f"scope={self.scope}"
        if self.is_admin:
            yield "role=admin"

    @classmethod
    def parse(cls, line: str) -> "Key":
        """Parse a line of the file. Raises ValueError, with what is wrong about the line."""
        name, hashed, *fields = [*line.split(), "", ""]
        values = dict(field.partition("=")[::2] for field in fields if field)
        if not is_name(name) or _HASH.fullmatch(hashed) is None or not values.keys() <= _FIELDS:
            raise ValueError(f"is not {FORM}")
        scope, role = values.get("scope", "all"), values.get("role", "")
        created, expires = (_seconds(values.get(name)) for name in ("created", "expires"))
        if scope not in SCOPES or role not in ("", "admin"):
            raise ValueError(f"has scope={scope} role={role}; a scope is {', '.join(SCOPES)}, and a role admin")
        if role == "admin" and scope != "all":
            raise ValueError(f"has role=admin with scope={scope}; an administrator's key has the scope all")
        return cls(name, hashed, scope, role == "admin", created, expires)


def hash_of(key: str) -> str:
    """Return what is kept of a key. Keys are long and random, so a plain SHA-256 does not reveal them."""
    return f"{SHA}{hashlib.sha256(key.encode()).hexdigest()}"


def is_name(text: str) -> bool:
    """Return whether a text can name an owner."""
    return _NAME.fullmatch(text) is not None


def _seconds(text: str | None) -> float | None:
    """Return a time of the file in Unix seconds. Raises ValueError."""
    if text is None:
        return None
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError(f"has the time {text!r}; a time is like 2026-01-31T23:59:59Z") from None
