"""The two bases of every wire type."""

import json
import math
from collections.abc import Iterator
from typing import Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from api_schemas.old_clients.fields import without_nulls

MAX_DEPTH = 64
"""Of lists and objects in each other, where a client may send what it likes, such as user_metadata."""
MAX_FIELDS = 64
"""Of an object whose fields are known: each unknown one would be an error of its own."""
NOTED_BYTES = 16 << 10
"""Of a field that a client may fill as it likes, as JSON: it is stored, listed, and kept in memory."""
NOTED_TOO_LARGE = "noted_too_large"
"""The type of that error."""
SLICE = 1 << 16
"""Values handled by one call: the threads of the server take turns between calls, not within one."""


class Request(BaseModel):
    """What a client sends: frozen, and a field we do not know is an error, never ignored.

    A null stands for an absent field. What a database cannot hold
    is refused, whichever database it is: NUL, halves of surrogate pairs, integers beyond 64 bits, NaN, infinities.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        arbitrary_types_allowed=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return without_nulls(_few_entries(data, MAX_FIELDS))

    @field_validator("*")
    @classmethod
    def _can_be_stored(cls, value: Any, _: ValidationInfo) -> Any:
        if isinstance(value, list) and all(set(map(type, part)) <= {int, float} for part in slices(value)):
            return value  # perhaps a million of them; they go into an array, which has bounds of its own
        return require_storable(value)


class Response(BaseModel):
    """What the server answers."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, protected_namespaces=(), arbitrary_types_allowed=True
    )


class FirstError(FailFast):
    """Of a list: the first wrong entry is told, and no other. Unlike pydantic's, it may stand in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


def at_most(count: int) -> BeforeValidator:
    """Of an object with any keys: how many it may have. Told first, since each could have an error of its own."""
    return BeforeValidator(lambda value: _few_entries(value, count))


def _few_entries(value: Any, count: int) -> Any:
    if isinstance(value, dict) and len(value) > count:
        text = "has {number} entries; at most {count} are allowed"
        raise PydanticCustomError("too_many_entries", text, {"number": len(value), "count": count})
    return value


def _few_bytes(value: Any) -> Any:
    num_bytes = len(json.dumps(require_storable(value), ensure_ascii=False).encode())
    if num_bytes > NOTED_BYTES:
        text = "has {number} bytes as JSON; at most {most} are allowed"
        raise PydanticCustomError(NOTED_TOO_LARGE, text, {"number": num_bytes, "most": NOTED_BYTES})
    return value


NOTED = AfterValidator(_few_bytes)
"""Of a field that a client may fill as it likes: NOTED_BYTES at most."""


def slices(values: list[Any]) -> Iterator[list[Any]]:
    """The values, SLICE at a time."""
    return (values[start : start + SLICE] for start in range(0, len(values), SLICE))


def require_storable(value: Any) -> Any:
    """The value, in a validator of a field. Raises for what a database would not hold."""
    if (problem := unstorable(value)) is not None:
        raise PydanticCustomError("unstorable", "{problem}", {"problem": problem})
    return value


def unstorable(value: Any, depth: int = 0) -> str | None:  # noqa: C901 - one case for each type of JSON
    """Why a database would not hold a JSON value, or would give back another one; None if it is all right."""
    match value:
        case str():
            if "\0" in value:
                return "holds the character NUL (\\u0000), which cannot be stored"
            try:
                value.encode()
            except UnicodeEncodeError:
                return "holds half of a surrogate pair, which is no character"
        case int():
            return None if -(2**63) <= value < 2**63 else "is an integer beyond 64 bits"
        case float():
            return None if math.isfinite(value) else "is not finite"
        case dict() | list() if depth == MAX_DEPTH:
            return f"is nested deeper than {MAX_DEPTH}"
        case dict():
            for part in (*value, *value.values()):
                if (problem := unstorable(part, depth + 1)) is not None:
                    return problem
        case list():
            for part in value:
                if (problem := unstorable(part, depth + 1)) is not None:
                    return problem
    return None
