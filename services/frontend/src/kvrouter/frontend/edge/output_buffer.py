"""Buffers the output of one request for a gRPC client."""

from __future__ import annotations

from kvrouter.frontend.edge.event_stream import too_much_unread
from kvrouter.frontend.workers.output import Output
from kvrouter.net.calls.response_buffer import BufferFull, ResponseBuffer
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse, RoutingInfo


class OutputBuffer(ResponseBuffer):
    """An OutputReceiver whose output is taken as encoded FrontendServiceGenerateResponse messages."""

    def __init__(self) -> None:
        super().__init__()
        self._routing = b""

    def routed(self, routing: RoutingInfo) -> None:
        """Adds the routing to the next piece."""
        self._routing = FrontendServiceGenerateResponse(routing=routing).SerializeToString()

    def output(self, output: Output) -> None:
        """Buffers a piece. Clients see no transfer parameters: they are for decode workers.

        Raises:
            TooLarge: the client has left too much output unread. All of it is dropped.
        """
        encoded = output.raw if output.transfer_params is None else output.without("transfer_params").raw
        if self._routing:
            encoded, self._routing = encoded + self._routing, b""
        try:
            self.append(encoded)
        except BufferFull as full:
            raise too_much_unread(full.unread_bytes) from None
