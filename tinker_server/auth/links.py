"""Signed URLs that open a file of the data directory for a limited time, without an API key."""

import hashlib
import hmac
import time
from pathlib import Path
from urllib.parse import quote, urlencode

from tinker_server.auth.private_file import private_secret
from tinker_server.errors import LinkRefused

VALID_S = 3600
"""Seconds that a link is valid, enough to download: the SDK asks again 5 minutes before the end."""


class Links:
    """Signs paths that may be fetched. The secret is in the data directory, so that links survive a restart."""

    def __init__(self, data_dir: Path) -> None:
        self._secret = private_secret(data_dir / "link-secret")

    def sign(self, path: str, expires: int) -> str:
        """Return `path` with the query that opens it until `expires`."""
        return f"{quote(path)}?{urlencode({'expires': expires, 'signature': self._signature(path, expires)})}"

    def check(self, path: str, expires: int, signature: str) -> None:
        """Check a link. Raises LinkRefused if its signature is wrong or it has expired."""
        if not hmac.compare_digest(self._signature(path, expires).encode(), signature.encode()):
            raise LinkRefused("the link's signature is wrong")
        if expires <= time.time():
            raise LinkRefused("the link has expired; ask for a fresh one")

    def _signature(self, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires}\n{path}".encode(), hashlib.sha256).hexdigest()
