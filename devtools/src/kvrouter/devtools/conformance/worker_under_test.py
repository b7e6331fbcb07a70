"""Calls of the worker under test, and known facts about it."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
from kvrouter.core import Scope
from kvrouter.devtools.conformance.options import CheckOptions
from kvrouter.net.http2.options import CHANNEL_OPTIONS
from kvrouter.v1.common_pb2 import BlockRecord, BlockScope, CopyCounting, Cursor
from kvrouter.v1.events_pb2 import KvEventBatch, LoadReport
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import (
    AbortRequest,
    FinishReason,
    GetEventsRequest,
    GetLoadRequest,
    GetLoadResponse,
    GetRankStateRequest,
    StopConditions,
    WorkerServiceGenerateRequest,
)
from kvrouter.v1.worker_pb2_grpc import WorkerServiceStub
from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

CLIENT_ERRORS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE)
"""Codes of refusals by the client's fault, which do not count against the worker."""

_T = TypeVar("_T")
_POLL_SECONDS = 0.05
_CALL_SECONDS = 10.0
"""Least timeout of a call: a short --seconds shortens only the waits for effects."""


@dataclass(slots=True)
class Output:
    """The output of a request."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """The state of a rank, as the worker serves it."""

    cursor: Cursor
    blocks: Sequence[BlockRecord]
    digest: int
    copy_counting: CopyCounting
    is_complete: bool
    """Whether the last chunk is marked as such."""


class WorkerUnderTest:
    """A connection to a worker. ``block_size`` and the like are set by the first checks."""

    def __init__(self, options: CheckOptions) -> None:
        self.options = options
        self.endpoint = options.worker
        """Current address of the worker."""
        self.model = ""
        self.block_size = 0
        self.worker_id = 0
        self.max_model_len = options.max_model_len
        self.serves_call_stream = False
        self.registration: WorkerRegistration | None = None
        """Its registration; None if it is not looked up."""
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._call_seconds = max(options.seconds, _CALL_SECONDS)

    async def connect(self, endpoint: str) -> None:
        """Connects to an address, in place of the current one."""
        await self.close()
        self.endpoint = endpoint
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection."""
        assert self._channel is not None  # noqa: S101 - connect comes first
        return self._channel

    def prompt(self, tokens: int) -> list[int]:
        """Returns a prompt unknown to every cache."""
        return [random.SystemRandom().randint(1, self.options.largest_token) for _ in range(tokens)]

    def request(
        self, token_ids: Sequence[int], *, max_tokens: int = 1, scope: Scope | None = None
    ) -> WorkerServiceGenerateRequest:
        """Returns a request with a new id."""
        return WorkerServiceGenerateRequest(
            request_id=f"check-{secrets.token_hex(8)}",
            token_ids=token_ids,
            stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            dp_rank=self.options.dp_rank,
            scope=BlockScope(lora_name=scope.lora_name, cache_salt=scope.cache_salt) if scope else None,
        )

    @asynccontextmanager
    async def started(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[Any]:
        """Starts a request and yields the call; cancels it at the end."""
        call = self._stub.Generate(request, timeout=self.options.seconds)
        try:
            yield call
        finally:
            call.cancel()

    async def generate(self, request: WorkerServiceGenerateRequest) -> Output:
        """Runs a request to its end.

        Raises:
            grpc.aio.AioRpcError: the worker refused it, or failed.
        """
        async with self.started(request) as call:
            return await read_output(call)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests, and returns how many were running according to the worker."""
        return int((await self._stub.Abort(AbortRequest(request_ids=request_ids), timeout=self._call_seconds)).aborted)

    async def loads(self) -> GetLoadResponse:
        """Returns the load of every rank."""
        response: GetLoadResponse = await self._stub.GetLoad(GetLoadRequest(), timeout=self._call_seconds)
        return response

    async def load(self) -> LoadReport | None:
        """Returns the load of the checked rank; None if the worker reports none."""
        reports = (await self.loads()).reports
        return next((each for each in reports if each.rank.dp_rank == self.options.dp_rank), None)

    async def snapshot(self) -> RankSnapshot:
        """Returns the rank's state."""
        request = GetRankStateRequest(dp_rank=self.options.dp_rank)
        chunks = [chunk async for chunk in self._stub.GetRankState(request, timeout=self._call_seconds)]
        blocks = [block for chunk in chunks for block in chunk.blocks]
        if not chunks:
            return RankSnapshot(Cursor(), blocks, 0, CopyCounting.COPY_COUNTING_UNSPECIFIED, is_complete=False)
        last = chunks[-1]
        return RankSnapshot(last.cursor, blocks, last.digest, last.copy_counting, is_complete=last.last)

    async def events(self, start: Cursor) -> list[KvEventBatch]:
        """Returns the rank's events from a cursor on."""
        request = GetEventsRequest(dp_rank=self.options.dp_rank, start=start)
        return [each.batch async for each in self._stub.GetEvents(request, timeout=self._call_seconds)]

    async def until(self, condition: Callable[[], Awaitable[_T | None]]) -> _T | None:
        """Returns the first result of ``condition`` other than None; None if it takes too long."""
        waiting: AsyncRetrying = AsyncRetrying(
            wait=wait_fixed(_POLL_SECONDS),
            stop=stop_after_delay(self.options.seconds),
            retry=retry_if_result(lambda found: found is None),
            retry_error_callback=lambda _: None,
        )
        found: _T | None = await waiting(condition)
        return found


async def read_output(call: Any) -> Output:
    """Reads a Generate call to its end."""
    output = Output()
    async for response in call:
        add_piece(output, response)
    return output


def add_piece(output: Output, response: Any) -> None:
    """Adds a piece to an output."""
    piece = response.output
    output.token_ids += piece.token_ids
    if "cached_tokens" in piece:
        output.cached_tokens = piece.cached_tokens
    if piece.finish_reason:
        output.finish_reason = piece.finish_reason
