"""Calls of a Frontend's methods, over gRPC to any of several addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, cast

import grpc.aio
from google.protobuf.message import Message
from kvrouter.client.errors import NotConnected, error_of_rpc
from kvrouter.v1.errors import DeadlineExceeded, Draining, KvRouterError
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
    # Detects within 30 s a Frontend that vanished without closing its connection, also while no call runs.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnects to a restarted Frontend within 2 s; gRPC's default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_MOVABLE = (NotConnected, Draining)
"""Errors after which the same call may succeed at another Frontend, or at the same one a little later."""


class Calls(Protocol):
    """The methods of a Frontend, by their names in the contract."""

    async def unary(self, method: str, request: Message, seconds: float | None) -> Any:
        """Returns the response of a call within a time limit, seconds; None for any time.

        Raises:
            KvRouterError: the call failed.
        """

    def stream(self, method: str, request: Message, seconds: float | None) -> AsyncGenerator[Any, None]:
        """Yields the responses of a call, which ends when the generator is closed.

        Raises:
            KvRouterError: the call failed.
        """


class RemoteCalls:
    """Calls one Frontend, and moves to the next address when it cannot be reached or is stopping."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        reconnect_seconds: float,
        api_key: str | Callable[[], str],
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        """Connects nothing yet.

        Args:
            addresses: gRPC addresses of Frontends, host:port.
            reconnect_seconds: Time for which a call without a response is repeated while no Frontend can be reached.
            api_key: API key or token of the caller, or a function for the current one; empty for none.
            credentials: TLS credentials of the channels; None for connections without TLS.
        """
        self._api_key = api_key
        self._credentials = credentials
        self._addresses = addresses
        self._reconnect_seconds = reconnect_seconds
        self._stack = AsyncExitStack()
        self._stubs: list[FrontendServiceStub] = []
        self._running: set[Any] = set()
        self._current = 0

    async def open(self) -> None:
        """Makes the channels. They connect at their first use."""
        for address in self._addresses:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(address, self._credentials, options=_CHANNEL_OPTIONS)
            await self._stack.enter_async_context(channel)
            self._stubs.append(cast(Any, FrontendServiceStub)(channel))

    async def close(self) -> None:
        """Ends all calls and closes the channels."""
        for rpc in list(self._running):
            rpc.cancel()
        await self._stack.aclose()

    async def unary(self, method: str, request: Message, seconds: float | None) -> Any:
        """Returns the response of a call.

        Raises:
            KvRouterError: the call failed.
        """
        ends_at = None if seconds is None else time.monotonic() + seconds
        async for attempt in self._attempts():
            with attempt:
                number = self._current
                rpc = self._start(number, method, request, ends_at)
                try:
                    return await rpc
                except grpc.aio.AioRpcError as error:
                    raise self._moved(number, error_of_rpc(error)) from None
                except asyncio.CancelledError as cancelled:
                    raise _own(cancelled) from None
                finally:
                    self._running.discard(rpc)
        raise AssertionError("the last attempt raises")

    async def stream(self, method: str, request: Message, seconds: float | None) -> AsyncGenerator[Any, None]:
        """Yields the responses of a call. Only one without any response is repeated.

        Raises:
            KvRouterError: the call failed.
        """
        ends_at = None if seconds is None else time.monotonic() + seconds
        rpc: Any = None
        try:
            async for attempt in self._attempts():
                with attempt:
                    number = self._current
                    rpc = self._start(number, method, request, ends_at)
                    try:
                        response = await self._read(rpc)
                    except _MOVABLE as error:
                        self._running.discard(rpc)
                        raise self._moved(number, error) from None
            while response is not grpc.aio.EOF:
                yield response
                response = await self._read(rpc)
        finally:
            if rpc is not None:
                self._running.discard(rpc)
                rpc.cancel()

    def _start(self, number: int, method: str, request: Message, ends_at: float | None) -> Any:
        key = self._api_key() if callable(self._api_key) else self._api_key
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        rpc = getattr(self._stubs[number], method)(request, timeout=_remaining(ends_at), metadata=metadata)
        self._running.add(rpc)
        return rpc

    async def _read(self, rpc: Any) -> Any:
        try:
            return await rpc.read()
        except grpc.aio.AioRpcError as error:
            raise error_of_rpc(error) from None
        except asyncio.CancelledError as cancelled:
            raise _own(cancelled) from None

    def _attempts(self) -> AsyncIterator[Any]:
        return aiter(
            AsyncRetrying(
                retry=retry_if_exception_type(_MOVABLE),
                wait=wait_random_exponential(multiplier=0.05, max=1),
                stop=stop_after_delay(self._reconnect_seconds),
                reraise=True,
            )
        )

    def _moved(self, number: int, error: KvRouterError) -> KvRouterError:
        """Returns the error of a call. If the Frontend was at fault, further calls go to the next address."""
        if isinstance(error, _MOVABLE) and number == self._current:
            self._current = (number + 1) % len(self._stubs)
        return error


def _remaining(ends_at: float | None) -> float | None:
    if ends_at is None:
        return None
    remaining = ends_at - time.monotonic()
    # gRPC treats a timeout of 0 as none.
    if remaining <= 0:
        raise DeadlineExceeded(advice="Set a longer timeout.")
    return remaining


def _own(cancelled: asyncio.CancelledError) -> BaseException:
    """Returns the exception for a CancelledError of gRPC, which also raises one if the client is closed."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return cancelled
    return NotConnected("the client was closed during the call")
