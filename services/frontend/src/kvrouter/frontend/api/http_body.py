"""Reads the body of an HTTP request within limits of size and idle time.

aiohttp's own decompression must be off: with compressed data that ends early, its handler waits forever.
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from kvrouter.runtime.errors import BadRequest

_STEP_BYTES = 1 << 20
"""Bytes to decompress before other requests may run: about 3 ms of work."""
_MAX_MEMBERS = 1024
"""Maximum number of concatenated gzip members in one body. An empty member takes 20 bytes, so that a small body could
otherwise keep the loop busy."""
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: web.Request, *, limit: int, idle_seconds: float) -> bytearray:
    """Reads a body and decompresses it according to its Content-Encoding.

    Args:
        request: The request.
        limit: Maximum size in bytes, before and after decompression.
        idle_seconds: Maximum pause between two parts of the body. A slow but steady upload may finish.

    Raises:
        BadRequest: the body exceeds the limit, or cannot be decompressed.
        web.HTTPRequestTimeout: no part of the body arrived within ``idle_seconds``.
    """
    body = bytearray()
    if not request.body_exists:
        return body
    _check_size(request.content_length or 0, limit)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    inflate = None if encoding == "identity" else _Inflate(encoding)
    content = request.content
    while not content.at_eof() or content.exception() is not None:
        part = await _next_part(content, idle_seconds)
        if inflate is None:
            body += part
            _check_size(len(body), limit)
        else:
            await inflate.append(part, body, limit)
    if inflate is not None and not inflate.complete:
        raise _damaged("the compressed data is truncated")
    return body


async def _next_part(content: StreamReader, idle_seconds: float) -> bytes:
    """Returns the next part of the body; empty at its end."""
    try:
        if content.is_eof():
            return content.read_nowait()  # All of it has arrived, as most bodies have with their headers.
        async with asyncio.timeout(idle_seconds):
            return await content.readany()
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"no part of the body arrived within {idle_seconds:g} s") from None
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise _damaged(str(error)) from None


class _Inflate:
    """Decompresses a body in steps, so that other requests can run in between."""

    def __init__(self, encoding: str) -> None:
        """Raises BadRequest if the encoding is not supported."""
        if encoding not in _ENCODINGS:
            raise BadRequest(
                f"Content-Encoding {encoding[:32]!r} is not supported",
                advice="Send the body as gzip, as deflate, or uncompressed.",
                known=_ENCODINGS,
            )
        self._window = _ENCODINGS[encoding]
        self._stream = zlib.decompressobj(self._window)
        self._members = 1

    @property
    def complete(self) -> bool:
        """Whether the compressed data has ended."""
        return self._stream.eof

    async def append(self, data: bytes, body: bytearray, limit: int) -> None:
        """Decompresses ``data`` and appends the result to ``body``.

        Raises:
            BadRequest: the data is damaged, or the body exceeds the limit.
        """
        while data:
            if self._stream.eof:
                self._next_member()
            try:
                body += self._stream.decompress(data, _STEP_BYTES)
            except zlib.error as error:
                raise _damaged(str(error)) from None
            _check_size(len(body), limit)
            data = self._stream.unconsumed_tail or self._stream.unused_data
            await asyncio.sleep(0)

    def _next_member(self) -> None:
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise _damaged(f"it has more than {_MAX_MEMBERS} compressed members")
        self._stream = zlib.decompressobj(self._window)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BadRequest(f"the body exceeds {limit} bytes", field="prompt", advice="Send a shorter prompt.")


def _damaged(cause: str) -> BadRequest:
    return BadRequest(
        f"the body cannot be decoded: {cause}",
        advice="Encode the body as its Content-Encoding and Transfer-Encoding headers declare.",
    )
