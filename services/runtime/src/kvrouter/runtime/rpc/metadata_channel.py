"""A gRPC channel whose calls carry further metadata, such as a credential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio


class MetadataChannel(grpc.aio.Channel):
    """Adds an entry to the metadata of every call of another channel, which it closes with itself."""

    def __init__(self, channel: grpc.aio.Channel, entry: Callable[[], tuple[str, str]]) -> None:
        """``entry`` returns the entry for a call; one without a value is left out."""
        self._channel = channel
        self._entry = entry

    async def __aenter__(self) -> MetadataChannel:
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
        return self._extended(self._channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._extended(self._channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._extended(self._channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Implements grpc.aio.Channel."""
        return self._extended(self._channel.stream_stream(*arguments, **named))

    def _extended(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Any = None, **named: Any) -> Any:
            entry = self._entry()
            return method(*arguments, metadata=(*(metadata or ()), *([entry] if entry[1] else ())), **named)

        return call
