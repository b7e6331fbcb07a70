"""The server's side of HTTP/2 in tests: frames to send, and what a client sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import hpack
from kvrouter.net.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    PREFACE,
    Kind,
    frame,
    read_frame_header,
    settings,
)


def prefixed(message: bytes, *, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


def data(payload: bytes, *, flags: int = 0, stream: int = 1) -> bytes:
    return frame(Kind.DATA, payload, flags=flags, stream=stream)


def headers(*fields: tuple[str, str], flags: int = END_HEADERS, stream: int = 1) -> bytes:
    return frame(Kind.HEADERS, hpack.Encoder().encode(list(fields)), flags=flags, stream=stream)


def opened() -> bytes:
    """Returns the beginning of a server's connection, with the headers of its response."""
    return settings({}) + headers((":status", "200"), ("content-type", "application/grpc"))


def ended(status: str, message: str = "") -> bytes:
    return headers(("grpc-status", status), ("grpc-message", message), flags=END_HEADERS | END_STREAM)


@dataclass
class Sent:
    """What a client sent."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    frames: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    """Kind, flags, stream and payload of every other frame."""
    messages: list[bytes] = field(default_factory=list)
    rest: bytes = b""

    def kinds(self) -> list[int]:
        return [kind for kind, *_ in self.frames]


def read(written: bytes) -> Sent:
    """Returns what a client wrote, from its first byte."""
    assert written.startswith(PREFACE)
    sent, position, stream = Sent(), len(PREFACE), bytearray()
    while position < len(written):
        length, kind, flags, number = read_frame_header(written, position)
        payload = written[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        if kind == Kind.HEADERS:
            sent.headers = dict(hpack.Decoder().decode(payload, raw=True))
        elif kind == Kind.DATA:
            stream += payload
        else:
            sent.frames.append((kind, flags, number, payload))
    while len(stream) >= 5 and len(stream) >= 5 + (size := int.from_bytes(stream[1:5], "big")):
        sent.messages.append(bytes(stream[5 : 5 + size]))
        del stream[: 5 + size]
    sent.rest = bytes(stream)
    return sent
