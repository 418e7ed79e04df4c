"""The two bases of every wire type."""

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.old_clients.fields import without_nulls

MAX_DEPTH = 64
"""Of lists and objects in each other, where a client may send what it likes, such as user_metadata."""


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
        return without_nulls(data)

    @field_validator("*")
    @classmethod
    def _can_be_stored(cls, value: Any, _: ValidationInfo) -> Any:
        if isinstance(value, list) and set(map(type, value)) <= {int, float}:
            return value  # perhaps a million of them; they go into an array, which has bounds of its own
        return require_storable(value)


class Response(BaseModel):
    """What the server answers."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, protected_namespaces=(), arbitrary_types_allowed=True
    )


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
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
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
