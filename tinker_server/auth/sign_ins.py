"""Who looks at a page: told by a cookie that a key was exchanged for. Nothing of it is kept on the server.

The cookie names the hash of the key, so that it opens nothing once the key is removed. Each change carries a token
that only our own pages know; the cookie alone changes nothing.
"""

import hashlib
import hmac
import re
import time
from pathlib import Path

from tinker_server.auth.keys import LOCAL, Keys
from tinker_server.auth.private_file import private_secret

COOKIE, TOKEN_HEADER = "tinker_session", "x-csrf-token"
VALID_S = 24 * 3600
_COOKIE = re.compile(r"(\d{1,12})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_WITHOUT_KEYS = "no keys"
"""What the token is made of where nobody signs in."""


class SignIns:
    """Makes and checks cookies and tokens. The secret is in the data directory, so that they survive a restart."""

    def __init__(self, data_dir: Path, keys: Keys) -> None:
        self._secret = private_secret(data_dir / "cookie-secret")
        self._keys = keys

    def cookie(self, key: str) -> str | None:
        """For a key that is known here."""
        if self._keys.owner_of(key) is None:
            return None
        signed = f"{int(time.time()) + VALID_S}.{self._keys.fingerprint(key)}"
        return f"{signed}.{self._mac('session', signed)}"

    def owner(self, cookie: str | None) -> str | None:
        """Whom a cookie speaks for; where there are no keys, everybody is the owner of all."""
        if self._keys.is_open:
            return LOCAL
        parts = _COOKIE.fullmatch(cookie or "")
        if parts is None:
            return None
        expires, fingerprint, mac = parts.groups()
        if not hmac.compare_digest(mac, self._mac("session", f"{expires}.{fingerprint}")):
            return None
        return self._keys.owner_by_fingerprint(fingerprint) if int(expires) > time.time() else None

    def token(self, cookie: str | None) -> str:
        """What a change made by our own page carries."""
        return self._mac("change", _WITHOUT_KEYS if self._keys.is_open else cookie or "")

    def is_token(self, token: str, cookie: str | None) -> bool:
        """Whether a change comes from our own page."""
        return hmac.compare_digest(token.encode(), self.token(cookie).encode())

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose}\n{text}".encode(), hashlib.sha256).hexdigest()
