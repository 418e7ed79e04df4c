"""Encryption of exported weights to age recipients (age-encryption.org): X25519 (`age1...`) or SSH public keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from pyrage import RecipientError, encrypt_file, ssh, x25519

from tinker_server.errors import Unsupported

Recipient: TypeAlias = x25519.Recipient | ssh.Recipient
MAX_RECIPIENTS = 10
SUFFIX = ".age"


def parse_recipients(texts: list[str]) -> list[Recipient]:
    """Parse public keys. Raises Unsupported, naming the first text that is none."""
    if not 1 <= len(texts) <= MAX_RECIPIENTS:
        raise Unsupported(f"age_encryption_recipients has {len(texts)} entries, not 1 to {MAX_RECIPIENTS}")
    recipients = []
    for index, text in enumerate(texts):
        kind = x25519.Recipient if text.startswith("age1") else ssh.Recipient
        try:
            recipients.append(kind.from_str(text))
        except RecipientError:
            raise Unsupported(
                f"age_encryption_recipients[{index}] is neither an age X25519 (age1...) nor an SSH public key"
            ) from None
    return recipients


def encrypt_files(directory: Path, recipients: Sequence[Recipient]) -> None:
    """Replace every file by its encrypted form, `<name>.age`."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        encrypt_file(str(path), str(path.with_name(path.name + SUFFIX)), list(recipients))
        path.unlink()
