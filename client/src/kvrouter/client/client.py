"""The asyncio client of a Frontend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from kvrouter.client.calls import Calls, RemoteCalls
from kvrouter.client.routing_calls import RoutingCalls
from kvrouter.v1.errors import BadRequest

DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_RECONNECT_SECONDS = 10.0


class Client(RoutingCalls):
    """Calls Frontends over gRPC, in the event loop in which its context is entered."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        model: str = "",
        api_key: str | Callable[[], str] = "",
        credentials: grpc.ChannelCredentials | None = None,
        name: str = "python",
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        reconnect_seconds: float = DEFAULT_RECONNECT_SECONDS,
    ) -> None:
        """Connects nothing yet.

        Args:
            addresses: gRPC address of a Frontend, host:port, or several. One is used until it cannot be reached or
                stops.
            model: Model of calls without one.
            api_key: API key or token of the caller, or a function for the current one; empty for none.
            credentials: TLS credentials, such as ``grpc.ssl_channel_credentials`` returns; None for no TLS.
            name: Name of this client in the logs of services; at most 64 bytes.
            timeout: Deadline of calls without one, seconds; None for the Frontend's.
            reconnect_seconds: Time for which a call without a response is repeated while no Frontend can be reached.

        Raises:
            BadRequest: there is no address.
        """
        super().__init__(model=model, name=name, timeout=timeout)
        listed = [addresses] if isinstance(addresses, str) else list(addresses)
        if not listed or not all(listed):
            raise BadRequest(
                "expected the address of a Frontend, received none", field="addresses", advice="Pass host:port."
            )
        self._remote = RemoteCalls(
            listed, reconnect_seconds=reconnect_seconds, api_key=api_key, credentials=credentials
        )

    async def _open(self) -> None:
        await self._remote.open()

    async def _close(self) -> None:
        await self._remote.close()

    @property
    def _calls(self) -> Calls:
        return self._remote
