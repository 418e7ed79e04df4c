"""Model inputs: text and image chunks, tensors, datums.

JSON lists and protobuf bytes become numpy arrays here and in `wire.py`; all other code sees only arrays.
"""

import base64
import binascii
import hashlib
import math
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictInt,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tinker_server.api_schemas.base import SLICE, FirstError, Request, at_most, slices
from tinker_server.api_schemas.fields import Integer
from tinker_server.api_schemas.old_clients.fields import chunk_type, image_fields

MAX_CHUNKS = 1 << 14
"""Largest number of chunks of one input."""
QUICK_CHUNKS = 64
"""Chunks of text that are laid out in half a millisecond; more are laid out in a thread."""
MAX_TENSORS = 32
"""Largest number of tensors of a datum."""
MAX_COLUMNS, MAX_CELLS = 1 << 10, 1 << 24
"""Bounds on the columns of targets, to which all tokens of a microbatch are padded, and on the dense cells of a
request's sparse tensors: a few bytes can describe many."""
MAX_IMAGE_CHARS = 64 << 20
"""Characters of an image, encoded: parsing one string is one long call, which stops all threads."""
_BASE64_SLICE = 1 << 20  # a multiple of 4, so that each slice is valid base64

DTYPES: dict[str, np.dtype[np.generic]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}


def _token_array(value: object) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("token_ids", "is no list of token ids")
    tokens = np.empty(len(value), dtype=np.int32)
    for number, part in enumerate(slices(value)):
        if not set(map(type, part)) <= {int} or not all(-(2**31) <= bad < 2**31 for bad in (min(part), max(part))):
            raise PydanticCustomError("token_ids", "is no list of token ids, which are integers of 32 bits")
        tokens[number * SLICE :][: len(part)] = part
    return tokens


def _bytes_of_base64(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        if not isinstance(value, str):
            raise ValueError("it is no text")
        parts = [value[start : start + _BASE64_SLICE] for start in range(0, len(value), _BASE64_SLICE)]
        if any(part.endswith("=") for part in parts[:-1]):
            raise ValueError("padding is not at the end")
        return b"".join(binascii.a2b_base64(part, strict_mode=True) for part in parts)
    except ValueError:  # binascii's error is one
        raise PydanticCustomError("base64", "is not standard base64 with padding") from None


TokenIds = Annotated[
    np.ndarray,
    BeforeValidator(_token_array),
    PlainSerializer(lambda tokens: tokens.tolist()),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
"""[T] int32: token ids. The backend checks that they are below the vocabulary's size."""

FileBytes = Annotated[
    bytes,
    BeforeValidator(_bytes_of_base64),
    PlainSerializer(lambda data: base64.b64encode(data).decode(), when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class EncodedTextChunk(Request):
    """A list of token ids. Splitting it into several chunks does not change its meaning."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: TokenIds
    """Token ids."""


class ImageChunk(Request):
    """An image file. The server expands it to the number of placeholder positions of the model's processor."""

    type: Literal["image"] = "image"
    data: FileBytes
    """The file, in base64."""
    format: Literal["png", "jpeg"]
    """File format of the image."""
    expected_tokens: Integer | None = None
    """Token count that the client computed; a different count on the server fails the request."""
    height: Integer | None = None
    """Height in pixels, sent by clients before 0.6 and ignored: the file decides."""
    width: Integer | None = None
    """Width in pixels, sent by clients before 0.6 and ignored: the file decides."""

    @cached_property
    def sha256(self) -> str:
        """The hash of the file, which names the image in caches."""
        return hashlib.sha256(self.data).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _of_any_version(cls, data: object) -> object:
        return image_fields(data)


class ImageAssetPointerChunk(Request):
    """An image by path or URL. It is refused unless the operator allows its directory or host."""

    type: Literal["image_asset_pointer"] = "image_asset_pointer"
    format: Literal["png", "jpeg"]
    """File format of the image."""
    location: str
    """Path or URL of the image."""
    expected_tokens: Integer | None = None
    """Token count that the client computed."""


class DmelChunk(Request):
    """Audio features. No model here accepts them, so the backend refuses them."""

    type: Literal["dmel"] = "dmel"
    dmel: FileBytes
    """The features, in base64."""


def _chunk_kind(value: object) -> str | None:
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    if (kind := value.get("type")) is None:
        return chunk_type(value)
    return kind if isinstance(kind, str) else None


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
    """The model's input: chunks in order, with nothing added."""

    chunks: Annotated[list[Chunk], FirstError(), Field(max_length=MAX_CHUNKS)]
    """Parts of the input, in order."""


def _finite_numbers(value: object) -> list[float | int]:
    if not isinstance(value, list):
        raise PydanticCustomError("numbers", "is no list of numbers")
    for part in slices(value):
        try:
            sound = set(map(type, part)) <= {int, float} and all(map(math.isfinite, part))
        except OverflowError:
            sound = False
        if not sound:
            raise PydanticCustomError("numbers", "holds what is no number, or not finite")
    return value


class TensorData(Request):
    """A tensor in JSON, row-major; 2-D tensors may come as CSR."""

    data: Annotated[
        list[float | int],
        PlainValidator(_finite_numbers),
        WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "integer"}]}}),
    ]
    """Values in row-major order; for CSR, the stored values."""
    dtype: Literal["int64", "float32"]
    """Type of the values."""
    shape: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], FirstError(), Field(max_length=8)] | None = None
    """Sizes of the dimensions; absent: one dimension."""
    sparse_crow_indices: Annotated[list[StrictInt], FirstError()] | None = None
    """For CSR: index of each row's first value, and the end of the last row."""
    sparse_col_indices: Annotated[list[StrictInt], FirstError()] | None = None
    """For CSR: column of each value."""

    def to_array(self, fill: float = 0) -> np.ndarray:
        """Return the dense array; cells without a CSR value get `fill`. Raises ValueError if sizes disagree."""
        values = _numbers(self.data, DTYPES[self.dtype])
        if self.sparse_crow_indices is None and self.sparse_col_indices is None:
            return reshape(values, self.shape)
        crow = _numbers(self.sparse_crow_indices or [], DTYPES["int64"])
        return dense_from_csr(values, crow, _numbers(self.sparse_col_indices or [], DTYPES["int64"]), self.shape, fill)


def _numbers(values: list[float] | list[int], dtype: np.dtype[np.generic]) -> np.ndarray:
    array = np.empty(len(values), dtype=dtype)
    for number, part in enumerate(slices(values)):
        try:
            with np.errstate(over="raise", invalid="raise"):
                numbers = np.array(part, dtype=dtype)
        except (OverflowError, FloatingPointError):
            raise ValueError(f"a value does not fit {dtype.name}") from None
        if dtype.kind == "i" and numbers.tolist() != part:
            raise ValueError(f"a value is no integer, although the dtype is {dtype.name}")
        array[number * SLICE :][: len(part)] = numbers
    return array


def reshape(values: np.ndarray, shape: list[int] | None) -> np.ndarray:
    """Reshape `values`; no shape means one dimension. Raises ValueError if the size differs."""
    if not shape:
        return values
    if (size := math.prod(shape)) != values.size:
        raise ValueError(f"a tensor of shape {list(shape)} needs {size} values, got {values.size}")
    return values.reshape(shape)


def dense_from_csr(
    values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int] | None, fill: float = 0
) -> np.ndarray:
    """Return [rows, columns] from CSR (row i holds values[crow[i]:crow[i+1]]). Raises ValueError if it is invalid."""
    if shape is None or len(shape) != 2:
        raise ValueError(f"a sparse tensor needs a shape of two dimensions, got {shape}")
    rows, columns = shape
    if rows < 0 or columns < 0:
        raise ValueError(f"shape {shape} has a negative size")
    if columns > MAX_COLUMNS:
        raise ValueError(f"a sparse tensor has {columns} columns; at most {MAX_COLUMNS} are supported")
    if crow.size != rows + 1 or crow[0] != 0 or crow[-1] != values.size or (np.diff(crow) < 0).any():
        raise ValueError(f"sparse_crow_indices must rise from 0 to {values.size} in {rows + 1} steps")
    if col.size != values.size or (col < 0).any() or (col >= columns).any():
        raise ValueError(f"sparse_col_indices must be {values.size} numbers from 0 to {columns - 1}")
    if rows * columns > MAX_CELLS:
        raise ValueError(f"a sparse tensor of shape {shape} has more than {MAX_CELLS} cells")
    places = np.repeat(np.arange(rows), np.diff(crow)), col
    is_set = np.zeros((rows, columns), dtype=np.bool_)
    is_set[places] = True
    if np.count_nonzero(is_set) != col.size:
        raise ValueError("sparse_col_indices repeat a column in a row: each cell may have a single value")
    dense = np.full((rows, columns), fill, dtype=values.dtype)
    dense[places] = values
    return dense


def sparse_cells(shape: object) -> int:
    """Return the dense cells of a sparse tensor; 0 for a shape that `dense_from_csr` refuses."""
    match shape:
        case [int(rows), int(columns)] if rows >= 0 and 0 <= columns <= MAX_COLUMNS:
            return rows * columns
    return 0


def require_few_cells(cells: int) -> None:
    """Raise ValueError if the sparse tensors of a request have too many dense cells together."""
    if cells > MAX_CELLS:
        raise ValueError(f"the sparse tensors have {cells} cells together; at most {MAX_CELLS} cells are supported")


def _dense(value: object) -> np.ndarray:
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


class TokenRun(Request):
    """A run of an input's tokens that come from a sampled sequence. Runs follow one another."""

    part: Literal["prompt", "sampled"]
    """Whether they are tokens of the sequence's prompt, or sampled after it."""
    sequence_id: str = Field(min_length=1)
    """The sequence, one of a sample's `sample_sequence_ids`."""
    offset: Integer = Field(default=0, ge=0)
    """Position of the run's first token in this part."""
    length: Integer = Field(ge=1)
    """Number of tokens."""


class Datum(Request):
    """A training example: an input, and the loss's tensors per position."""

    model_input: ModelInput
    """The model's input."""
    loss_fn_inputs: Annotated[dict[str, DenseTensor], at_most(MAX_TENSORS)]
    """Tensors by name (target_tokens, weights, logprobs, advantages, ...), of shape [N] or [N, K] for an input of N."""
    model_input_spans: list[TokenRun] = []
    """Sampled sequences that all tokens of the input come from; empty: not given."""
