"""What an SDK's version decides about an answer."""

from api_schemas.checkpoints import TYPES
from api_schemas.weights import Kind

FIRST_WITH_EXTERNAL = (0, 28)


def shown_kinds(sdk_version: str | None) -> list[Kind]:
    """The kinds of weights that a client's lists may hold. Who tells no version gets all."""
    numbers = (sdk_version or "").split(".")[:2]
    version = tuple(int(number) for number in numbers if number.isdecimal() and len(number) < 10)
    known = len(version) == 2
    return [kind for kind in TYPES if not (known and version < FIRST_WITH_EXTERNAL and kind == "external_weights")]
