"""Connections to the OpenAI APIs of engines, and how requests on them fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kvrouter.engines.openai_server import connection_failure
from kvrouter.net.budgets import loop_budget
from kvrouter.net.calls import NotSent
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway

_CONNECT_SECONDS = 10.0
_CHUNK_US = 60
"""CPU time to pass a chunk of a response on, microseconds."""
_BYTES_PER_US = 50
_MAX_FAILURE_BYTES = 64 << 10
"""Maximum size of an engine's error, bytes."""
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


class EngineFailed(Exception):
    """An engine failed a request it had received: it broke the connection, or answered with an error."""


@asynccontextmanager
async def posted(
    session: aiohttp.ClientSession, url: str, *, data: bytes, headers: dict[str, Any], seconds: float | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Sends a request to an engine; yields the response, whose body ``chunks`` reads.

    Args:
        session: Open connections.
        url: URL of the engine's API.
        data: The body.
        headers: The headers.
        seconds: Time until the end of the response; None for any.

    Raises:
        NotSent: the engine cannot be connected to.
        EngineFailed: the connection ended before the head of the response.
        DependencyAway: the response is not HTTP.
        DeadlineExceeded: the time is over.
    """
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
    try:
        answer = await session.post(url, data=data, headers=headers, timeout=timeout)
    except _NOT_SENT as error:
        raise NotSent(f"its OpenAI API cannot be reached: {connection_failure(error)}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(error) from None
    async with answer:
        yield answer


async def chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields a response in parts, each in its turn on the event loop.

    Raises:
        EngineFailed, DependencyAway, DeadlineExceeded: as for ``posted``.
    """
    try:
        async for chunk in answer.content.iter_any():
            await loop_budget().turn(_CHUNK_US + len(chunk) // _BYTES_PER_US)
            yield chunk
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(error) from None


async def failure_body(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the body of an engine's error, of which a bounded part is read.

    Raises:
        EngineFailed, DependencyAway, DeadlineExceeded: as for ``posted``.
    """
    body = bytearray()
    try:
        while len(body) < _MAX_FAILURE_BYTES and (part := await answer.content.read(_MAX_FAILURE_BYTES - len(body))):
            body += part
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(error) from None
    return bytes(body)


def _failure(error: Exception) -> EngineFailed | DependencyAway | DeadlineExceeded:
    # A timeout is a ClientConnectionError, too, if it is that of a socket.
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("its OpenAI API has not answered in time")
    if isinstance(error, _BROKEN):
        return EngineFailed(f"its OpenAI API broke the connection: {connection_failure(error)}")
    return DependencyAway(f"its OpenAI API does not answer: {connection_failure(error)}")
