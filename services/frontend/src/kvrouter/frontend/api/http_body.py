"""Reads the body of an HTTP request, within bounds of size and of time.

The server must not decompress bodies itself: aiohttp leaves a handler waiting for ever where compressed data
ends early.
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from kvrouter.runtime.errors import BadRequest

_STEP_BYTES = 1 << 20
"""Most that is decompressed before other requests get a turn: some 3 ms."""
_MAX_MEMBERS = 1024
"""Most gzip files, one after the other, in one body; an empty one has 20 bytes."""
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: web.Request, *, limit: int, idle_seconds: float) -> bytearray:
    """Reads a body, and decompresses it as its Content-Encoding says.

    Args:
        request: The request.
        limit: Most bytes, before and after decompression.
        idle_seconds: Longest pause between two parts of the body. A slow upload that goes on is not cut off.

    Raises:
        BadRequest: the body exceeds the limit, or cannot be decompressed.
        web.HTTPRequestTimeout: nothing of the body came for ``idle_seconds``.
    """
    body = bytearray()
    if not request.body_exists:
        return body
    _check_size(request.content_length or 0, limit)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    inflate = None if encoding == "identity" else _Inflate(encoding)
    while part := await _next_part(request, idle_seconds):
        if inflate is None:
            body += part
            _check_size(len(body), limit)
        else:
            await inflate.append(part, body, limit)
    if inflate is not None and not inflate.complete:
        raise _damaged("the compressed data ends early")
    return body


async def _next_part(request: web.Request, idle_seconds: float) -> bytes:
    """What has come of the body; empty at its end."""
    try:
        async with asyncio.timeout(idle_seconds):
            return await request.content.readany()
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"no part of the body came for {idle_seconds:g} s") from None
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise _damaged(str(error)) from None


class _Inflate:
    """Decompresses what comes, a step at a time."""

    def __init__(self, encoding: str) -> None:
        """Raises BadRequest where the encoding is not supported."""
        if encoding not in _ENCODINGS:
            raise BadRequest(
                f"Content-Encoding {encoding[:32]!r} is not supported",
                advice="Send the body as gzip, as deflate, or as it is.",
                known=_ENCODINGS,
            )
        self._window = _ENCODINGS[encoding]
        self._stream = zlib.decompressobj(self._window)
        self._members = 1

    @property
    def complete(self) -> bool:
        """Whether the compressed data has come to its end."""
        return self._stream.eof

    async def append(self, data: bytes, body: bytearray, limit: int) -> None:
        """Appends what ``data`` adds to the body.

        Raises:
            BadRequest: it is damaged, or the body exceeds the limit.
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
            raise _damaged(f"more than {_MAX_MEMBERS} compressed files in one body")
        self._stream = zlib.decompressobj(self._window)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BadRequest(f"the body exceeds {limit} bytes", field="prompt", advice="Send a shorter prompt.")


def _damaged(cause: str) -> BadRequest:
    return BadRequest(
        f"body: cannot be decoded: {cause}",
        advice="Send a body that is encoded as Content-Encoding and Transfer-Encoding say.",
    )
