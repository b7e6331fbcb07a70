"""A gRPC channel whose calls carry an API key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio


class KeyedChannel(grpc.aio.Channel):
    """Adds the key to the metadata of every call of another channel, which it closes with itself."""

    def __init__(self, channel: grpc.aio.Channel, api_key: str) -> None:
        self._channel = channel
        self._key = ("authorization", f"Bearer {api_key}")

    async def __aenter__(self) -> KeyedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Implements grpc.aio.Channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Implements grpc.aio.Channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Implements grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Implements grpc.aio.Channel."""
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._keyed(self._channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._keyed(self._channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._keyed(self._channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._keyed(self._channel.stream_stream(*arguments, **named))

    def _keyed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Any = None, **named: Any) -> Any:
            return method(*arguments, metadata=(*(metadata or ()), self._key), **named)

        return call
