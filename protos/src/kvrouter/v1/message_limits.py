"""Size limits of messages, checked on the encoding before it is parsed.

Parsing can multiply the size by forty: an empty submessage has 2 bytes on the wire and about 70 in memory, a 64-bit id
1 and 8. Only token ids and hashes are long in a valid message. Their fields are packed and of fixed width, so they
do not grow. Everything besides them is limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

SMALL_BYTES = 128 << 10
"""Messages up to this size are not checked: whatever they contain takes a few megabytes."""

LONG_FIELDS = frozenset(
    {
        "kvrouter.v1.TokenIds.ids",
        "kvrouter.v1.LocalHashes.hashes",
        "kvrouter.v1.WorkerServiceGenerateRequest.token_ids",
        "kvrouter.v1.ReassertBooking.sequence_hashes",
    }
)
"""Packed fields of fixed width (4 bytes a token, 8 a hash) that may be long."""

_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_ELEMENT_BYTES = {FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_FIXED64: 8}


class InvalidMessage(ValueError):
    """A message is malformed, or exceeds a limit."""

    def __init__(self, message: str, *, field: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.advice = advice


class TooManyElements(InvalidMessage):
    """A long field has more elements than the limit."""

    def __init__(self, count: int, limit: int, *, field: str) -> None:
        super().__init__(f"{field} has {count} elements; the limit is {limit}", field=field)
        self.count = count
        self.limit = limit


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Size limits of a message."""

    elements: int | None = None
    """Maximum number of elements of a long field; None for no limit."""
    besides_bytes: int = 512 << 10
    """Maximum number of bytes besides the long fields."""
    records: int = 16_384
    """Maximum number of fields besides the long ones; each element of a repeated field counts."""

    def check(self, encoded: bytes, kind: type[Message]) -> None:
        """Checks the encoding of a message. A message of at most ``SMALL_BYTES`` always passes.

        Raises:
            InvalidMessage: the message is malformed, or exceeds a limit besides its long fields.
            TooManyElements: a long field has too many elements.
        """
        if len(encoded) <= SMALL_BYTES:
            return
        counts: dict[str, int] = {}
        besides = 0
        walk = _walk(encoded, 0, len(encoded), cast(Descriptor, kind.DESCRIPTOR), "")
        for records, (path, size, elements) in enumerate(walk, 1):
            if elements is None:
                besides += size
            else:
                counts[path] = counts.get(path, 0) + elements
            if besides > self.besides_bytes or records > self.records:
                raise InvalidMessage(
                    f"{path} has too many elements or is too long: a message may have {self.besides_bytes} bytes in"
                    f" {self.records} fields and elements, besides packed tokens and hashes",
                    field=path,
                    advice="Send less in this field; send token ids and hashes packed.",
                )
        for path, count in counts.items():
            if self.elements is not None and count > self.elements:
                raise TooManyElements(count, self.elements, field=path)


DEFAULT_LIMITS = MessageLimits()


def _walk(data: bytes, start: int, end: int, message: Descriptor, path: str) -> Iterator[tuple[str, int, int | None]]:
    """Yields the path and size in bytes of each record of a message, and the number of elements of a long field."""
    position = start
    while position < end:
        begin = position
        tag, position = _varint(data, position, end)
        wire_type = tag & 7
        if wire_type == _VARINT:
            stop = _varint(data, position, end)[1]
        elif wire_type == _BYTES:
            size, position = _varint(data, position, end)
            stop = position + size
        elif wire_type in (_START_GROUP, _END_GROUP):
            stop = position
        elif wire_type in (_FIXED64, _FIXED32):
            stop = position + (8 if wire_type == _FIXED64 else 4)
        else:
            raise InvalidMessage("the message has a field of an unknown wire type")
        if stop > end:
            raise InvalidMessage("the message ends within a field")
        field = message.fields_by_number.get(tag >> 3)
        named = f"{path}{field.name}" if field is not None else f"{path}{tag >> 3}"
        if field is not None and wire_type == _BYTES and field.full_name in LONG_FIELDS:
            yield named, stop - begin, (stop - position) // _ELEMENT_BYTES[field.type]
        elif field is not None and wire_type == _BYTES and _leads_to_long(inner := field.message_type):
            yield from _walk(data, position, stop, inner, f"{named}.")
            yield named, position - begin, None
        else:
            yield named, stop - begin, None
        position = stop


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise InvalidMessage("the message ends within a field")


def _leads_to_long(message: Descriptor | None) -> TypeGuard[Descriptor]:
    """Returns whether a message has a long field, directly or in a submessage."""
    return message is not None and _has_long(message)


@lru_cache(maxsize=256)
def _has_long(message: Descriptor) -> bool:
    return any(field.full_name in LONG_FIELDS or _leads_to_long(field.message_type) for field in message.fields)
