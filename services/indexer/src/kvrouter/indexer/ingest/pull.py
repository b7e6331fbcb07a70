"""Reads a durable pull consumer: one request to the server for many messages, each taken as soon as it arrives.

The client library's own ``fetch`` waits until all requested messages have arrived, so that a quiet stream must be read
with a request, a task and a timer for each message. This cost more than applying the message.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import DEFAULT_PREFIX, Header, StatusCode
from nats.js.errors import APIError

REQUESTED_MESSAGES = 64
"""Messages per request. Bounds the arrivals during the application of earlier messages."""

# The server ends a request before the client stops waiting for it, so that no request outlives its fetch.
_MARGIN_SECONDS = 0.05
_REQUEST_ENDED = frozenset({StatusCode.NO_MESSAGES, StatusCode.REQUEST_TIMEOUT})


class Pull:
    """Messages of one durable consumer. Call ``open`` first; one task calls ``take``."""

    def __init__(self, connection: Client, stream: str, durable: str) -> None:
        self._connection = connection
        self._subject = f"{DEFAULT_PREFIX}.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = connection.new_inbox()
        self._subscription: Subscription | None = None
        self._arrived: deque[Msg] = deque()
        self._filled = asyncio.Event()
        self._outstanding = 0
        """Messages still due for the last request."""
        self._ends_at = 0.0
        """Time of the event loop at which the last request has ended."""

    async def open(self) -> None:
        """Subscribes to the messages.

        Raises:
            nats.errors.Error: the connection is closed.
        """
        self._subscription = await self._connection.subscribe(self._inbox, cb=self._receive)

    async def close(self) -> None:
        """Unsubscribes. The server drops its remaining messages for the last request.

        Raises:
            nats.errors.Error: the connection is closed.
        """
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def take(self, wait_seconds: float) -> list[Msg]:
        """Returns all received messages, after waiting for the first; none after ``wait_seconds``.

        When it returns none, the server has no request either, and sends nothing until the next call.

        Raises:
            nats.errors.Error, OSError: the connection is closed, or there is no such consumer.
        """
        if not self._arrived:
            if self._outstanding <= 0:
                await self._request(wait_seconds)
            await self._wait()
        return self._received()

    async def _request(self, wait_seconds: float) -> None:
        expires_ns = round(max(wait_seconds - _MARGIN_SECONDS, wait_seconds / 2) * 1e9)
        self._outstanding = REQUESTED_MESSAGES
        self._ends_at = asyncio.get_running_loop().time() + wait_seconds
        request = json.dumps({"batch": REQUESTED_MESSAGES, "expires": expires_ns}).encode()
        await self._connection.publish(self._subject, request, self._inbox)

    async def _wait(self) -> None:
        self._filled.clear()
        if self._arrived:
            return
        try:
            async with asyncio.timeout_at(self._ends_at):
                await self._filled.wait()
        except TimeoutError:
            self._outstanding = 0

    async def _receive(self, message: Msg) -> None:
        # Any client can publish to the inbox. What does not fit is missed by its number if it was a delivery.
        if len(self._arrived) < 2 * REQUESTED_MESSAGES:
            self._arrived.append(message)
        self._filled.set()

    def _received(self) -> list[Msg]:
        """Takes the received messages, up to an error status, which is raised once it is the first."""
        messages: list[Msg] = []
        while self._arrived:
            message = self._arrived.popleft()
            status = message.headers.get(Header.STATUS) if message.headers else None
            if status is None:
                messages.append(message)
                self._outstanding -= 1
                continue
            self._outstanding = 0
            if status in _REQUEST_ENDED:
                continue
            if messages:
                self._arrived.appendleft(message)
                break
            APIError.from_msg(message)  # raises
        return messages
