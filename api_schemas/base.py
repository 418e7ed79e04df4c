"""The two bases of every wire type."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Request(BaseModel):
    """What a client sends: frozen, and a field we do not know is an error, never ignored.

    A null stands for an absent field: older clients send nulls for every default.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        arbitrary_types_allowed=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict) and any(value is None for value in data.values()):
            return {key: value for key, value in data.items() if value is not None}
        return data


class Response(BaseModel):
    """What the server answers."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, protected_namespaces=(), arbitrary_types_allowed=True
    )
