"""Tokens (JWT) that the SDK gets for a key and sends in its place. The server stores none of them.

A token holds the hash of its key, so it is invalid once the key is removed or has expired.
"""

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path

from tinker_server.api_schemas.ids import owner_urn
from tinker_server.auth.key import Key
from tinker_server.auth.keys import Keys
from tinker_server.auth.private_file import private_secret

VALID_S = 24 * 3600
"""Seconds that a token is valid. The SDK gets a new token after half of them, so a server may be away for the rest."""
ORGANIZATION = "tinker-server"
"""Organization of every owner: a server has no others."""
_HEAD = {"alg": "HS256", "typ": "JWT"}


class Tokens:
    """Makes and checks tokens. The secret is in the data directory, so that they survive a restart."""

    def __init__(self, data_dir: Path, keys: Keys) -> None:
        self._secret = private_secret(data_dir / "token-secret")
        self._keys = keys

    def make(self, key: Key) -> str:
        """Return a token for a key, with the claims that the SDK's `whoami` reads."""
        now = int(time.time())
        claims = {
            "iss": ORGANIZATION,
            "sub": owner_urn(key.name),
            "org_id": ORGANIZATION,
            "iat": now,
            "exp": now + VALID_S,
            "key": key.fingerprint,
        }
        signed = f"{_encode(json.dumps(_HEAD).encode())}.{_encode(json.dumps(claims).encode())}"
        return f"{signed}.{self._signature(signed)}"

    def find(self, token: str) -> Key | None:
        """Return the key that a token was made for, and note its use; None if the token or the key is not valid."""
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(signed).encode()):
            return None
        claims = json.loads(_decode(signed.partition(".")[2]))  # our own: the signature is right
        return self._keys.find_by_fingerprint(claims["key"]) if time.time() < claims["exp"] else None

    def _signature(self, signed: str) -> str:
        return _encode(hmac.digest(self._secret, signed.encode(), hashlib.sha256))


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
