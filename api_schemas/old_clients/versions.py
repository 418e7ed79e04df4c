"""Answers that depend on the SDK's version."""

from tinker_server.api_schemas.checkpoints import TYPES
from tinker_server.api_schemas.weights import Kind

FIRST_WITH_EXTERNAL = (0, 28)
FIRST_WITH_UPLOAD_HEADERS = (0, 40)


def visible_kinds(sdk_version: str | None) -> list[Kind]:
    """Return the kinds of weights that a client's lists may contain; all kinds if it sends no version."""
    is_old = _is_before(FIRST_WITH_EXTERNAL, sdk_version)
    return [kind for kind in TYPES if not (is_old and kind == "external_weights")]


def takes_upload_headers(sdk_version: str | None) -> bool:
    """Return whether a client gets the links of an upload as objects with headers, and not as texts."""
    return not _is_before(FIRST_WITH_UPLOAD_HEADERS, sdk_version)


def _is_before(first: tuple[int, int], sdk_version: str | None) -> bool:
    numbers = (sdk_version or "").split(".")[:2]
    version = tuple(int(number) for number in numbers if number.isdecimal() and len(number) < 10)
    return len(version) == 2 and version < first
