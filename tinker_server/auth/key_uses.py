"""The time of each key's last use, in a file of the data directory: the server writes it, and `keys list` reads it.

It is not beside the keys, whose file the server may not be allowed to change.
"""

import asyncio
import json
import logging
from pathlib import Path

from tinker_server.auth.keys import Keys
from tinker_server.backends.files import write_private

log = logging.getLogger(__name__)
_FILE = "key-uses"


def read(data_dir: Path) -> dict[str, float]:
    """Return Unix seconds by a key's fingerprint; none if there is no such file, or it is damaged."""
    try:
        found = json.loads((data_dir / _FILE).read_text())
        return {str(fingerprint): float(at) for fingerprint, at in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("cannot read the key uses in %s, starting empty: %s", data_dir / _FILE, error)
        return {}


class KeyUses:
    """Keeps what `Keys` notes in memory across restarts."""

    def __init__(self, data_dir: Path, keys: Keys) -> None:
        self._path = data_dir / _FILE
        self._keys = keys
        self._written = read(data_dir)
        keys.used_at |= self._written

    async def save(self) -> None:
        """Write the uses if there are new ones. Those of removed keys go."""
        known = {key.fingerprint for key in self._keys.all()}
        uses = {fingerprint: at for fingerprint, at in self._keys.used_at.items() if fingerprint in known}
        if uses == self._written:
            return
        try:
            await asyncio.to_thread(write_private, self._path, json.dumps(uses).encode())
        except OSError as error:  # a failure to record a use must not stop the server
            log.warning("cannot write the key uses: %s", error)
            return
        self._written = uses
