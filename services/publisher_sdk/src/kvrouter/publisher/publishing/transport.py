"""Sends encoded batches over JetStream or Core NATS."""

from __future__ import annotations

from typing import Protocol

import nats.errors
from kvrouter.net.nats.access import NatsAccess
from kvrouter.net.nats.client import TolerantClient
from kvrouter.net.nats.connection import NatsObserver, connect_nats
from kvrouter.net.nats.event_stream import ensure_stream, write_error
from kvrouter.v1.common_pb2 import Transport as TransportKind
from kvrouter.v1.names import ComponentName
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

_ACK_SECONDS = 2.0
_HEADERS_BYTES = 1024
_DEFAULT_PAYLOAD = 1 << 20
"""Bytes of a message that a server accepts unless it is configured otherwise."""
_REFUSED_API = 'permissions violation for publish to "$js.api.stream.'
_NATS_ERRORS = (nats.errors.Error, TimeoutError, OSError)
"""TimeoutError is asyncio's, too; APIError and the like are nats.errors.Error."""


class TransportAway(Exception):
    """The message may not have arrived. Send it again later."""


class MessageRefused(Exception):
    """The server will never accept the message. Do not send it again."""


class Transport(Protocol):
    """Sends one encoded batch at a time."""

    async def send(self, subject: str, payload: bytes, message_id: str | None) -> None:
        """Returns once the transport has accepted the batch.

        Raises:
            TransportAway: send it again with the same ``message_id``.
            MessageRefused: do not send it again.
        """


class Link(Protocol):
    """A worker's way to the readers of its events and of its load."""

    async def run(self) -> None:
        """Keeps it open until cancelled."""

    @property
    def connected(self) -> bool:
        """Whether it is open, as far as is known."""

    @property
    def room(self) -> int:
        """How many bytes of events fit into one message."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Passes a message to whoever listens.

        Raises:
            TransportAway: it reached nobody.
        """

    def transport(self, kind: TransportKind, component: ComponentName) -> Transport:
        """Returns what sends the events of a component's worker: a registration names the kind."""


class NatsLink(NatsObserver):
    """A NATS connection that is made when NATS can be reached, and made again when it is lost."""

    def __init__(self, target: str | NatsAccess, name: str) -> None:
        """Connects to nothing; ``target`` is a URL, or one with identity and certificates."""
        self._access = NatsAccess.of(target)
        self._name = name
        self._client: TolerantClient | None = None
        self.may_create_streams = True
        """Whether the server has not refused requests about streams to this worker's account."""

    async def run(self) -> None:
        """Keeps the connection until cancelled. One that the library gives up is replaced.

        Raises:
            nats.errors.Error: the URL is malformed.
        """
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(TransportAway), wait=wait_random_exponential(multiplier=0.2, max=5)
        ):
            with attempt:
                async with connect_nats(self._access, self._name, self) as self._client:
                    await self._client.wait_closed()
                raise TransportAway("the connection was closed")

    @property
    def connected(self) -> bool:
        """Whether the connection is up, as far as is known."""
        return self._client is not None and self._client.is_connected

    @property
    def client(self) -> Client:
        """The connection.

        Raises:
            TransportAway: there is none at the moment.
        """
        if self._client is None or not self._client.is_connected:
            raise TransportAway("NATS is away")
        return self._client

    async def publish(self, subject: str, payload: bytes) -> None:
        """Implements Link.

        Raises:
            TransportAway: NATS is away.
        """
        try:
            await self.client.publish(subject, payload)
        except _NATS_ERRORS as error:
            raise TransportAway(repr(error)) from error

    def transport(self, kind: TransportKind, component: ComponentName) -> Transport:
        """Implements Link."""
        if kind == TransportKind.TRANSPORT_CORE_NATS:
            return CoreNatsTransport(self)
        return DurableTransport(self, component)

    @property
    def room(self) -> int:
        """Implements Link."""
        max_payload = _DEFAULT_PAYLOAD if self._client is None else self._client.max_payload
        return max(max_payload - _HEADERS_BYTES, 1)

    def on_connected(self) -> None:
        """Implements NatsObserver."""
        self.may_create_streams = True

    def on_error(self, error: Exception) -> bool:
        """Implements NatsObserver."""
        if _REFUSED_API not in str(error).lower():
            return False
        self.may_create_streams = False
        return True


class DurableTransport:
    """JetStream: a batch is accepted once the stream has stored it. Creates the stream if it is missing."""

    def __init__(self, link: NatsLink, component: ComponentName) -> None:
        self._link = link
        self._component = component

    async def send(self, subject: str, payload: bytes, message_id: str | None) -> None:
        """Implements Transport. The stream drops a repeated ``message_id``."""
        js = self._link.client.jetstream(timeout=_ACK_SECONDS)
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        try:
            await js.publish(subject, payload, stream=self._component.stream, headers=headers)
        except NoStreamResponseError as error:
            raise TransportAway(await self._missing(js) or f"no stream stored {subject}; it was created now") from error
        except nats.errors.MaxPayloadError as error:
            raise MessageRefused(repr(error)) from error
        except APIError as error:
            if error.code == 400:
                raise MessageRefused(repr(error)) from error
            raise TransportAway(repr(error)) from error
        # Anybody can publish to the inbox of acknowledgements; an invalid one says nothing about the batch.
        except (*_NATS_ERRORS, ValueError) as error:
            raise TransportAway(await self._unanswered(js) or repr(error)) from error

    async def _unanswered(self, js: JetStreamContext) -> str:
        """Returns why the stream does not answer; empty if that cannot be determined. Creates it if it is missing.

        The server says that there is no stream only if nobody else subscribes to the subject.
        """
        if not self._link.connected:
            return ""
        if missing := await self._missing(js):
            return missing
        try:
            refused = await write_error(js, self._component.stream)
        except _NATS_ERRORS:
            return ""
        return f"stream {self._component.stream} takes no messages: {refused}" if refused else ""

    async def _missing(self, js: JetStreamContext) -> str:
        """Creates the stream if it is missing. Returns why it cannot; empty if the stream exists now."""
        stream = self._component.stream
        if self._link.may_create_streams:
            try:
                await ensure_stream(js, self._component)
            except _NATS_ERRORS as error:
                if self._link.may_create_streams:
                    return f"stream {stream} does not answer, and cannot be created: {error!r}"
            else:
                return ""
        return (
            f"stream {stream} does not answer, and this worker's account may not create it: an Indexer of component "
            f"{self._component} creates it as soon as it knows the component"
        )


class CoreNatsTransport:
    """Core NATS: a batch is accepted once it was passed to a connected server. It may reach no consumer."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link

    async def send(self, subject: str, payload: bytes, message_id: str | None) -> None:  # noqa: ARG002
        """Implements Transport."""
        try:
            await self._link.client.publish(subject, payload)
        except nats.errors.MaxPayloadError as error:
            raise MessageRefused(repr(error)) from error
        except _NATS_ERRORS as error:
            raise TransportAway(repr(error)) from error
