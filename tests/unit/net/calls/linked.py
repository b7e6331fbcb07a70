"""The two sides of a call stream, linked in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvrouter.net.calls.client_stream import ClientStream
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.running_call import RunningCall
from kvrouter.net.calls.server_call import Method, ServerCall
from kvrouter.net.calls.server_stream import ServerStream
from kvrouter.v1.calls_pb2 import (
    CallStreamClientHello,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.errors import KvRouterError

ECHO = "test.Service/Echo"
TOKENS = "test.Service/Tokens"
LATER = "test.Service/Later"
HELLO = OpenCallStreamRequest(client_hello=CallStreamClientHello(version=1, client_name="tester"))
SERVER_HELLO = OpenCallStreamResponse(
    server_hello=CallStreamServerHello(
        version=1, methods=[ECHO], max_message_bytes=1 << 20, max_calls=1000, max_request_bytes=1 << 20
    )
).SerializeToString()


class Received:
    """Records what a receiver is told."""

    def __init__(self) -> None:
        self.responses: list[bytes] = []
        self.ended = 0
        self.errors: list[KvRouterError] = []

    @property
    def outcomes(self) -> int:
        return self.ended + len(self.errors)

    def on_response(self, encoded: bytes) -> None:
        assert not self.outcomes
        self.responses.append(encoded)

    def on_end(self) -> None:
        self.ended += 1

    def on_error(self, error: KvRouterError) -> None:
        self.errors.append(error)


class Linked:
    """A client and a server whose messages are carried by hand."""

    def __init__(
        self,
        limits: CallLimits | None = None,
        *,
        unary: Callable[[bytes], bytes] = lambda raw: raw,
        capabilities: Sequence[str] = (),
    ) -> None:
        limits = CallLimits() if limits is None else limits
        self.streaming: list[tuple[bytes, ServerCall]] = []
        self.later: list[ServerCall] = []
        self.executed: list[bytes] = []
        self.aborted: list[bytes] = []
        """Requests of streaming calls whose handlers were told that they are over."""
        self.to_server: list[bytes] = []
        self.to_client: list[bytes] = []

        def echo(raw: bytes, _call: ServerCall) -> bytes:
            self.executed.append(raw)
            return unary(raw)

        def tokens(raw: bytes, call: ServerCall) -> None:
            self.executed.append(raw)
            self.streaming.append((raw, call))
            call.on_cancelled = lambda: self.aborted.append(raw)

        def later(raw: bytes, _call: ServerCall) -> Awaitable[bytes]:
            self.executed.append(raw)
            return asyncio.sleep(0, raw)

        methods = [
            Method(ECHO, unary=echo),
            Method(TOKENS, streaming=tokens),
            Method(LATER, unary=later),
        ]
        opening = CallStreamClientHello(version=1, client_name="tester", capabilities=capabilities)
        request = OpenCallStreamRequest(client_hello=opening)
        self.server = ServerStream(request, methods, limits, CallStreamCounts(), lambda: None, self._run)
        first = self.server.next_message()
        assert first is not None
        hello = OpenCallStreamResponse.FromString(first).server_hello
        self.client = ClientStream(hello, limits, CallStreamCounts(), lambda: None)

    def start(self, method: str, request: bytes = b"", *, urgent: bool = False) -> tuple[RunningCall, Received]:
        received = Received()
        return self.client.start(method, request, received, urgent=urgent), received

    def send(self) -> None:
        """Carries all messages of the client."""
        while (message := self.client.next_message()) is not None:
            self.to_server.append(message)
            self.server.receive(message)

    def answer(self) -> None:
        """Carries all messages of the server."""
        while (message := self.server.next_message()) is not None:
            self.to_client.append(message)
            self.client.receive([message])

    def carry(self) -> None:
        self.send()
        self.answer()

    def _run(self, call: ServerCall, answer: Awaitable[bytes]) -> None:
        answer.close()  # type: ignore[attr-defined]
        self.later.append(call)
