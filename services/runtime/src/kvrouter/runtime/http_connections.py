"""Handles connections of aiohttp's server, and limits the requests of clients without a credential.

Unreadable requests, such as those with too large headers, are answered in JSON like other errors. The body has the
format of the OpenAI API, whose clients show its message. aiohttp skips responses that their handlers have written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_protocol import RequestHandler
from kvrouter.net.budgets import TokenBucket

_MAX_TEXT = 256


class WrittenResponse(web.StreamResponse):
    """A response that its handler writes. aiohttp finds nothing left to write."""

    _keeps_connection: bool

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can serve another request."""
        return self._keeps_connection

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002
        """Does nothing: the response is written already."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: the response is written already."""


class JsonRequestHandler(RequestHandler):
    """aiohttp's handler of a connection, with JSON for requests it cannot parse."""

    __slots__ = ("is_stranger", "writing_paused")

    is_stranger: bool
    """Whether its last request had no valid credential."""
    writing_paused: bool
    """Whether the client leaves output unread. It is aiohttp's property as an attribute, since each token reads it."""

    def resume_reading(self, *arguments: bool, **options: bool) -> None:
        """Reads on if reading had stopped, or if requests wait, the rest of which aiohttp's parser may hold back.

        aiohttp calls it after each body, and would mostly parse and resume in vain.
        """
        if self._reading_paused or self._messages:
            super().resume_reading(*arguments, **options)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Returns the response, and whether the client has left before all of it was written."""
        if isinstance(resp, WrittenResponse) and "Upgrade" not in request.headers:
            return resp, False
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the response to a request that cannot be parsed or has failed. The connection is closed."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            status = super().handle_error(request, status, exc, message).status
        elif request.writer.output_size > 0:
            raise ConnectionError("a response is being sent, so this request cannot be answered")
        # A bad request is not logged: it is the client's mistake, and its text may contain a credential.
        cause = " ".join(str(message or "").split())[:_MAX_TEXT]
        answer = web.Response(
            body=error(status, cause), status=status, headers={"Connection": "close"}, content_type="application/json"
        )
        answer.force_close()
        return answer


def error(status: int, cause: str = "") -> bytes:
    """Returns the body of an error. The cause of an internal error is not shown."""
    phrase = HTTPStatus(status).phrase.lower()
    message = f"{phrase}: {cause}" if cause and status < 500 else phrase
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()


def ending(status: int, cause: str) -> bytes:
    """Returns a whole response for a connection closed before a request has arrived."""
    body = error(status, cause)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\n\r\n"
    )
    return head.encode() + body


END_OF_HEADERS = b"\r\n\r\n"
_TURNS_PER_SECOND = 200
"""Requests of strangers in a second: some 6% of a core, if each takes 0.3 ms."""
_BURST = 100
"""Requests of strangers served at once."""
_TICK_SECONDS = 0.02
MAX_HELD_BYTES = 8 << 20
"""Bytes waiting for turns, of all connections. At more, the connection that has most of them is closed."""


def nobody(_head: bytes) -> bool:
    """Recognizes no client, for ports whose requests have no credentials."""
    return False


class Stranger(Protocol):
    """A connection whose last request was not admitted."""

    def hold(self, data: bytes) -> None:
        """Stores received data until its turn, and reads no more meanwhile."""

    def pass_on(self) -> None:
        """Processes the next request of the held bytes."""

    @property
    def held(self) -> int:
        """Number of bytes held."""

    def abort(self) -> None:
        """Closes the connection at once."""


class StrangerTurns:
    """The turns of the strangers of one port: connections without a credential, or beyond its limits.

    To refuse a request costs an HTTP server nearly as much as to serve one, so a flood of them would delay the served
    requests. Strangers take turns: one for each request, as many a second as take a small part of the process's time.
    A connection with a credential within its limits waits for none.
    """

    def __init__(self, recognizes: Callable[[bytes], bool]) -> None:
        """``recognizes`` returns whether the beginning of a request shows a valid credential."""
        self.held = 0
        """Number of bytes waiting for turns."""
        self._recognizes = recognizes
        self._turns = TokenBucket(_TURNS_PER_SECOND, _BURST)
        self._waiting: dict[Stranger, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def must_wait(self, stranger: Stranger, data: bytes) -> bool:
        """Takes a turn for data of a stranger, or makes it wait. Returns whether it waits."""
        if not self._waiting and self._turns.try_take():
            if data.find(END_OF_HEADERS) in (-1, len(data) - len(END_OF_HEADERS)):
                return False
            stranger.hold(data)
            stranger.pass_on()
            self.held += stranger.held
        elif stranger not in self._waiting and self._recognizes(data[: data.find(END_OF_HEADERS)]):
            return False
        else:
            stranger.hold(data)
            self.held += len(data)
        self._waiting[stranger] = None
        if self.held > MAX_HELD_BYTES:
            max(self._waiting, key=lambda each: each.held).abort()
        if self._timer is None:
            self._wait()
        return True

    def forget(self, stranger: Stranger) -> None:
        """Drops a closed connection."""
        if stranger in self._waiting:
            del self._waiting[stranger]
            self.held -= stranger.held

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._serve)

    def _serve(self) -> None:
        self._timer = None
        while self._waiting and self._turns.try_take():
            stranger = next(iter(self._waiting))
            self.forget(stranger)
            stranger.pass_on()
            if stranger.held:
                self._waiting[stranger] = None
                self.held += stranger.held
        if self._waiting:
            self._wait()
