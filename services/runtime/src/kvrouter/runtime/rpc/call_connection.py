"""A channel with a call stream on it."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from kvrouter.net.calls import CallStreamClient, CallStreamCounts
from kvrouter.net.tls import Tls
from kvrouter.runtime.rpc.call_stub import remote_on_call_stream
from kvrouter.runtime.rpc.client import open_channel


class CallConnection:
    """The call stream to the server at one address. ``run`` must be running."""

    def __init__(
        self,
        endpoint: str,
        *,
        client_name: str,
        counts: CallStreamCounts | None = None,
        ends_when_silent: bool = True,
        tls: Tls | None = None,
        role: str = "",
    ) -> None:
        """Connects nothing yet.

        Args:
            endpoint: Address of the server, host:port.
            client_name: Name of this client, for the server's logs.
            counts: Counts for metrics.
            ends_when_silent: Whether a server that answers no heartbeat loses its calls. If not, they wait for it.
            tls: Encrypts the connection; None for plain text.
            role: What the server is, for the name in its certificate.
        """
        self._channel = open_channel(endpoint, tls=tls, role=role)
        self.client = CallStreamClient(
            self._channel,
            client_name=client_name,
            server_name=endpoint,
            counts=counts,
            ends_when_silent=ends_when_silent,
        )

    def stub(self, descriptor: ServiceDescriptor) -> Any:
        """Returns a stub of a service; see ``remote_on_call_stream``."""
        return remote_on_call_stream(descriptor, self.client)

    async def run(self) -> None:
        """Keeps the stream open until cancelled, then closes the channel."""
        try:
            await self.client.run()
        finally:
            await self._channel.close()
