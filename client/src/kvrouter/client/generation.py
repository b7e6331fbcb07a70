"""A running request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Self

from kvrouter.client.results import Output, Routing, output_of
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse


class Generation(AsyncIterator[Output]):
    """The output of a request, piece by piece. Closing it before its end cancels the request.

    It is an async iterator, and a context manager.
    """

    def __init__(self, responses: AsyncGenerator[FrontendServiceGenerateResponse, None], first: Output) -> None:
        """``first`` is the piece before those of ``responses``."""
        self._responses = responses
        self._first: Output | None = first
        self._routing = first.routing

    @property
    def routing(self) -> Routing:
        """How the request was routed; after a retry, how its last attempt was."""
        assert self._routing is not None  # noqa: S101 - the contract: each first piece has it
        return self._routing

    async def __anext__(self) -> Output:
        """Returns the next piece.

        Raises:
            KvRouterError: the request failed.
        """
        output, self._first = self._first, None
        if output is None:
            output = output_of(await anext(self._responses))
        self._routing = output.routing or self._routing
        return output

    async def tokens(self) -> list[int]:
        """Returns all token ids left.

        Raises:
            KvRouterError: the request failed.
        """
        return [token async for output in self for token in output.token_ids]

    async def aclose(self) -> None:
        """Ends the request, if it has not ended."""
        self._first = None
        await self._responses.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
