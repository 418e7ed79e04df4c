"""Files that hold a secret: readable by the server's user alone, and there whole or not at all."""

import os
import secrets
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Write or replace a file, durably when this returns. Raises OSError."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
