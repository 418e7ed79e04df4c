"""Signatures of proof sheets. The secret is in the data directory, so that this server alone can sign and verify."""

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_server.auth.private_file import private_secret
from tinker_server.errors import StartFailed

SECRET = "proof-secret"
ALGORITHM = "HMAC-SHA256"


def sign(data_dir: Path, sheet: Mapping[str, object]) -> dict[str, object]:
    """Return the sheet with its signature."""
    mac = _mac(private_secret(data_dir / SECRET), sheet)
    return {**sheet, "signature": {"algorithm": ALGORITHM, "value": mac}}


def verify(data_dir: Path, file: Path) -> str:
    """Return what a signed sheet is about. Raises StartFailed if this server has not signed it as it is."""
    if not (data_dir / SECRET).exists():
        raise StartFailed(f"{data_dir} has signed no proof sheet; --data-dir names the directory of the server")
    try:
        sheet: dict[str, Any] = json.loads(file.read_text(), object_pairs_hook=_make_object)
        signature = sheet.pop("signature")["value"]
        about = f"run {sheet['run']['id']}, {sheet['data']['operations']} operations, made {sheet['made_at']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StartFailed(f"{file} is no proof sheet: {error!r}") from None
    mac = _mac(private_secret(data_dir / SECRET), sheet)
    if not hmac.compare_digest(mac.encode(), str(signature).encode(errors="replace")):
        raise StartFailed(f"{file} is not what this server signed: it was changed, or another server signed it")
    return about


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a name occurs twice: readers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{name!r} occurs twice")
    return found


def _mac(secret: bytes, sheet: Mapping[str, object]) -> str:
    text = json.dumps(sheet, sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
