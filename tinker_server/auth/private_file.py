"""Files that hold a secret: readable only by the server's user, and written atomically."""

import secrets
from pathlib import Path

from tinker_server.backends.files import write_private


def private_secret(path: Path) -> bytes:
    """Return a secret of 32 bytes that survives restarts; the first call creates it."""
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()
