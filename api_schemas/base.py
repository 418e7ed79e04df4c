"""The two base classes of all wire types, and bounds on what clients send."""

import json
import math
import re
from collections.abc import Iterator
from typing import NoReturn, TypeVar

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

T = TypeVar("T")

MAX_DEPTH = 64
"""Largest nesting of lists and objects in a free-form field, such as user_metadata."""
MAX_FIELDS = 64
"""Largest number of entries of an object with known fields, since each unknown one would be an error of its own."""
MAX_TEXT = 16 << 10
"""Largest number of characters of a text or of a field's name: ids, paths and names, which an error may quote."""
NOTED_BYTES = 16 << 10
"""Largest size of a free-form field as JSON, since it is stored, listed and cached in memory."""
NOTED_TOO_LARGE = "noted_too_large"
"""Type of the error for a field beyond NOTED_BYTES or MAX_TEXT."""
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""Finds what `unstorable` finds in a text."""
SLICE = 1 << 16
"""Values handled by one call: Python's threads switch between calls into numpy or pydantic, not within one."""


class Request(BaseModel):
    """A request of a client. It is frozen, and an unknown field is an error.

    A null stands for an absent field, but not for one that must be a number: the SDK sends NaN and infinities as null,
    and a default in their place would give wrong numbers. Values that some database cannot store are refused with every
    database: NUL, halves of surrogate pairs, integers beyond 64 bits, NaN, infinities.
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
    def _null_is_absent(cls, data: object) -> object:
        data = _few_entries(data, MAX_FIELDS)
        if isinstance(data, dict) and any(value is None for value in data.values()):
            numbers = {name for name, field in cls.model_fields.items() if field.annotation is float}
            return {key: value for key, value in data.items() if value is not None or key in numbers}
        return data

    @field_validator("*")
    @classmethod
    def _can_be_stored(cls, value: object, _: ValidationInfo) -> object:
        # Every field of every request comes here, so that nothing is called for what is plainly right.
        match value:
            case str():
                if len(value) > MAX_TEXT:
                    _refuse_long(value)
                if UNSTORABLE.search(value) is None:
                    return value
            case int() | float():
                if -(2**63) <= value < 2**63:
                    return value
            case list():
                # Perhaps a million numbers; they become an array, which has its own bounds.
                if all(set(map(type, part)) <= {int, float} for part in slices(value)):
                    return value
            case dict():
                pass
            case _:
                return value
        return require_storable(value)


class Response(BaseModel):
    """An answer of the server."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, protected_namespaces=(), arbitrary_types_allowed=True
    )


class FirstError(FailFast):
    """Reports only the first invalid entry of a list. Unlike pydantic's FailFast, it may be part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


def at_most(count: int) -> BeforeValidator:
    """Bound the entries of an object with free keys, before each of them could have an error of its own."""
    return BeforeValidator(lambda value: _few_entries(value, count))


def _few_entries(value: object, count: int) -> object:
    if isinstance(value, dict):
        if len(value) > count:
            text = "has {number} entries; at most {count} are allowed"
            raise PydanticCustomError("too_many_entries", text, {"number": len(value), "count": count})
        if max(map(len, value), default=0) > MAX_TEXT:
            _refuse_long(next(name for name in value if len(name) > MAX_TEXT))
    return value


def _refuse_long(text: str) -> NoReturn:
    raise PydanticCustomError(NOTED_TOO_LARGE, "{problem}", {"problem": too_long(text)})


def too_long(text: str) -> str | None:
    """Return why a text cannot be quoted; None if it can."""
    return None if len(text) <= MAX_TEXT else f"has {len(text)} characters; at most {MAX_TEXT} are allowed"


def _few_bytes(value: object) -> object:
    num_bytes = len(json.dumps(require_storable(value), ensure_ascii=False).encode())
    if num_bytes > NOTED_BYTES:
        text = "has {number} bytes as JSON; at most {most} are allowed"
        raise PydanticCustomError(NOTED_TOO_LARGE, text, {"number": num_bytes, "most": NOTED_BYTES})
    return value


NOTED = AfterValidator(_few_bytes)
"""Bounds a free-form field to NOTED_BYTES."""


def slices(values: list[T]) -> Iterator[list[T]]:
    """Yield the values, SLICE at a time."""
    return (values[start : start + SLICE] for start in range(0, len(values), SLICE))


def require_storable(value: object) -> object:
    """Return the value, in a field's validator. Raises PydanticCustomError if a database cannot store it."""
    if (problem := unstorable(value)) is not None:
        raise PydanticCustomError("unstorable", "{problem}", {"problem": problem})
    return value


def unstorable(value: object, depth: int = 0) -> str | None:  # noqa: C901 - one case for each type of JSON
    """Return why a database cannot store a JSON value, or would change it; None if it can."""
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
