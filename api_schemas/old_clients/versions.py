"""Answers that depend on the SDK's version."""

from api_schemas.checkpoints import TYPES
from api_schemas.weights import Kind

FIRST_WITH_EXTERNAL = (0, 28)


def shown_kinds(sdk_version: str | None) -> list[Kind]:
    """Return the kinds of weights that a client's lists may contain; all kinds if it sends no version."""
    numbers = (sdk_version or "").split(".")[:2]
    version = tuple(int(number) for number in numbers if number.isdecimal() and len(number) < 10)
    known = len(version) == 2
    return [kind for kind in TYPES if not (known and version < FIRST_WITH_EXTERNAL and kind == "external_weights")]
