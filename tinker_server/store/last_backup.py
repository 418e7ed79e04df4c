"""The time of the last backup, as the mtime of a file in the data directory: a server and the command share no more."""

import time
from pathlib import Path

_NAME = "last-backup"
FIRST_START = "token-secret"
"""A file that the first start of a server makes, and none changes."""


def note_backup(data_dir: Path) -> None:
    """Note that a backup has been completed now. Raises OSError."""
    (data_dir / _NAME).touch(mode=0o600)


def backup_age_s(data_dir: Path) -> float | None:
    """Return the seconds since the last backup or, before the first, since the first start. None if nobody knows."""
    for name in (_NAME, FIRST_START):
        try:
            return max(0.0, time.time() - (data_dir / name).stat().st_mtime)
        except FileNotFoundError:
            continue
    return None
