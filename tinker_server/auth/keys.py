"""API keys, which identify the owner of a request. Their file has `NAME HASH` lines; the keys are stored nowhere.

The owner is the name. Several keys may have one name, so that a key can be replaced while the old one still works.
The file is read again when it changes, so keys are added and removed while the server runs. Keys are long
and random, so a plain SHA-256 does not reveal them.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from backends.files import make_directory
from tinker_server.auth.private_file import write_private
from tinker_server.errors import BadRequest, StartFailed

log = logging.getLogger(__name__)
LOCAL = "local"
"""Owner of everything while no keys are configured. A key of this name gives access to it later."""
PREFIXES = ("tml-", "eyJ")
"""Prefixes of the keys that the SDK sends; it sends no others."""
RELOAD_S = 1.0
"""Seconds after which a change of the file is noticed at the latest."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = "# API keys of a tinker-server: NAME and the SHA-256 of a key. Written by `tinker-server keys`.\n"
OPENS = "opens:"
NO_KEY = "weights_access_token is not an API key of this server; use one of the weights' owner"


class Keys:
    """The keys of one file. Without the file, every key with a valid prefix is accepted, as LOCAL."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises StartFailed if it cannot be read."""
        self._path = path
        self._seen = _state(path)
        self._owners = read(path)
        self._checked_at = time.monotonic()
        self.is_open = self._seen is None
        """True if no keys have been configured. Removing all keys opens nothing, since the empty file stays."""
        if not self.is_open and not self._owners:
            log.warning(
                "%s has no API keys, so every request is refused: run `%s`, or delete the file and start again to"
                " accept everybody on this machine",
                path,
                adding(path),
            )

    def owner_of(self, key: str) -> str | None:
        """Return the name of a key, or None if it is unknown."""
        self._reload()
        if self.is_open:
            return LOCAL if key.startswith(PREFIXES) else None
        return self._owners.get(_hash(key))

    def fingerprint(self, key: str) -> str:
        """Return 64 hexadecimal digits that identify a key without revealing it."""
        return _hash(key).removeprefix(_SHA)

    def owner_by_fingerprint(self, fingerprint: str) -> str | None:
        """Return the name of the key with this fingerprint, or None if the key was removed."""
        self._reload()
        return self._owners.get(_SHA + fingerprint)

    def readers(self, owner: str, token: str | None) -> set[str]:
        """Return the owners whose weights may be read: the owner, and the owner of the key given as `token`.

        Raises BadRequest if the token is not a key.
        """
        if token is None or self.is_open:
            return {owner}
        other = self.owner_of(token)
        if other is None:
            raise BadRequest(NO_KEY)
        return {owner, other}

    def sealed(self, token: str) -> str:
        """Return a string that is stored instead of a weights_access_token: the key's owner, or none."""
        return f"{OPENS}{self.owner_of(token) or ''}"

    def readers_by_seal(self, owner: str, seal: str | None) -> set[str]:
        """Return the owners as `readers` does, from a result of `sealed`. Raises BadRequest if that was not a key."""
        if seal is None or self.is_open:
            return {owner}
        if not (other := seal.removeprefix(OPENS)):
            raise BadRequest(NO_KEY)
        return {owner, other}

    def revoke(self, key: str) -> None:
        """Remove one key from the file. Raises OSError if the file cannot be written."""
        hashed = _hash(key)
        if hashed not in self._owners:
            return
        with _locked(self._path):
            _write(self._path, [line for line in _lines(self._path) if line[1] != hashed])
        self._owners.pop(hashed, None)

    def _reload(self) -> None:
        now = time.monotonic()
        if now < self._checked_at + RELOAD_S:
            return
        self._checked_at = now
        if (state := _state(self._path)) == self._seen:
            return
        self._seen = state
        try:
            self._owners = read(self._path)
        except StartFailed as error:
            log.error("the keys are unchanged: %s", error)
            return
        self.is_open = self.is_open and state is None
        log.info("%s now has %d API keys", self._path, len(self._owners))


def adding(path: Path) -> str:
    """Return the command that adds a key to this file, from whatever folder it is run in."""
    return f"tinker-server keys add NAME --keys-file {shlex.quote(str(path.resolve()))}"


def add(path: Path, name: str) -> str:
    """Add a new key under a name and return it. Raises StartFailed."""
    if _NAME.fullmatch(name) is None:
        raise StartFailed(f"{name!r} cannot name a key: use at most 64 letters, digits, '.', '_', '@' and '-'")
    key = f"tml-{secrets.token_urlsafe(32)}"
    make_directory(path.parent)
    with _locked(path):
        _write(path, [*_lines(path), (name, _hash(key))])
    return key


def remove(path: Path, name: str) -> int:
    """Remove all keys of a name and return their number. The name's data stay. Raises StartFailed."""
    if not path.exists():
        return 0
    with _locked(path):
        lines = _lines(path)
        kept = [line for line in lines if line[0] != name]
        if len(kept) < len(lines):
            _write(path, kept)
    return len(lines) - len(kept)


def read(path: Path) -> dict[str, str]:
    """Return names by hash; none if there is no file. Raises StartFailed."""
    return {hashed: name for name, hashed in _lines(path)}


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        texts = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"the keys file {path} cannot be read: {error}") from None
    lines = []
    for number, text in enumerate(texts, 1):
        words = text.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or _NAME.fullmatch(words[0]) is None or _HASH.fullmatch(words[1]) is None:
            raise StartFailed(f"{path} line {number} is not 'NAME sha256:HASH'; `{adding(path)}` writes one")
        lines.append((words[0], words[1]))
    return lines


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock out other writers between reading the file and replacing it. The lock is a permanent file beside it."""
    with os.fdopen(os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, lines: list[tuple[str, str]]) -> None:
    write_private(path, (_HEADER + "".join(f"{name} {hashed}\n" for name, hashed in lines)).encode())


def _hash(key: str) -> str:
    return f"{_SHA}{hashlib.sha256(key.encode()).hexdigest()}"


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
