"""Signing in to the dashboard: a key is exchanged for a cookie. The server stores no sessions.

The cookie holds the hash of the key, so it is invalid once the key is removed. Each change carries a CSRF token that
only our own pages know; the cookie alone changes nothing.
"""

import hashlib
import hmac
import re
import time
from pathlib import Path

from tinker_server.auth.key import Key
from tinker_server.auth.keys import LOCAL, Keys
from tinker_server.auth.private_file import private_secret
from tinker_server.errors import ScopeRefused

COOKIE, TOKEN_HEADER = "tinker_session", "x-csrf-token"
VALID_S = 24 * 3600
_COOKIE = re.compile(r"(\d{1,12})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_ACTS = {"sample": "sample", "metrics": "read metrics"}
_WITHOUT_KEYS = "no keys"
"""Text from which the CSRF token is derived if no keys are configured, so nobody signs in."""


class SignIns:
    """Makes and checks cookies and CSRF tokens. The secret is in the data directory, so that they survive a restart."""

    def __init__(self, data_dir: Path, keys: Keys) -> None:
        self._secret = private_secret(data_dir / "cookie-secret")
        self._keys = keys

    def cookie(self, key: str) -> str | None:
        """Return a cookie for a key, or None if the key is unknown. Raises ScopeRefused."""
        found = self._keys.find(key)
        if found is None:
            return None
        if found.scope != "all":
            raise ScopeRefused(f'This key may only {_ACTS[found.scope]}. Sign in with a key of scope "all".')
        signed = f"{int(time.time()) + VALID_S}.{found.fingerprint}"
        return f"{signed}.{self._mac('session', signed)}"

    def owner(self, cookie: str | None) -> str | None:
        """Return the owner of a cookie, or None if it is invalid."""
        found = self.key(cookie)
        return None if found is None else found.name

    def key(self, cookie: str | None) -> Key | None:
        """Return the key that a cookie was given for, or None if it is invalid. Without keys everybody is LOCAL."""
        if self._keys.is_open:
            return Key(LOCAL, "")
        parts = _COOKIE.fullmatch(cookie or "")
        if parts is None:
            return None
        expires, fingerprint, mac = parts.groups()
        if not hmac.compare_digest(mac, self._mac("session", f"{expires}.{fingerprint}")):
            return None
        found = self._keys.find_by_fingerprint(fingerprint) if int(expires) > time.time() else None
        return found if found is not None and found.scope == "all" else None

    def token(self, cookie: str | None) -> str:
        """Return the CSRF token that a change from our own page carries."""
        return self._mac("change", _WITHOUT_KEYS if self._keys.is_open else cookie or "")

    def is_token(self, token: str, cookie: str | None) -> bool:
        """Return whether a change comes from our own page."""
        return hmac.compare_digest(token.encode(), self.token(cookie).encode())

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose}\n{text}".encode(), hashlib.sha256).hexdigest()
