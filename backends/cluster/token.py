"""The cluster's secret: a file that is made once, and that the operator copies to the other machines."""

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from tinker_server.backends.files import write_private
from tinker_server.backends.protocol import BackendFailed

_TOKEN = re.compile(r"[0-9a-f]{64}")


def make_token(path: Path) -> str:
    """Return the token of a file, which the first call writes for its user alone. Raises BackendFailed."""
    if path.exists():
        return read_token(path)
    token = secrets.token_hex(32)
    try:
        write_private(path, token.encode())
    except OSError as error:
        raise BackendFailed(f"the token of the cluster cannot be written to {path}: {error.strerror}") from None
    return token


def read_token(path: Path) -> str:
    """Return the token of a file. Raises BackendFailed if there is none, or others than its user may read it."""
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BackendFailed(f"the token file {path} cannot be read: {reason}") from None
    if _TOKEN.fullmatch(token) is None:
        raise BackendFailed(f"the token file {path} holds no token: copy the one of the serving machine unchanged")
    if mode & 0o077:
        raise BackendFailed(f"others may read the token file {path}: chmod 600 {path}")
    return token


def proof(token: str, *parts: str) -> str:
    """Return what only a holder of the token can say of these parts."""
    return hmac.new(token.encode(), _encode("\n".join(parts)), hashlib.sha256).hexdigest()


def is_proof(said: object, token: str, *parts: str) -> bool:
    """Return whether it is what a holder of the token says of these parts."""
    return hmac.compare_digest(_encode(str(said)), _encode(proof(token, *parts)))


def _encode(said: str) -> bytes:
    return said.encode(errors="surrogatepass")  # anybody may send JSON that has halves of surrogate pairs
