"""The HTTP connection to an engine, and the events that it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from kvrouter.engines.openai_server import is_alive
from kvrouter.net import trace_context

_MOST_BYTES = 32 << 20
"""Limit of an answer about the engine itself."""
_CONNECT_SECONDS = 5.0
_JSON = {"Content-Type": "application/json"}

T = TypeVar("T")


class EngineAway(Exception):
    """The engine does not answer, or is not ready yet."""


class UnexpectedAnswer(Exception):
    """The engine answered with something else than its documentation says."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class EngineHttp:
    """Requests to one engine. Does not own the session."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        key_headers: Callable[[], Mapping[str, str]],
        answer_seconds: float,
    ) -> None:
        """Sends nothing yet.

        Args:
            session: The session.
            url: Address of the engine.
            key_headers: Returns the header with the engine's key; none if it demands none.
            answer_seconds: Limit of answers about the engine itself, not of those to requests for tokens.
        """
        self.url = url.rstrip("/")
        self.host = urlsplit(self.url).hostname or ""
        """Host of the engine as the sidecar reaches it; an IPv6 address without brackets."""
        self._session = session
        self._key_headers = key_headers
        self._answering = aiohttp.ClientTimeout(total=answer_seconds)
        self._generating = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)

    async def is_alive(self) -> bool:
        """Returns False if the engine refuses connections, or says that it has failed."""
        return await is_alive(self._session, self.url)

    async def get(self, path: str) -> bytes:
        """Returns the body of a page.

        Raises:
            EngineAway: no answer in time, or a status of 500 and above.
            UnexpectedAnswer: another status than 200, or a body that is too large.
        """
        return await self._answer("GET", path)

    async def command(self, path: str, body: bytes) -> None:
        """Posts a command as JSON.

        Raises:
            EngineAway: no answer in time, or a status of 500 and above.
            UnexpectedAnswer: another status than 200.
        """
        await self._answer("POST", path, body)

    async def get_as(self, path: str, kind: type[T]) -> T:
        """Returns a page of JSON, as ``kind``.

        Raises:
            EngineAway: no answer in time, or a status of 500 and above.
            UnexpectedAnswer: another status, or other content.
        """
        try:
            return msgspec.json.decode(await self.get(path), type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise UnexpectedAnswer(f"GET {path}: {error}") from None

    @asynccontextmanager
    async def generate(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Posts a request for tokens and yields the response. If it was not read to its end, the connection is closed.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: the engine does not answer.
        """
        response = await self._session.post(
            self.url + path,
            data=body,
            headers={**_JSON, **self._key_headers(), **trace_context.headers(), **headers},
            timeout=self._generating,
            allow_redirects=False,
        )
        try:
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _answer(self, method: str, path: str, body: bytes | None = None) -> bytes:
        place = f"{method} {path}"
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body,
                headers={**(_JSON if body else {}), **self._key_headers()},
                timeout=self._answering,
                allow_redirects=False,
            ) as response:
                status, answer = response.status, await read_body(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineAway(f"{self.url}: {place}: {error or type(error).__name__}") from None
        if status >= 500:
            raise EngineAway(f"{self.url}: {place}: expected status 200, received {status}")
        if status in {401, 403}:
            raise UnexpectedAnswer(f"{place}: status {status}: expected the engine's key in --engine-keys-file", status)
        if status != 200:
            raise UnexpectedAnswer(f"{place}: expected status 200, received {status}", status)
        return answer


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Returns a whole body.

    Raises:
        UnexpectedAnswer: it is too large.
    """
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _MOST_BYTES:
            raise UnexpectedAnswer(f"{response.url.path}: expected at most {_MOST_BYTES} bytes", response.status)
        parts.append(part)
    return b"".join(parts)


def as_json(value: Any) -> bytes:
    """Returns a value as JSON."""
    return msgspec.json.encode(value)


_MOST_EVENT_BYTES = 64 << 20
"""Limit of one event. The first one may repeat the prompt's token ids."""

END = b"[DONE]"
"""Data of the event that ends a stream of an OpenAI API."""


class EventTooLarge(ValueError):
    """An event exceeds the limit."""


class EventStream:
    """Collects the events of one response."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Returns the data of the events that end in ``received``.

        Raises:
            EventTooLarge: an event exceeds 64 MiB.
        """
        # Only complete lines are joined, so that a long line costs no copy for each of its parts.
        *complete, rest = received.split(b"\n")
        events = []
        for part in complete:
            line = (bytes(self._rest) + part).removesuffix(b"\r")
            self._rest.clear()
            if line.startswith(b"data:"):
                data = line[5:].removeprefix(b" ")
                self._data.append(data)
                self._size += len(data)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._size = 0
        self._rest += rest
        if self._size + len(self._rest) > _MOST_EVENT_BYTES:
            raise EventTooLarge(f"expected events of at most {_MOST_EVENT_BYTES} bytes")
        return events
