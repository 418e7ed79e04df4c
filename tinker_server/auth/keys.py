"""API keys, which identify the owner of a request. Their file has a line for each; the keys are stored nowhere.

The owner is the name. Several keys may have the same name, so that a key can be replaced while the old one still works.
The file is read again when it changes, so keys are added and removed while the server runs.
"""

import contextlib
import errno
import fcntl
import logging
import math
import os
import secrets
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tinker_server.auth.key import SHA, Key, Scope, hash_of, is_name
from tinker_server.backends.files import make_directory, write_private
from tinker_server.errors import BadRequest, KeysUnreadable, StartFailed

log = logging.getLogger(__name__)
LOCAL = "local"
"""Owner of everything while no keys are configured. A key of this name gives access to it later."""
PREFIXES = ("tml-", "eyJ")
"""Prefixes of the keys that the SDK sends; it sends no others."""
RELOAD_S = 1.0
"""Seconds after which a change of the file is noticed at the latest."""
UNREADABLE_S = 60.0
"""Seconds for which the keys stay valid while their file is gone or cannot be read. After that nobody is let in: a key
may have been removed. Clients then wait, since they are answered 503."""
_HEADER = "# API keys of a tinker-server: NAME and the SHA-256 of a key. Written by `tinker-server keys`.\n"
OPENS = "opens:"
NO_KEY = "weights_access_token is not an API key of this server; use one of the weights' owner, of the scope all"


class Keys:
    """The keys of a file. Without the file, every key with a valid prefix is accepted, as LOCAL, who is no
    administrator: data of named owners may be there."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises StartFailed if it cannot be read."""
        self._path = path
        try:
            self._seen = _state(path)
        except OSError as error:
            raise StartFailed(f"the keys file {path} cannot be read: {error}") from None
        self._known = read(path)
        self._checked_at = time.monotonic()
        self._unreadable_since: float | None = None
        self.is_open = self._seen is None
        """True if no keys have been configured. Removing all keys opens nothing, since the empty file stays."""
        self.used_at: dict[str, float] = {}
        """Unix seconds of the last use in this server, by fingerprint."""
        if not self.is_open and not self._known:
            log.warning(
                "%s has no API keys, so every request is refused: run `%s`, or delete the file and start again to"
                " accept everybody on this machine",
                path,
                adding(path),
            )

    def find(self, key: str) -> Key | None:
        """Return a key and note its use; None if it is unknown or has expired. Raises KeysUnreadable."""
        self._reload()
        self._require_readable()
        if self.is_open:
            return Key(LOCAL, hash_of(key)) if key.startswith(PREFIXES) else None
        return self._note_use(hash_of(key))

    def find_by_fingerprint(self, fingerprint: str) -> Key | None:
        """Return the key with this fingerprint as `find` does; None if it was removed, too. Raises KeysUnreadable."""
        self._reload()
        self._require_readable()
        return self._note_use(SHA + fingerprint)

    def owner_of(self, key: str) -> str | None:
        """Return the name of a key, or None as `find`."""
        found = self.find(key)
        return None if found is None else found.name

    def all(self) -> list[Key]:
        """Return the keys of the file, expired ones too."""
        self._reload()
        return list(self._known.values())

    def _note_use(self, hashed: str) -> Key | None:
        found, now = self._known.get(hashed), time.time()
        if found is None or not found.is_valid(now):
            return None
        self.used_at[found.fingerprint] = now
        return found

    def readers(self, owner: str, token: str | None) -> set[str]:
        """Return the owners whose weights may be read: the owner, and the owner of the key given as `token`.

        Raises BadRequest if the token is not a key.
        """
        return self.readers_by_seal(owner, None if token is None else self.seal(token))

    def seal(self, token: str) -> str:
        """Return a string that is stored instead of a weights_access_token: the key's owner, or none."""
        return f"{OPENS}{self._lender(token)}"

    def readers_by_seal(self, owner: str, seal: str | None) -> set[str]:
        """Return the owners as `readers` does, from a result of `seal`. Raises BadRequest if that was not a key."""
        if seal is None or self.is_open:
            return {owner}
        if not (other := seal.removeprefix(OPENS)):
            raise BadRequest(NO_KEY)
        return {owner, other}

    def _lender(self, token: str) -> str:
        """Return the owner whose weights a key lets others read; empty if it is no key of the scope all."""
        found = self.find(token)
        return "" if found is None or found.scope != "all" else found.name

    def revoke(self, hashed: str) -> None:
        """Remove the key with this hash from the file. Raises OSError if the file cannot be written."""
        if hashed not in self._known:
            return
        with _lock(self._path):
            _write(self._path, [line for line in _lines(self._path) if line.hashed != hashed])
        self._known.pop(hashed, None)

    def read_now(self) -> None:
        """Notice a change of the file at once."""
        self._checked_at = -math.inf
        self._reload()

    def _reload(self) -> None:
        now = time.monotonic()
        if now < self._checked_at + RELOAD_S:
            return
        self._checked_at = now
        try:
            self._read_again()
        except OSError as error:
            if self._unreadable_since is None:
                self._unreadable_since = now
                text = "the keys file %s cannot be read (%s): its keys stay valid for %.0f s, then nobody is let in"
                log.error(text, self._path, error.strerror, UNREADABLE_S)

    def _read_again(self) -> None:
        """Read the file if it has changed. Raises OSError; also if it was deleted, which removes no key."""
        state = _state(self._path)
        if state == self._seen and self._unreadable_since is None:
            return
        if state is None and not self.is_open:
            raise FileNotFoundError(errno.ENOENT, "it was deleted; to accept everybody on this machine, start again")
        known = {} if state is None else _readable_keys(self._path)
        self._seen, self._known, self._unreadable_since = state, known, None
        self.is_open = state is None
        log.info("%s now has %d API keys", self._path, len(known))

    def _require_readable(self) -> None:
        since = self._unreadable_since
        if since is not None and time.monotonic() >= since + UNREADABLE_S:
            raise KeysUnreadable("the server cannot read its API keys; its log has the details")


def adding(path: Path, name: str = "NAME") -> str:
    """Return the command that adds a key to this file, from whatever folder it is run in."""
    return f"tinker-server keys add {name} --keys-file {shlex.quote(str(path.resolve()))}"


def add(path: Path, name: str, *, scope: Scope = "all", is_admin: bool = False, valid_s: float | None = None) -> str:
    """Add a new key under a name and return it. It expires after `valid_s`. Raises StartFailed."""
    if not is_name(name):
        raise StartFailed(f"{name!r} cannot name a key: use at most 64 letters, digits, '.', '_', '@' and '-'")
    if is_admin and scope != "all":
        raise StartFailed(f"an administrator's key has the scope all, not {scope}")
    key, now = f"tml-{secrets.token_urlsafe(32)}", time.time()
    made = Key(name, hash_of(key), scope, is_admin, now, None if valid_s is None else now + valid_s)
    make_directory(path.parent)
    with _lock(path):
        _write(path, [*_lines(path), made])
    return key


def set_expiry(path: Path, hashed: str, valid_s: float) -> None:
    """Let the key with this hash expire after `valid_s` from now. Raises StartFailed, OSError."""
    expires_at = time.time() + valid_s
    with _lock(path):
        lines = _lines(path)
        _write(path, [replace(line, expires_at=expires_at) if line.hashed == hashed else line for line in lines])


def remove(path: Path, name: str, key_id: str | None = None) -> int:
    """Remove all keys of a name, or the key with this id, and return their number. The name's data stay. Raises
    StartFailed."""
    if not path.exists():
        return 0
    with _lock(path):
        lines = _lines(path)
        kept = [line for line in lines if line.name != name or key_id not in (None, line.id)]
        if len(kept) < len(lines):
            _write(path, kept)
    return len(lines) - len(kept)


def read(path: Path) -> dict[str, Key]:
    """Return keys by hash; none if there is no file. Raises StartFailed."""
    return {line.hashed: line for line in _lines(path)}


def _lines(path: Path) -> list[Key]:
    try:
        return [_key(path, *line) for line in _read_lines(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StartFailed(f"the keys file {path} cannot be read: {error}") from None


def _readable_keys(path: Path) -> dict[str, Key]:
    """Return the keys of all lines that have a key: a wrong line removes no other key, and keeps none. Raises
    OSError."""
    known = {}
    for line in _read_lines(path):
        try:
            key = _key(path, *line)
        except StartFailed as error:
            log.error("a line of the keys file is skipped: %s", error)
            continue
        known[key.hashed] = key
    return known


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that should have a key, with their numbers. Raises OSError."""
    texts = path.read_text(errors="replace").splitlines()
    return [(number, text) for number, text in enumerate(texts, 1) if text.split() and text.split()[0][0] != "#"]


def _key(path: Path, number: int, text: str) -> Key:
    try:
        return Key.parse(text)
    except ValueError as error:
        raise StartFailed(f"{path} line {number} {error}; `{adding(path)}` writes one") from None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock out other writers between reading the file and replacing it. The lock is a permanent file beside it."""
    with os.fdopen(os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, lines: list[Key]) -> None:
    write_private(path, (_HEADER + "".join(f"{line.line()}\n" for line in lines)).encode())


def _state(path: Path) -> tuple[int, int] | None:
    """Return what differs once the file has changed; None if there is no file. Raises OSError."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino
