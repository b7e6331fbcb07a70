"""Answers the pieces of streamed responses which a gateway sends to its external processor."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from kvrouter.core.reference.grpc import FRAME_HEADER, MAX_FRAME_BYTES, MESSAGE_HEADER, read_data

_RESPONSE_BODY, _METADATA_CONTEXT, _ATTRIBUTES = 5, 8, 9
"""Fields of Envoy's ProcessingRequest."""
_UNCHANGED = b"\x22\x02\x0a\x00"
"""A ProcessingResponse that lets a piece pass as it is."""
_AROUND_PIECE = (1, 3, 3, 1, 4)
"""The fields around a piece in a ProcessingResponse that sends it back, from the innermost one."""
_MAX_KEPT_BYTES = 64 << 10
"""Bytes of pieces beyond which those taken must be counted."""
_BYTES = 2
"""Wire type of bytes and messages."""


class PassedStream:
    """A stream of server-sent events that passes a gateway. Its pieces skip the steps of other messages."""

    def __init__(self, *, sends_back: bool, hidden: Sequence[bytes] = ()) -> None:
        """Takes nothing before ``begin``.

        Args:
            sends_back: Whether answers have the piece; otherwise they say that it may pass.
            hidden: Names the client must not see. If there are any, only whole events without them are taken.
        """
        self._sends_back = sends_back
        self._hidden = hidden
        self.is_held = False
        """Whether nothing is taken, since the beginning of an event waits for its end."""
        self.limit = 0
        """Number of tokens beyond which those taken must be counted."""
        self._most_received = self._most_sent = 0
        self._received = self._sent = 0
        self._tokens = 0
        self._passed = b""

    def begin(self, most_received: int, most_sent: int) -> None:
        """Lets it take pieces.

        Args:
            most_received: Bytes beyond which those received must be counted.
            most_sent: Maximum number of bytes to be sent.
        """
        self._most_received, self._most_sent = most_received, most_sent

    def answer(self, message: bytes, around: int, most: int) -> bytes | None:
        """Returns the answer to a message with a piece that may pass, of at most ``most`` bytes; None for any other.

        ``around`` is the size of what surrounds the message, and the answer, in a frame: it counts for both.
        """
        piece = _piece_of(message)
        if piece is None or self.is_held or not self._shows(piece):
            return None
        answer = _sent_back(piece) if self._sends_back else _UNCHANGED
        sent = self._sent + len(answer) + around
        if len(answer) > most or sent > self._most_sent:
            return None
        self._sent = sent
        self._received += len(message) + around
        self._tokens += piece.count(b"data:") or 1
        self._passed += piece
        return answer

    @property
    def is_due(self) -> bool:
        """Whether what it has taken must be counted before it takes more."""
        is_full = len(self._passed) > _MAX_KEPT_BYTES
        return is_full or self._tokens > self.limit or self._received > self._most_received

    def moved(self) -> tuple[int, int]:
        """Returns the bytes received and sent since it was last asked."""
        moved = self._received, self._sent
        self._received = self._sent = 0
        return moved

    def taken(self) -> tuple[int, bytes]:
        """Returns the number of tokens taken since it was last asked, one for each event, and the pieces together."""
        taken = self._tokens, self._passed
        self._tokens, self._passed = 0, b""
        return taken

    def _shows(self, piece: bytes) -> bool:
        if not self._hidden:
            return True
        return piece.endswith(b"\n\n") and b"\r" not in piece and not any(name in piece for name in self._hidden)


def pass_pieces(
    data: bytes, start: int, short_bytes: int, most_bytes: int, streams: Mapping[int, PassedStream]
) -> tuple[bytes, int | None, int, int, int, int]:
    """Answers pieces from a position of the input on, up to the first frame that must be read in another way.

    Such a frame is not data that is one whole message, without flags, or its stream does not take the message.

    Args:
        data: The input.
        start: The position.
        short_bytes: Size below which a payload is short.
        most_bytes: Maximum size of the payloads of the answers.
        streams: The streams by number of their call.

    Returns:
        The frames of the answers; the number of the call whose stream is due, after whose piece it ends, None for none;
        the numbers of frames with short payloads, and of pieces; and the bytes of the payloads, and of the frames.
    """
    answers, due, position = b"", None, start
    short_frames = pieces = payload_bytes = sent = 0
    while due is None and (frame := read_data(data, position)) is not None and frame[0] in streams:
        number, payload = frame
        stream, around = streams[number], MESSAGE_HEADER.size
        if len(payload) < around or MESSAGE_HEADER.unpack_from(payload) != (0, len(payload) - around):
            break
        answer = stream.answer(payload[around:], around, min(most_bytes - sent, MAX_FRAME_BYTES) - around)
        if answer is None:
            break
        size = len(answer) + around
        answers += FRAME_HEADER.pack(size >> 8, size & 0xFF, 0, 0, number)
        answers += MESSAGE_HEADER.pack(0, len(answer)) + answer
        sent += size
        short_frames += len(payload) < short_bytes
        pieces += 1
        payload_bytes += len(payload)
        position += FRAME_HEADER.size + len(payload)
        due = number if stream.is_due else None
    return answers, due, short_frames, pieces, payload_bytes, position - start


def _piece_of(message: bytes) -> bytes | None:
    """Returns the piece in a ProcessingRequest; None if it is the last one, or there is anything but metadata."""
    fields = _fields(message)
    bodies = [value for number, value in fields or () if number == _RESPONSE_BODY]
    known = {_RESPONSE_BODY, _METADATA_CONTEXT, _ATTRIBUTES}
    if fields is None or len(bodies) != 1 or not known.issuperset(number for number, _ in fields):
        return None
    match _fields(bodies[0]):
        case [(1, piece)]:
            return piece or None
    return None


def _fields(message: bytes) -> list[tuple[int, bytes]] | None:
    """Returns the fields of a message by number; None if it is malformed, or one has another type than bytes."""
    try:
        parsed = UnknownFieldSet(Empty.FromString(message))
    except DecodeError:
        return None
    fields = [parsed[at] for at in range(len(parsed))]
    if any(field.wire_type != _BYTES for field in fields):
        return None
    return [(field.field_number, field.data) for field in fields]


def _sent_back(piece: bytes) -> bytes:
    answer = piece
    for number in _AROUND_PIECE:
        answer = struct.pack("B", number << 3 | _BYTES) + _varint(len(answer)) + answer
    return answer


def _varint(value: int) -> bytes:
    encoded = b""
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])
