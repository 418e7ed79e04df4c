"""Protobuf messages that are read by their fields, so that no call is long, which would hold up all other threads.

Protobuf parses a message in a single call, and copies each byte string when it parses it and again when it is read. So
a long message is parsed field by field, and its long byte strings stay views of the body.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
LONG_BYTES = 1 << 20
"""Bytes that protobuf parses at once."""
KEY, VALUE = 1, 2
"""Field numbers of an entry of a map."""
LENGTH_DELIMITED = 2
"""Wire type of texts, lists and messages."""
_PARTS_OF_DATUM = 4
"""Length of the path to a chunk or tensor. The number of these is bounded before."""
MAX_FIELDS = 64
"""Largest number of fields of a long chunk, tensor or entry of a map, which have four kinds at most."""
Path: TypeAlias = tuple[str | int, ...]
"""Names of fields, each with the index or key where there are several."""
Long: TypeAlias = dict[Path, memoryview]
"""The byte strings that a parsed message lacks."""


class MalformedBody(ValueError):
    """The body does not match its content type."""


class Field(NamedTuple):
    """A field of a protobuf message, whose content is not parsed."""

    number: int
    encoded: memoryview
    """All of its bytes, number and size included."""
    value: int | memoryview | None
    """The number of a varint, the content of a text, list or message; None for a fixed number."""

    @property
    def content(self) -> memoryview | None:
        return self.value if isinstance(self.value, memoryview) else None


def merge(message: Message, body: bytes | memoryview, long: Long, path: Path = ()) -> None:
    """Parse a body into a message, as a single call would, but put byte strings of more than LONG_BYTES into `long`.

    `path`: the message's, within the one that is parsed. Raises DecodeError, MalformedBody.
    """
    if len(body) <= LONG_BYTES and not (long and _find_within(path, long)):
        merge_at_once(message, body)
        return
    for count, field in enumerate(read_fields(body), 1):
        if count > MAX_FIELDS and len(path) >= _PARTS_OF_DATUM:
            raise MalformedBody(f"{_join(path)} has more than {MAX_FIELDS} fields and {LONG_BYTES} bytes")
        known = cast("FieldDescriptor | None", message.DESCRIPTOR.fields_by_number.get(field.number))
        if known is not None and _is_map(known):
            _merge_entry(message, known, field, long, path)
            continue
        if known is not None and field.content is not None:
            _remove_replaced(known, long, path)
        if len(field.encoded) <= LONG_BYTES and not _extends_long(known, field, long, path):
            merge_at_once(message, field.encoded)
        else:
            _merge_long(message, known, field, long, path)


def merge_at_once(message: M, body: bytes | memoryview) -> M:
    """Parse a body in one call, and return its message. A view is not copied; only the types speak of bytes."""
    message.MergeFromString(cast(bytes, body))
    return message


def _find_within(path: Path, long: Long) -> list[Path]:
    """Return the paths of the byte strings that the message or field at a path lacks."""
    return [at for at in long if at[: len(path)] == path]


def _remove_replaced(known: FieldDescriptor, long: Long, path: Path) -> None:
    """Remove the byte strings that a field replaces: an earlier one of its own, and those of others of its oneof."""
    alternatives = known.containing_oneof.fields if known.containing_oneof is not None else ()
    names = {other.name for other in alternatives} - {known.name}
    if known.type == FieldDescriptor.TYPE_BYTES:
        names.add(known.name)
    for name in names:
        for at in _find_within((*path, name), long):
            del long[at]


def _extends_long(known: FieldDescriptor | None, field: Field, long: Long, path: Path) -> bool:
    """Return whether a field is a further part of a message that lacks byte strings, which it may replace."""
    if known is None or field.content is None or known.is_repeated or known.type != FieldDescriptor.TYPE_MESSAGE:
        return False
    return bool(_find_within((*path, known.name), long))


def _merge_long(message: Message, known: FieldDescriptor | None, field: Field, long: Long, path: Path) -> None:
    """Parse a field of more than LONG_BYTES, or of a message that has such a field."""
    if known is None:
        raise MalformedBody(f"{_join(path)}: {name_unknown(field.number, message)}")
    assert field.content is not None  # a number is short
    at = (*path, known.name)
    if known.type == FieldDescriptor.TYPE_BYTES:
        setattr(message, known.name, b"")
        long[at] = field.content
    elif known.type != FieldDescriptor.TYPE_MESSAGE:
        raise MalformedBody(f"{_join(at)} has {len(field.content)} bytes; at most {LONG_BYTES} are allowed")
    elif known.is_repeated:
        parts = getattr(message, known.name)
        merge(parts.add(), field.content, long, (*at, len(parts) - 1))
    else:
        part = getattr(message, known.name)
        part.SetInParent()
        merge(part, field.content, long, at)


def _merge_entry(message: Message, known: FieldDescriptor, field: Field, long: Long, path: Path) -> None:
    """Parse an entry of a map, which replaces an earlier entry of its key."""
    at = (*path, known.name, key_of(field))
    for replaced in _find_within(at, long):
        del long[replaced]
    if len(field.encoded) <= LONG_BYTES:
        merge_at_once(message, field.encoded)
        return
    entries = getattr(message, known.name)
    entries.pop(at[-1], None)
    for part in read_fields(field.content or b""):
        if part.number == VALUE and part.content is not None:
            merge(entries[at[-1]], part.content, long, at)


def key_of(entry: Field) -> str:
    """Return the key of an entry of a map of texts. Raises MalformedBody."""
    found = [part.content for part in read_fields(entry.content or b"") if part.number == KEY]
    try:
        return bytes(found[-1] or b"").decode() if found else ""
    except UnicodeDecodeError:
        raise not_protobuf() from None


def copy_of(view: memoryview) -> bytes:
    """Return the bytes of a view. Other threads run meanwhile."""
    return b"".join([bytes(view[start : start + LONG_BYTES]) for start in range(0, len(view), LONG_BYTES)])


def read_fields(message: bytes | memoryview) -> Iterator[Field]:
    """Yield the fields of a protobuf message without parsing their content. Raises MalformedBody."""
    view, end = memoryview(message), 0
    while end < len(view):
        start = end
        tag, end = _read_varint(view, start)
        value: int | memoryview | None = None
        match tag & 7:
            case 0:
                value, end = _read_varint(view, end)
            case 2:
                size, at = _read_varint(view, end)
                end = at + size
                value = view[at:end]
            case 1 | 5 as kind:
                end += 8 if kind == 1 else 4
            case _:
                raise not_protobuf()
        if end > len(view):
            raise not_protobuf()
        yield Field(tag >> 3, view[start:end], value)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70 and at < len(view):
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise not_protobuf()


def encode_varint(value: int) -> bytes:
    """Encode a number of the wire."""
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def name_unknown(number: int, message: Message | type[Message]) -> str:
    """Return the refusal of a field that is not known: protobuf ignores it, and it may change the numbers."""
    return f"field {number} of {message.DESCRIPTOR.name} is not known here"


def not_protobuf() -> MalformedBody:
    """Return the refusal of bytes that are no such message."""
    return MalformedBody("the body is not a protobuf ForwardBackwardRequest")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _join(path: Path) -> str:
    return ".".join(map(str, path))
