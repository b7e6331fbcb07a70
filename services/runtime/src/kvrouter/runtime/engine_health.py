"""Tells whether an engine that failed a request has died."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp

_ANSWER = aiohttp.ClientTimeout(total=0.5)
"""Longest wait for an answer. The request waits meanwhile for its next attempt."""


async def is_alive(session: aiohttp.ClientSession, url: str) -> bool:
    """Returns False if an engine refuses connections, or says at ``/health`` that it has failed.

    The server of a vLLM whose engine has died lives a moment longer. A late answer says nothing.
    """
    try:
        async with session.get(f"{url.rstrip('/')}/health", timeout=_ANSWER) as answer:
            return answer.status < HTTPStatus.INTERNAL_SERVER_ERROR
    except TimeoutError:
        return True
    except aiohttp.ClientError:
        return False
