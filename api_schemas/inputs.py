"""Model inputs: text and image chunks, tensors, datums.

Arrays are numpy from the edge inwards: JSON lists and protobuf bytes become arrays here and in
`wire.py`, and nothing further in sees either form.
"""

import base64
import binascii
import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from api_schemas.base import Request
from api_schemas.old_clients.fields import chunk_type, image_fields

_INT32_LIST = TypeAdapter(list[Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)]])

DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}


def _token_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.array(_INT32_LIST.validate_python(value), dtype=np.int32)


def _bytes_of_base64(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise PydanticCustomError("base64", "is not standard base64 with padding") from None


TokenIds = Annotated[
    np.ndarray,
    BeforeValidator(_token_array),
    PlainSerializer(lambda tokens: tokens.tolist()),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
"""[T] int32: token ids. Whether they are below the vocabulary's size is the backend's to say."""

FileBytes = Annotated[
    bytes,
    BeforeValidator(_bytes_of_base64),
    PlainSerializer(lambda data: base64.b64encode(data).decode(), when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class EncodedTextChunk(Request):
    """A run of token ids. A plain list of ids and any split of it into chunks mean the same."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: TokenIds
    """Token ids."""


class ImageChunk(Request):
    """An image file. The server expands it to as many placeholder positions as the model's processor makes."""

    type: Literal["image"] = "image"
    data: FileBytes
    """The file, in base64."""
    format: Literal["png", "jpeg"]
    """File format of the image."""
    expected_tokens: int | None = None
    """Token count the client computed; a different count on the server fails the request."""
    height: int | None = None
    """In pixels, from clients before 0.6; the file itself decides."""
    width: int | None = None
    """In pixels, from clients before 0.6; the file itself decides."""

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, data: Any) -> Any:
        return image_fields(data)


class ImageAssetPointerChunk(Request):
    """An image by path or URL. Refused by name; send the file's bytes."""

    type: Literal["image_asset_pointer"] = "image_asset_pointer"
    format: Literal["png", "jpeg"]
    """File format of the image."""
    location: str
    """Where the image is."""
    expected_tokens: int | None = None
    """Token count the client computed."""


class DmelChunk(Request):
    """Audio features. No model here takes them; the backend refuses them by name."""

    type: Literal["dmel"] = "dmel"
    dmel: FileBytes
    """The features, in base64."""


def _chunk_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    return str(value["type"]) if value.get("type") is not None else chunk_type(value)


Chunk = Annotated[
    Annotated[EncodedTextChunk, Tag("encoded_text")]
    | Annotated[ImageChunk, Tag("image")]
    | Annotated[ImageAssetPointerChunk, Tag("image_asset_pointer")]
    | Annotated[DmelChunk, Tag("dmel")],
    Discriminator(
        _chunk_kind,
        custom_error_type="unknown_chunk",
        custom_error_message="is no chunk: type must be encoded_text, image, image_asset_pointer or dmel",
    ),
]


class ModelInput(Request):
    """What the model reads: chunks in order, nothing added."""

    chunks: list[Chunk]
    """Parts of the input, in order."""


class TensorData(Request):
    """A tensor in JSON, row-major; 2-D tensors may come as CSR."""

    data: list[float | int]
    """The values, row by row; of compressed sparse rows, those that are not left out."""
    dtype: Literal["int64", "float32"]
    """Type of the values."""
    shape: list[Annotated[int, Field(ge=0)]] | None = None
    """Sizes of the dimensions; absent: one dimension."""
    sparse_crow_indices: list[int] | None = None
    """Of compressed sparse rows: where each row begins, and where the last ends."""
    sparse_col_indices: list[int] | None = None
    """Of compressed sparse rows: the column of each value."""

    def to_array(self, fill: float = 0) -> np.ndarray:
        """The dense array; cells that CSR leaves out get `fill`. Raises ValueError where sizes disagree."""
        values = _numbers(self.data, DTYPES[self.dtype])
        if self.sparse_crow_indices is None and self.sparse_col_indices is None:
            return shaped(values, self.shape)
        crow = _numbers(self.sparse_crow_indices or [], DTYPES["int64"])
        return dense_from_csr(values, crow, _numbers(self.sparse_col_indices or [], DTYPES["int64"]), self.shape, fill)


def _numbers(values: list[Any], dtype: np.dtype[Any]) -> np.ndarray:
    try:
        with np.errstate(over="raise", invalid="raise"):
            array = np.array(values, dtype=dtype)
    except (OverflowError, FloatingPointError):
        raise ValueError(f"a value does not fit {dtype.name}") from None
    if dtype.kind == "i" and array.tolist() != values:
        raise ValueError(f"a value is no integer, although the dtype is {dtype.name}")
    return array


def shaped(values: np.ndarray, shape: list[int] | None) -> np.ndarray:
    """`values` in the given shape; no shape means one dimension."""
    if not shape:
        return values
    if (size := math.prod(shape)) != values.size:
        raise ValueError(f"a tensor of shape {list(shape)} needs {size} values, got {values.size}")
    return values.reshape(shape)


def dense_from_csr(
    values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int] | None, fill: float = 0
) -> np.ndarray:
    """[rows, columns] from compressed sparse rows (row i holds values[crow[i]:crow[i+1]])."""
    if shape is None or len(shape) != 2:
        raise ValueError(f"a sparse tensor needs a shape of two dimensions, got {shape}")
    rows, columns = shape
    if rows < 0 or columns < 0:
        raise ValueError(f"shape {shape} has a negative size")
    if crow.size != rows + 1 or crow[0] != 0 or crow[-1] != values.size or (np.diff(crow) < 0).any():
        raise ValueError(f"sparse_crow_indices must rise from 0 to {values.size} in {rows + 1} steps")
    if col.size != values.size or (col < 0).any() or (col >= columns).any():
        raise ValueError(f"sparse_col_indices must be {values.size} numbers from 0 to {columns - 1}")
    if rows * columns > 2**28:
        raise ValueError(f"a sparse tensor of shape {shape} is too large")
    dense = np.full((rows, columns), fill, dtype=values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return dense


def _dense(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else TensorData.model_validate(value).to_array()


DenseTensor = Annotated[
    np.ndarray,
    BeforeValidator(_dense),
    PlainSerializer(
        lambda a: {"data": a.ravel().tolist(), "dtype": a.dtype.name, "shape": list(a.shape)},
        when_used="json",
    ),
    WithJsonSchema(TensorData.model_json_schema()),
]
"""int64 or float32, dense."""


class Datum(Request):
    """One training example: an input, and per position what the loss needs."""

    model_input: ModelInput
    """What the model reads."""
    loss_fn_inputs: dict[str, DenseTensor]
    """By name (target_tokens, weights, logprobs, advantages, ...), each of the input's length N or [N, K]."""
