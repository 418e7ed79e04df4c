"""API keys: who a request speaks for. A file of `NAME HASH` lines; the keys themselves are kept nowhere.

Several keys may have one name, which is what owns: so a key can be replaced while the old one still works.
The file is read again when it changes, so keys are added and removed while the server runs. Keys are long
and random, so a plain SHA-256 tells nothing of them.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from backends.files import make_directory
from tinker_server.auth.private_file import write_private
from tinker_server.errors import BadRequest, StartFailed

log = logging.getLogger(__name__)
LOCAL = "local"
"""Who owns everything while no keys are configured. A key of this name reaches it later."""
PREFIXES = ("tml-", "eyJ")
"""The SDK sends no other keys."""
RELOAD_S = 1.0
"""How long a change of the file may go unseen."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = "# API keys of a tinker-server: NAME and the SHA-256 of a key. Written by `tinker-server keys`.\n"
OPENS = "opens:"
NO_KEY = "weights_access_token is not an API key of this server; take one of the weights' owner"


class Keys:
    """The keys of one file. Where there is no such file, every key with a right prefix is let in, as LOCAL."""

    def __init__(self, path: Path) -> None:
        """Raises StartFailed for a file that cannot be read."""
        self._path = path
        self._seen = _state(path)
        self._owners = read(path)
        self._checked_at = time.monotonic()
        self.is_open = self._seen is None
        """Whether no keys have been configured. Once there were some, their removal opens nothing: the file stays."""
        if not self.is_open and not self._owners:
            log.warning(
                "%s has no API keys, so nobody is let in: make one with `tinker-server keys add NAME`, or delete the"
                " file and start again to let everybody of this machine in",
                path,
            )

    def owner_of(self, key: str) -> str | None:
        """The name of a key; None for one that is not known."""
        self._reload()
        if self.is_open:
            return LOCAL if key.startswith(PREFIXES) else None
        return self._owners.get(_hash(key))

    def fingerprint(self, key: str) -> str:
        """By which a key is known again: 64 hexadecimal digits that do not tell it."""
        return _hash(key).removeprefix(_SHA)

    def owner_by_fingerprint(self, fingerprint: str) -> str | None:
        """The name of a key; None where it was removed."""
        self._reload()
        return self._owners.get(_SHA + fingerprint)

    def readers(self, owner: str, token: str | None) -> set[str]:
        """Whose weights may be read: the owner's, and those of the owner whose key was handed on as `token`.

        Raises BadRequest for a token that is no key.
        """
        if token is None or self.is_open:
            return {owner}
        other = self.owner_of(token)
        if other is None:
            raise BadRequest(NO_KEY)
        return {owner, other}

    def sealed(self, token: str) -> str:
        """What may be stored in the place of a key that was handed on: whose weights it opens, if anybody's."""
        return f"{OPENS}{self.owner_of(token) or ''}"

    def readers_by_seal(self, owner: str, seal: str | None) -> set[str]:
        """As `readers`, of what `sealed` gave. Raises BadRequest where it was no key."""
        if seal is None or self.is_open:
            return {owner}
        if not (other := seal.removeprefix(OPENS)):
            raise BadRequest(NO_KEY)
        return {owner, other}

    def revoke(self, key: str) -> None:
        """Forget one key. Raises OSError where the file cannot be written."""
        hashed = _hash(key)
        if hashed not in self._owners:
            return
        with _alone(self._path):
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
            log.error("the keys stay as they were: %s", error)
            return
        self.is_open = self.is_open and state is None
        log.info("%s has %d API keys now", self._path, len(self._owners))


def add(path: Path, name: str) -> str:
    """A new key under a name, which owns what is made with it. Raises StartFailed."""
    if _NAME.fullmatch(name) is None:
        raise StartFailed(f"{name!r} cannot name a key: take letters, digits, '.', '_', '@' and '-', at most 64")
    key = f"tml-{secrets.token_urlsafe(32)}"
    make_directory(path.parent)
    with _alone(path):
        _write(path, [*_lines(path), (name, _hash(key))])
    return key


def remove(path: Path, name: str) -> int:
    """Forget all keys of a name; how many there were. What they own stays. Raises StartFailed."""
    if not path.exists():
        return 0
    with _alone(path):
        lines = _lines(path)
        kept = [line for line in lines if line[0] != name]
        if len(kept) < len(lines):
            _write(path, kept)
    return len(lines) - len(kept)


def read(path: Path) -> dict[str, str]:
    """Names by hash; none where there is no file. Raises StartFailed."""
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
            raise StartFailed(
                f"{path} line {number} is not 'NAME sha256:HASH'; `tinker-server keys add NAME` writes one"
            )
        lines.append((words[0], words[1]))
    return lines


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Between reading the file and replacing it, nobody else does. The lock is a file beside it, which stays."""
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
