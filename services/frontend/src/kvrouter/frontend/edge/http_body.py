"""Reads the body of an HTTP request within limits of size, time and room.

aiohttp's own decompression must be off: with compressed data ending early, its handler waits forever.
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from kvrouter.frontend.access.body_room import BodyRoom, BodyTooLarge
from kvrouter.v1.errors import BadRequest

_PART_BYTES = 64 << 10
"""Least room taken for a body whose size is not known, and size below which parts of a body are joined."""
_STEP_BYTES = 1 << 20
"""Bytes to decompress before other requests may run: about 3 ms of work."""
_MAX_MEMBERS = 1024
"""Maximum number of concatenated gzip members in one body. An empty member takes 20 bytes, so a small body could
otherwise keep the loop busy."""
_MAX_RATIO = 50
"""Maximum size of a body of more than ``_STEP_BYTES`` in multiples of its compressed size. Texts and lists of token ids
compress to a third or a tenth, a body made to fill memory to a thousandth."""
_LEAST_BYTES_PER_SECOND = 16 << 10
"""Slowest upload, besides pauses of one ``idle_seconds`` in all: who sends less holds room others wait for."""
ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Encodings for decompression, with the window of zlib."""


def arrived_body(request: web.Request, room: BodyRoom, *, limit: int) -> bytes | None:
    """Returns a body that has arrived with its headers, as most have; None if ``read_body`` must read it.

    Its room is taken if there is room at once.

    Raises:
        BodyTooLarge: it exceeds the limit.
    """
    content = request.content
    if "Content-Encoding" in request.headers or not content.is_eof() or content.exception() is not None:
        return None
    _check_size(content.total_bytes, limit)
    return content.read_nowait() if room.try_hold_all(content.total_bytes) else None


async def read_body(request: web.Request, room: BodyRoom, *, limit: int, idle_seconds: float) -> bytes | bytearray:
    """Reads a body and decompresses it according to its Content-Encoding.

    Args:
        request: The request.
        room: Room for the body, which is taken before it is read and decompressed.
        limit: Maximum size in bytes, before and after decompression.
        idle_seconds: Maximum pause between two parts of the body. A slow but steady upload may finish.

    Raises:
        BadRequest: the body cannot be decompressed.
        BodyTooLarge: it exceeds the limit, or is compressed too much.
        Overloaded: there is no room for it.
        web.HTTPRequestTimeout: no part of the body arrived within ``idle_seconds``, or it arrives too slowly.
    """
    content = request.content
    if not request.body_exists:
        return b""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    declared = request.content_length or 0
    _check_size(declared, limit)
    upload = _Upload(content, idle_seconds)
    body: bytes | bytearray
    if encoding == "identity":
        most = content.total_bytes if content.is_eof() else declared or limit + 1
        parts: list[bytes] = []
        while not upload.at_eof:
            if room.size <= upload.received:
                # At least for all that has arrived, so no part of it is cut.
                await room.hold(min(most, max(_PART_BYTES, 2 * upload.received, content.total_bytes)))
            part = await upload.next_part(max(1, room.size - upload.received))
            if parts and len(parts[-1]) < _PART_BYTES:
                parts[-1] += part  # Many small parts would take many times their size.
            else:
                parts.append(part)
            _check_size(upload.received, limit)
        body = b"".join(parts)
    else:
        body, inflate = bytearray(), _Inflate(encoding)
        while not upload.at_eof:
            await inflate.append(await upload.next_part(_PART_BYTES), body, room, limit)
        if not inflate.complete:
            raise _damaged("the compressed data is truncated")
    room.is_read(len(body))
    return body


async def inflated(body: bytes | bytearray, encoding: str, room: BodyRoom, *, limit: int) -> bytearray:
    """Returns a whole body, decompressed.

    Args:
        body: The body as it was sent.
        encoding: Its Content-Encoding, in lower case.
        room: Room for the result, which is taken before it is decompressed.
        limit: Maximum size of the result in bytes.

    Raises:
        BadRequest: the body cannot be decompressed.
        BodyTooLarge: the result exceeds the limit, or is compressed too much.
        Overloaded: there is no room for it.
    """
    inflate, result = _Inflate(encoding), bytearray()
    for start in range(0, len(body), _PART_BYTES):
        await inflate.append(bytes(body[start : start + _PART_BYTES]), result, room, limit)
    if not inflate.complete:
        raise _damaged("the compressed data is truncated")
    return result


class _Upload:
    """The bytes of a body as they arrive."""

    def __init__(self, content: StreamReader, idle_seconds: float) -> None:
        self._content = content
        self._idle_seconds = idle_seconds
        self.received = 0
        """Bytes that were read."""
        self._spent_seconds = 0.0

    @property
    def at_eof(self) -> bool:
        """Whether all of it was read."""
        return self._content.at_eof() and self._content.exception() is None

    async def next_part(self, most: int) -> bytes:
        """Returns the next part of the body, of ``most`` bytes at most; empty at its end.

        Raises:
            BadRequest: the transfer is damaged.
            web.HTTPRequestTimeout: it does not arrive in time.
        """
        try:
            if self._content.is_eof() or self._content.total_bytes > self.received:
                part = self._content.read_nowait(most)  # It has arrived: nothing to wait for.
            else:
                part = await self._awaited_part(most)
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                reason=f"no part of the body arrived within {self._idle_seconds:g} s, or less than"
                f" {_LEAST_BYTES_PER_SECOND >> 10} KiB/s"
            ) from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise _damaged(str(error)) from None
        self.received += len(part)
        return part

    async def _awaited_part(self, most: int) -> bytes:
        loop = asyncio.get_running_loop()
        began = loop.time()
        late_in = self._idle_seconds + self.received / _LEAST_BYTES_PER_SECOND - self._spent_seconds
        async with asyncio.timeout(min(self._idle_seconds, late_in)):
            part = await self._content.read(most)
        self._spent_seconds += loop.time() - began
        return part


class _Inflate:
    """Decompresses a body in steps, so other requests can run in between."""

    def __init__(self, encoding: str) -> None:
        """Raises BadRequest if the encoding is not supported."""
        if encoding not in ENCODINGS:
            raise BadRequest(
                f"Content-Encoding {encoding[:32]!r} is not supported",
                advice="Send the body as gzip, as deflate, or uncompressed.",
                known=ENCODINGS,
            )
        self._window = ENCODINGS[encoding]
        self._stream = zlib.decompressobj(self._window)
        self._members = 1
        self._compressed = 0

    @property
    def complete(self) -> bool:
        """Whether the compressed data has ended."""
        return self._stream.eof

    async def append(self, data: bytes, body: bytearray, room: BodyRoom, limit: int) -> None:
        """Decompresses ``data`` and appends the result to ``body``.

        Raises:
            BadRequest: the data is damaged.
            BodyTooLarge: the body exceeds the limit, or is compressed too much.
            Overloaded: there is no room for it.
        """
        self._compressed += len(data)
        while data:
            if self._stream.eof:
                self._next_member()
            if room.size <= len(body):
                await room.hold(len(body) + max(_PART_BYTES, min(len(body), _STEP_BYTES)))
            try:
                body += self._stream.decompress(data, min(room.size - len(body), _STEP_BYTES))
            except zlib.error as error:
                raise _damaged(str(error)) from None
            _check_size(len(body), limit)
            if len(body) > max(_STEP_BYTES, _MAX_RATIO * self._compressed):
                raise BodyTooLarge(
                    f"the body is more than {_MAX_RATIO} times its compressed size",
                    advice="Send the body uncompressed.",
                )
            data = self._stream.unconsumed_tail or self._stream.unused_data
            await asyncio.sleep(0)

    def _next_member(self) -> None:
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise _damaged(f"it has more than {_MAX_MEMBERS} compressed members")
        self._stream = zlib.decompressobj(self._window)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"the body exceeds {limit} bytes", field="prompt", advice="Send a shorter prompt.")


def _damaged(cause: str) -> BadRequest:
    return BadRequest(
        f"the body cannot be decoded: {cause}",
        advice="Encode the body as its Content-Encoding and Transfer-Encoding headers declare.",
    )
