"""Decides about each call of a gRPC server before a byte of its request is read.

A client without a credential cannot make a server receive 64 MiB, or wait for the rest of them for ever: the peer is
checked, then the request is read within a time limit, then the handler runs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from kvrouter.net.budgets import TokenBucket
from kvrouter.net.calls import SERVICE as CALL_STREAMS, PeerCheck
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.http2.options import MAX_CALLS
from kvrouter.net.rpc.peer_conduct import EvictableCalls, PeerConduct
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import BadRequest, KvRouterError, TooLarge
from kvrouter.v1.errors_pb2 import ErrorReason

_FOR_EVERYBODY = ("grpc.health.", "grpc.reflection.")
"""Beginnings of the names of services without a credential."""
_LASTING = "grpc.health.v1.Health/Watch"
"""The method for everybody whose calls last."""
_REQUEST_SECONDS = 60.0
"""Time for the request of an admitted call to arrive, seconds: 64 MiB over a slow network."""
_OPEN_SECONDS = 10.0
"""Time for the request of a call for everybody to arrive, and for all of the call unless it lasts, seconds."""

_MAX_CALLS_FOR_EVERYBODY = 256
"""Maximum number of running calls for everybody; a further one ends the oldest."""
_MAX_OPEN_BYTES = 64 << 10
"""Maximum size of a message of a call for everybody."""

_REFUSALS_PER_SECOND = 100
"""Calls in a second refused for their callers' limits; each takes about 1 ms."""
_MAX_REFUSAL_SECONDS = 5.0
"""Maximum time a refusal waits for its turn."""
_MAX_WAITING_REFUSALS = 1_024
"""Maximum number of waiting refusals; a further one ends the wait of the oldest."""

_Serve = Callable[[ReceivedCall], Awaitable[None]]
"""Serves a call."""


class CallGate:
    """Admits the calls of a server. Calls for everybody have a bound of their own, and take no room from others."""

    def __init__(self, check: PeerCheck | None = None, *, admits: bool = True) -> None:
        """``check`` decides which methods a peer may call; None permits all.

        Without ``admits`` the handlers tell ``conduct`` which calls have a valid credential.
        """
        self._admits = admits
        self.calls = 0
        """Number of running admitted calls."""
        self.max_calls = MAX_CALLS
        """Most of them."""
        self.for_everybody = EvictableCalls(_MAX_CALLS_FOR_EVERYBODY)
        """Running calls for everybody."""
        self.conduct = PeerConduct()
        """Closes flooding connections."""
        self.refusals = EvictableCalls(_MAX_WAITING_REFUSALS)
        """Calls beyond their callers' limits, which wait for their refusal."""
        self._check = check
        self._refusal_turns = TokenBucket(
            _REFUSALS_PER_SECOND, _REFUSALS_PER_SECOND, _REFUSALS_PER_SECOND * _MAX_REFUSAL_SECONDS
        )

    def gated(self, handler: Any, method: str) -> _Serve:
        """Returns the function that serves the calls of a method by its handler, as far as they are admitted."""
        is_open = method.startswith(_FOR_EVERYBODY)
        run = _behaviour(handler, _OPEN_SECONDS if is_open else _REQUEST_SECONDS)
        return self._open(run, method) if is_open else self._admitting(run, method)

    def _admitting(self, run: _Serve, method: str) -> _Serve:
        check = self._check
        # Whether a call stream is admitted is decided when it opens.
        opens_stream = method.startswith(CALL_STREAMS)

        async def admit(context: ReceivedCall) -> None:
            if self.calls >= self.max_calls:
                refused: KvRouterError = TooLarge(f"the server runs its {self.max_calls} calls already")
            else:
                try:
                    if check is not None and (peer := check.peer(context)) is not None:
                        peer.check(method)
                except KvRouterError as error:
                    refused = error
                    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        await self._await_refusal()
                    elif self.conduct.without_credential(context):
                        context.set_code(error.code)  # Few read it, and details cost as much as the rest of the call.
                        return
                else:
                    if self._admits and not opens_stream:
                        self.conduct.admitted(context)
                    self.calls += 1
                    try:
                        await run(context)
                    finally:
                        self.calls -= 1
                    return
            set_error(context, refused)

        return admit

    async def _await_refusal(self) -> None:
        """Waits for the turn of a refusal, since a client refused at once may call again at once."""
        if seconds := self._refusal_turns.take():
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as timeout:
                    with self.refusals.running(timeout):
                        await asyncio.sleep(seconds)

    def _open(self, run: _Serve, method: str) -> _Serve:
        seconds = None if method == _LASTING else _OPEN_SECONDS

        async def serve(context: ReceivedCall) -> None:
            context.limit(_MAX_OPEN_BYTES)
            self.conduct.without_credential(context)
            try:
                async with asyncio.timeout(seconds) as timeout:
                    with self.for_everybody.running(timeout):
                        await run(context)
            except TimeoutError:
                error = KvRouterError(
                    "the call took too long, or others came",
                    code=grpc.StatusCode.RESOURCE_EXHAUSTED,
                    reason=ErrorReason.ERROR_REASON_OVERLOADED,
                    advice="Call again.",
                )
                set_error(context, error)

        return serve

    async def refuse_unknown(self, context: ReceivedCall) -> None:
        """Serves a call of a method without a handler."""
        self.conduct.without_credential(context)
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("the server has no such method")


def _behaviour(handler: Any, seconds: float) -> _Serve:
    """Returns a function for a call: reads the request within a time limit, runs the handler, writes its responses."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    parse = handler.request_deserializer or _unparsed

    async def request(context: ReceivedCall) -> Any:
        if handler.request_streaming:
            return context.requests()
        try:
            async with asyncio.timeout(seconds):
                encoded = await context.read()
        except TimeoutError:
            raise _Unreadable(f"expected a whole request within {seconds:g} s") from None
        if encoded is grpc.aio.EOF:
            raise _Unreadable("expected a request, received none")
        return parse(encoded)

    async def respond(context: ReceivedCall) -> None:
        # The request is kept in no variable here: a handler may drop it long before the call ends.
        if inspect.isasyncgenfunction(behaviour):
            async for response in behaviour(await request(context), context):
                await context.write(response)
            return
        answer = await behaviour(await request(context), context)
        if not handler.response_streaming and answer is not None:
            await context.write(answer)

    async def run(context: ReceivedCall) -> None:
        context.serialize = handler.response_serializer
        context.parse = handler.request_deserializer if handler.request_streaming else None
        try:
            await respond(context)
        except _Unreadable as unreadable:
            cause = str(unreadable)
        except DecodeError:
            cause = "the request cannot be parsed"
        else:
            return
        set_error(context, BadRequest(cause, advice="Send one request, encoded as the .proto files define."))

    return run


class _Unreadable(Exception):
    """The request did not arrive."""


def _unparsed(encoded: bytes) -> bytes:
    return encoded
