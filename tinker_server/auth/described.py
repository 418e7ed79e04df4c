"""API keys as an administrator and a program see them: by owner, id and times, without what opens anything."""

from collections.abc import Iterable, Mapping

from tinker_server.api_schemas.listing import from_unix
from tinker_server.api_schemas.owners import KeyInfo, KeysResponse
from tinker_server.auth.key import Key


def describe_keys(keys: Iterable[Key], used_at: Mapping[str, float]) -> KeysResponse:
    """Return the keys in their order. `used_at`: Unix seconds of their last use, by fingerprint."""
    return KeysResponse(keys=[_describe(key, used_at.get(key.fingerprint)) for key in keys])


def _describe(key: Key, used_at: float | None) -> KeyInfo:
    created_at, expires_at, used = (
        None if at is None else from_unix(at) for at in (key.created_at, key.expires_at, used_at)
    )
    return KeyInfo(
        owner=key.name,
        key_id=key.id,
        scope=key.scope,
        is_admin=key.is_admin,
        created_at=created_at,
        expires_at=expires_at,
        used_at=used,
    )
