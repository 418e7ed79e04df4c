"""Conversion of protobuf and zstd bytes to and from the wire types. `tinker_wire.proto` defines the messages.

All packed arrays are little-endian. Results are stored as protobuf; `old_clients/results.py` converts them to JSON.
"""

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Literal, NamedTuple

import numpy as np
import zstandard
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tinker_server.api_schemas import protobuf_fields
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas.base import MAX_TEXT, UNSTORABLE, too_long, unstorable
from tinker_server.api_schemas.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    TokenRun,
    dense_from_csr,
    require_few_cells,
    reshape,
    sparse_cells,
)
from tinker_server.api_schemas.protobuf_fields import (
    KEY,
    LENGTH_DELIMITED,
    LONG_BYTES,
    MAX_FIELDS,
    Long,
    Path,
    copy_of,
    encode_varint,
    key_of,
    merge,
    merge_at_once,
    name_unknown,
    not_protobuf,
    read_fields,
)
from tinker_server.api_schemas.sampling import SampledSequence, SampleResponse, TopkLogprobs
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardOutput, ForwardBackwardRequest

_DTYPE_OF: dict[int, np.dtype[np.generic]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


_ZSTD_PIECE_BYTES = 128


JSON = "application/json"
PROTOBUF = "application/x-protobuf"
"""Content type of all bodies encoded here."""


MAX_PARTS = 1 << 16
"""Largest number of datums, chunks and tensors of a request together."""
MAX_DIMENSIONS = 8
_TEXT_BYTES = 4 * MAX_TEXT
"""Bytes of the longest text."""
_ENVELOPE = (1, 2, 6)
"""Field numbers of model_id, seq_id and forward_only."""
_DATA = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER
_MODEL_INPUT, _LOSS_FN_INPUTS = pb.Datum.MODEL_INPUT_FIELD_NUMBER, pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER
_REQUEST_FIELDS = frozenset(pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_number)
_DATUM_FIELDS = frozenset(pb.Datum.DESCRIPTOR.fields_by_number)
MalformedBody = protobuf_fields.MalformedBody
"""The body does not match its content type."""


def frame_content_bytes(body: bytes, max_bytes: int) -> int:
    """Return the content size that a zstd frame declares; `max_bytes` if it declares none.

    Raises MalformedBody for a larger size, and for bytes that are not a frame.
    """
    try:
        size_bytes = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise MalformedBody(f"the zstd body is corrupt: {error}") from None
    if size_bytes > max_bytes:
        raise MalformedBody(f"the zstd body grows past {max_bytes} bytes")
    return max_bytes if size_bytes < 0 else size_bytes


def decompress(body: bytes, max_bytes: int) -> bytes:
    """Decompress one zstd frame. Raises MalformedBody if it is corrupt or its content is larger than `max_bytes`."""
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    pieces, num_bytes = list[bytes](), 0
    try:
        # A block of 4 bytes may grow to 128 KiB, so a piece of input grows to 4 MiB at most.
        for start in range(0, len(body), _ZSTD_PIECE_BYTES):
            pieces.append(decompressor.decompress(body[start : start + _ZSTD_PIECE_BYTES]))
            num_bytes += len(pieces[-1])
            if num_bytes > max_bytes:
                raise MalformedBody(f"the zstd body grows past {max_bytes} bytes")
            if decompressor.eof:
                if decompressor.unused_data or start + _ZSTD_PIECE_BYTES < len(body):
                    raise MalformedBody("the zstd body goes on behind its frame")
                break
    except zstandard.ZstdError as error:
        raise MalformedBody(f"the zstd body is corrupt: {error}") from None
    if not decompressor.eof:
        raise MalformedBody("the zstd body is cut short")
    return b"".join(pieces)  # during which other threads run


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Decode and check a ForwardBackwardRequest. Raises MalformedBody, naming datum and field, if bytes and sizes
    disagree, or a bound is exceeded."""
    _require_few_parts(body)
    message, long = _parse(body)
    config = _config(message)
    _require_bounds(message, config)
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        forward_only=message.forward_only,
        forward_backward_input=_input(message, config, long),
    )


def decode_checked(body: bytes) -> ForwardBackwardInput:
    """Decode the input in a body that `decode_forward_backward` has accepted, without checking its bounds again. Raises
    MalformedBody if bytes and sizes disagree."""
    message, long = _parse(body)
    return _input(message, _config(message), long)


def _parse(body: bytes) -> tuple[pb.ForwardBackwardRequest, Long]:
    message, long = pb.ForwardBackwardRequest(), Long()
    try:
        merge(message, body, long)
    except DecodeError:
        raise not_protobuf() from None
    return message, long


def _require_bounds(message: pb.ForwardBackwardRequest, config: dict[str, float | str]) -> None:
    """Bound the cells of sparse tensors together, and each text, and refuse fields of chunks and tensors that are not
    known. Raises MalformedBody."""
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    sparse = (tensor.shape for tensor in tensors if tensor.WhichOneof("encoding") == "sparse_csr")
    try:
        require_few_cells(sum(sparse_cells(list(shape[:3])) for shape in sparse))
    except ValueError as error:
        raise MalformedBody(str(error)) from None
    texts = [
        ("loss_fn_config", text) for key, value in config.items() for text in (key, value) if isinstance(text, str)
    ]
    for name, text in (("model_id", message.model_id), ("loss_fn", message.loss_fn), *texts):
        if len(text) > MAX_TEXT or UNSTORABLE.search(text) is not None:
            raise MalformedBody(f"{name}: {too_long(text) or unstorable(text)}")
    for index, datum in enumerate(message.data):
        for chunk in datum.model_input:
            kind = chunk.WhichOneof("chunk")
            if UnknownFieldSet(chunk) or (kind is not None and UnknownFieldSet(getattr(chunk, kind))):
                raise MalformedBody(f"datum {index}: model_input: {_unknown(chunk)}")
        for name, tensor in datum.loss_fn_inputs.items():
            if len(name) > MAX_TEXT:
                raise MalformedBody(f"datum {index}: a name in loss_fn_inputs {too_long(name)}")
            if UnknownFieldSet(tensor):
                raise MalformedBody(f"datum {index}: {name}: {_unknown(tensor)}")


def _unknown(message: Message) -> str:
    """Name a field of a chunk or tensor that is not known. Protobuf ignores it, and it may change the numbers."""
    kind = message.WhichOneof("chunk") if isinstance(message, pb.Chunk) else None
    parts = [message] if kind is None else [message, getattr(message, kind)]
    part = next(part for part in parts if UnknownFieldSet(part))
    return name_unknown(UnknownFieldSet(part)[0].field_number, part)


def _input(message: pb.ForwardBackwardRequest, config: dict[str, float | str], long: Long) -> ForwardBackwardInput:
    return ForwardBackwardInput.model_construct(
        data=[_datum(index, datum, long) for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=config or None,
    )


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    } or dict(message.loss_fn_config)


def canonical(body: bytes) -> Iterator[bytes | memoryview]:
    """Encode a valid ForwardBackwardRequest in protobuf's deterministic form, so that equal messages have equal bytes.

    The form comes in pieces, since one call on all of it would hold up every other thread. Names of tensors are in the
    order of their bytes. Long chunks and tensors are as they came: only maps come in any order.
    """
    first, last = pb.ForwardBackwardRequest(), pb.ForwardBackwardRequest()
    data: list[memoryview] = []
    for field in read_fields(body):
        if field.number == _DATA and field.content is not None:
            data.append(field.content)
        else:
            merge_at_once(first if field.number < _DATA else last, field.encoded)
    yield first.SerializeToString(deterministic=True)
    for content in data:
        pieces = _canonical_datum(content)
        yield bytes([_DATA << 3 | LENGTH_DELIMITED]) + encode_varint(sum(map(len, pieces)))
        yield from pieces
    yield last.SerializeToString(deterministic=True)


def _canonical_datum(content: memoryview) -> list[bytes | memoryview]:
    """Return the pieces of a datum: its chunks, its tensors by name, and the rest."""
    if len(content) <= LONG_BYTES:
        return [merge_at_once(pb.Datum(), content).SerializeToString(deterministic=True)]
    chunks: list[bytes | memoryview] = []
    tensors: dict[str, bytes | memoryview] = {}
    rest = pb.Datum()
    for field in read_fields(content):
        if field.number not in (_MODEL_INPUT, _LOSS_FN_INPUTS):
            merge_at_once(rest, field.encoded)
            continue
        own: bytes | memoryview = field.encoded
        if len(own) <= LONG_BYTES:
            own = merge_at_once(pb.Datum(), own).SerializeToString(deterministic=True)
        if field.number == _MODEL_INPUT:
            chunks.append(own)
        else:
            tensors[key_of(field)] = own
    in_order = [tensors[name] for name in sorted(tensors, key=str.encode)]
    return [*chunks, *in_order, rest.SerializeToString(deterministic=True)]


class Envelope(NamedTuple):
    """Model and sequence number of a forward_backward, and whether it is forward only."""

    model_id: str
    seq_id: int
    forward_only: bool


def envelope_of(body: bytes) -> Envelope | None:
    """Read the envelope of a body that decode_forward_backward refused; None if it has none."""
    found: dict[int, int | memoryview] = {}
    try:
        for field in islice(read_fields(body), MAX_PARTS):
            if field.number in _ENVELOPE and field.value is not None:
                found[field.number] = field.value
        model_id, seq_id, forward_only = (found.get(field, 0) for field in _ENVELOPE)
        if not isinstance(seq_id, int):
            return None
        text = bytes(model_id[:MAX_TEXT]).decode() if isinstance(model_id, memoryview) else ""
        return Envelope(text, (seq_id + 2**31) % 2**32 - 2**31, bool(forward_only))
    except ValueError:
        return None


def _require_few_parts(body: bytes) -> None:
    """Bound the parts of a body, one of which may take a hundred bytes for two once it is parsed, and its texts.

    Raises MalformedBody.
    """
    num_parts = 0
    for field in read_fields(body):
        num_parts += 1
        if field.number not in _REQUEST_FIELDS:
            raise MalformedBody(name_unknown(field.number, pb.ForwardBackwardRequest))
        if field.number == _DATA and field.content is not None:
            for part in read_fields(field.content):
                num_parts += 1
                if num_parts > MAX_PARTS:
                    break
                if part.number not in _DATUM_FIELDS:
                    raise MalformedBody(f"data: {name_unknown(part.number, pb.Datum)}")
                if part.number == _LOSS_FN_INPUTS and part.content is not None:
                    _require_plain_entry(part.content)
        elif field.content is not None and len(field.content) > _TEXT_BYTES:
            raise MalformedBody(
                f"field {field.number} has {len(field.content)} bytes; at most {_TEXT_BYTES} are allowed"
            )
        if num_parts > MAX_PARTS:
            raise MalformedBody(f"the body has more than {MAX_PARTS} parts (datums, chunks, tensors)")


def _require_plain_entry(entry: memoryview) -> None:
    """Bound the name of a tensor before it is parsed, which is one long call, and the fields beside it. Raises
    MalformedBody."""
    if len(entry) <= _TEXT_BYTES:
        return
    for count, field in enumerate(read_fields(entry), 1):
        if count > MAX_FIELDS:
            raise MalformedBody(f"an entry of loss_fn_inputs has more than {MAX_FIELDS} fields and {_TEXT_BYTES} bytes")
        if field.number == KEY and field.content is not None and len(field.content) > _TEXT_BYTES:
            size_bytes = len(field.content)
            raise MalformedBody(f"a name in loss_fn_inputs has {size_bytes} bytes; at most {_TEXT_BYTES} are allowed")


def _datum(index: int, message: pb.Datum, long: Long) -> Datum:
    chunks, inputs = ("data", index, "model_input"), ("data", index, "loss_fn_inputs")
    try:
        return Datum.model_construct(
            model_input=ModelInput.model_construct(
                chunks=[_chunk(chunk, long, (*chunks, at)) for at, chunk in enumerate(message.model_input)]
            ),
            loss_fn_inputs={
                name: _tensor(name, tensor, long, (*inputs, name)) for name, tensor in message.loss_fn_inputs.items()
            },
            model_input_spans=[*map(_run, message.model_input_spans)],
        )
    except ValueError as error:
        raise MalformedBody(f"datum {index}: {error}") from None


def _run(message: pb.ProvenanceSpan) -> TokenRun:
    kind = message.WhichOneof("span")
    if kind is None:
        raise ValueError("model_input_spans: a span is neither prompt_tokens nor sampled_tokens")
    run = message.prompt_tokens if kind == "prompt_tokens" else message.sampled_tokens
    if not run.sequence_id or run.offset < 0 or run.length < 1:
        raise ValueError(
            f"model_input_spans: {kind} has sequence_id {run.sequence_id!r}, offset {run.offset} and length"
            f" {run.length}; it must name a sequence, and have an offset of 0 or more and a length of 1 or more"
        )
    part: Literal["prompt", "sampled"] = "prompt" if kind == "prompt_tokens" else "sampled"
    return TokenRun.model_construct(part=part, sequence_id=run.sequence_id, offset=run.offset, length=run.length)


def _chunk(message: pb.Chunk, long: Long, path: Path) -> EncodedTextChunk | ImageChunk | DmelChunk:
    match message.WhichOneof("chunk"):
        case "encoded_text":
            tokens = long.get((*path, "encoded_text", "tokens"), message.encoded_text.tokens)
            return EncodedTextChunk.model_construct(
                type="encoded_text", tokens=_array(tokens, np.dtype("<i4"), "tokens")
            )
        case "image":
            image = message.image
            if image.HasField("override_dimensions"):
                raise ValueError("image: override_dimensions is not supported; send the image at its own size")
            if image.format not in ("png", "jpeg"):
                raise ValueError("image: format must be png or jpeg")
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            data = long.get((*path, "image", "data"))
            return ImageChunk.model_construct(
                type="image",
                data=image.data if data is None else copy_of(data),
                format=image.format,
                expected_tokens=expected,
            )
        case "dmel":
            dmel = long.get((*path, "dmel", "dmel"))
            return DmelChunk.model_construct(type="dmel", dmel=message.dmel.dmel if dmel is None else copy_of(dmel))
        case _:
            raise ValueError("model_input: a chunk holds nothing this server knows")


def _array(data: bytes | memoryview, dtype: np.dtype[np.generic], what: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{what}: {len(data)} bytes are no whole number of {dtype.name}")
    if isinstance(data, memoryview):  # it may begin anywhere; numpy lets other threads run while it copies
        return np.frombuffer(data, dtype=np.uint8).copy().view(dtype)
    return np.frombuffer(data, dtype=dtype)


def _tensor(name: str, message: pb.Tensor, long: Long, path: Path) -> np.ndarray:
    dtype = _DTYPE_OF.get(message.dtype)
    if dtype is None:
        raise ValueError(f"{name}: dtype must be float32, int64 or int32")
    if len(message.shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name}: shape has {len(message.shape)} dimensions; at most {MAX_DIMENSIONS} are supported")
    shape = list(message.shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"{name}: shape {shape} has a negative size")
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            csr, at = message.sparse_csr, (*path, "sparse_csr")
            index = np.dtype("<i8")
            return dense_from_csr(
                _array(long.get((*at, "values"), csr.values), dtype, "values"),
                _array(long.get((*at, "crow_indices"), csr.crow_indices), index, "crow_indices"),
                _array(long.get((*at, "col_indices"), csr.col_indices), index, "col_indices"),
                shape,
            )
        return reshape(_array(long.get((*path, "dense"), message.dense), dtype, "data"), shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """Encode one ArrayRecord per run of datums whose tensors agree in all dimensions but the first."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    for _, run in groupby(output.loss_fn_outputs, key=lambda datum: {n: a.shape[1:] for n, a in datum.items()}):
        datums = list(run)
        record = message.loss_fn_outputs.add(num_datums=len(datums))
        for name in datums[0]:
            _fill_batch(record.fields[name], [datum[name] for datum in datums])
    return message.SerializeToString()


def _fill_batch(message: pb.BatchedTensor, arrays: list[np.ndarray]) -> None:
    parts = [np.ascontiguousarray(array, dtype="<f4").tobytes() for array in arrays]
    message.data = b"".join(parts)
    message.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
    message.dtype = pb.DTYPE_FLOAT32
    message.trailing_shape.extend(arrays[0].shape[1:])


def encode_sample(response: SampleResponse) -> bytes:
    """Encode a protobuf SampleResponse."""
    message = pb.SampleResponse(
        sequences=map(_sequence, response.sequences), prompt_cache_hit_tokens=response.prompt_cache_hit_tokens
    )
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = response.prompt_logprobs.astype("<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(response.topk_prompt_logprobs))
    if (chosen := response.target_prompt_logprobs) is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(chosen.shape)
        values = chosen.values.astype("<f4").tobytes()
        if chosen.crow_indices is None or chosen.col_indices is None:
            tensor.dense = values
        else:
            tensor.sparse_csr.values = values
            tensor.sparse_csr.crow_indices = chosen.crow_indices.astype("<i8").tobytes()
            tensor.sparse_csr.col_indices = chosen.col_indices.astype("<i8").tobytes()
    if (sampled := response.prompt_alt_tokens) is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(_dense_tensor(sampled.tokens, pb.DTYPE_INT32))
        message.prompt_alt_tokens.logprobs.CopyFrom(_dense_tensor(sampled.logprobs, pb.DTYPE_FLOAT32))
    return message.SerializeToString()


def _dense_tensor(array: np.ndarray, dtype: pb.DType) -> pb.Tensor:
    return pb.Tensor(dense=array.astype(_DTYPE_OF[dtype]).tobytes(), dtype=dtype, shape=array.shape)


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
    )
    if sequence.topk_logprobs is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk_logprobs))
    return message


def _topk(topk: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = topk.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4").tobytes(),
        logprobs=topk.logprobs.astype("<f4").tobytes(),
        k=k,
        length=length,
    )
