"""Files that hold a secret: readable only by the server's user, and written atomically."""

import os
import secrets
from pathlib import Path

from backends.files import written_aside


def write_private(path: Path, content: bytes) -> None:
    """Write or replace a file durably. Raises OSError."""
    with (
        written_aside(path) as aside,
        os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
    ):
        file.write(content)


def private_secret(path: Path) -> bytes:
    """Return a secret of 32 bytes that survives restarts; the first call creates it."""
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()
