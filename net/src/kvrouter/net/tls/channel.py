"""A gRPC channel whose new calls use the newest certificates."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc.aio
from kvrouter.net.tls.tls import Tls

_LONGEST_CALL_SECONDS = 365.0 * 86_400
"""Time for the calls of a replaced channel to end; call streams last until a process stops."""

_Options = Sequence[tuple[str, Any]]


def open_channel(target: str, options: _Options, tls: Tls | None = None, role: str = "") -> grpc.aio.Channel:
    """Returns a channel to ``host:port``, which connects at its first use.

    Args:
        target: The address.
        options: gRPC options of the channel.
        tls: Encrypts the channel and checks the server's certificate; None for plain text.
        role: Role of the server (frontend, scheduler, indexer or worker), for the name in its certificate.
    """
    if tls is None:
        return grpc.aio.insecure_channel(target, options=tuple(options))
    return _FollowingChannel(target, tuple(options), tls, role)


class OuterChannel(grpc.aio.Channel):
    """A channel that passes the calls of its methods on to another one, which may change between two calls."""

    @abstractmethod
    def inner(self) -> grpc.aio.Channel:
        """Returns the other channel."""

    @abstractmethod
    def method(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Returns a method of this channel, given the function that makes it for the other one."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Implements grpc.aio.Channel."""
        return self.inner().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Implements grpc.aio.Channel."""
        await self.inner().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Implements grpc.aio.Channel."""
        await self.inner().channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self.method(lambda channel: channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self.method(lambda channel: channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self.method(lambda channel: channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self.method(lambda channel: channel.stream_stream(*arguments, **named))


class _FollowingChannel(OuterChannel):
    """Opens a new channel when the certificates change; running calls on the previous one continue there.

    gRPC's channels read their certificates once, so after a rotation a reconnection would show an expired one.
    A replaced channel closes when the last of its calls ends.
    """

    def __init__(self, target: str, options: _Options, tls: Tls, role: str) -> None:
        name = tls.peer_name(role)
        self._target = target
        self._options = (*options, ("grpc.ssl_target_name_override", name)) if name else options
        self._tls = tls
        self._generation = 0
        self._channel: grpc.aio.Channel | None = None
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def current(self) -> tuple[grpc.aio.Channel, int]:
        """Returns the channel for new calls, and the number of its certificates."""
        used = self._tls.files.current()
        if self._channel is None or used.generation != self._generation:
            if self._channel is not None:
                self._close_when_idle(self._channel)
            credentials = grpc.ssl_channel_credentials(used.authorities, used.key, used.chain)
            self._channel = grpc.aio.secure_channel(self._target, credentials, options=self._options)
            self._generation = used.generation
        return self._channel, self._generation

    def _close_when_idle(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(channel.close(_LONGEST_CALL_SECONDS), name="tls-replaced-channel")
        self._replaced[closing] = channel
        closing.add_done_callback(lambda ended: self._replaced.pop(ended, None))

    def inner(self) -> grpc.aio.Channel:
        """Returns the channel for new calls."""
        return self.current()[0]

    def method(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Returns a method whose calls go to the newest channel."""
        return _Method(self, make)

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel for new calls, and cancels running ones after ``grace`` seconds."""
        replaced = dict(self._replaced)
        for closing in replaced:
            closing.cancel()
        for channel in (*replaced.values(), *([self._channel] if self._channel is not None else [])):
            await channel.close(grace)
        if replaced:
            await asyncio.wait(replaced)


class _Method:
    """A method of the channel; each call goes to the newest one."""

    def __init__(self, channel: _FollowingChannel, make: Callable[[grpc.aio.Channel], Any]) -> None:
        self._channel = channel
        self._make = make
        self._generation = 0
        self._method: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        channel, generation = self._channel.current()
        if generation != self._generation:
            self._method, self._generation = self._make(channel), generation
        return self._method(*arguments, **named)
