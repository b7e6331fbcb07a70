"""Clients that keep streams beginning and ending, and record what each of them saw.

Streams begin at an even rate, whatever becomes of those before (an open loop), so that a frozen process meets streams
that begin, run and end. What a stream must deliver is known beforehand: the engine model draws each token from the
seed and its position in the sequence, so that a token that is lost, repeated or out of order shows.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import grpc
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import EngineRequest, pack_tokens
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import FinishReason, SamplingOptions, StopConditions

from .fleet import FRONTENDS, PATIENCE_SECONDS, WORKERS, Fleet

_STREAMS_PER_SECOND = 15.0
_DEADLINE_SECONDS = 120.0
_SEEDS = 8
_OUTPUT_TOKENS = (4, 16, 48, 120)
"""Lengths of streams: from less than 0.1 to 2 s on an engine that is alone."""
_POLL_SECONDS = 0.02


@dataclass
class Stream:
    """What a client saw of one request."""

    frontend: str
    began: float
    """Seconds of the monotonic clock."""
    wants: int
    """Tokens that it asked for."""
    seed: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    """Where it ran, one entry for each attempt that gave output."""
    load_only: int = 0
    """How many of these attempts were decided without overlaps, because no Indexer answered in time."""
    finish: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED
    error: KvRouterError | None = None
    ended: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended as a stream should."""
        return (
            self.error is None and self.finish == FinishReason.FINISH_REASON_LENGTH and len(self.tokens) == self.wants
        )

    @property
    def unavailable(self) -> bool:
        return self.error is not None and self.error.code == grpc.StatusCode.UNAVAILABLE

    def __str__(self) -> str:
        outcome = f"{self.error.code.name}: {self.error}" if self.error else FinishReason.Name(self.finish)
        return f"{self.frontend}, workers {self.workers}, {len(self.tokens)} of {self.wants} tokens, {outcome}"


@dataclass
class Traffic:
    """The clients. ``streams`` has every stream that began."""

    fleet: Fleet
    rng: random.Random
    streams: list[Stream] = field(default_factory=list)
    _stopping: bool = False

    @property
    def ended(self) -> int:
        """Streams that have ended, one way or another."""
        return sum(stream.ended is not None for stream in self.streams)

    async def until_ended(self, more: int) -> None:
        """Returns when so many more streams have ended."""
        wanted = self.ended + more
        await _until(lambda: self.ended >= wanted, lambda: f"{wanted - self.ended} more streams did not end")

    async def until_ended_since(self, first: int, *, except_through: str) -> None:
        """Returns when those that have begun, from ``first`` on, have ended; without those through one Frontend."""
        waiting = [stream for stream in self.streams[first:] if stream.frontend != except_through]

        def unfinished() -> list[str]:
            return [str(stream) for stream in waiting if stream.ended is None]

        await _until(lambda: not unfinished(), lambda: f"these do not end: {unfinished()}")

    async def until_all_serve(self) -> None:
        """Returns when streams that began from now on have ended well at every Frontend and at every worker."""
        first, expected = len(self.streams), (set(FRONTENDS), set(WORKERS.values()))

        def served() -> tuple[set[str], set[int]]:
            good = [stream for stream in self.streams[first:] if stream.ok]
            return {stream.frontend for stream in good}, {stream.workers[-1] for stream in good}

        await _until(lambda: served() == expected, lambda: f"only these serve: {served()}")

    async def finish(self) -> list[Stream]:
        """Begins no more streams; returns all when they have ended."""
        self._stopping = True
        await _until(
            lambda: self.ended == len(self.streams),
            lambda: f"{len(self.streams) - self.ended} streams do not end",
        )
        return self.streams

    async def run(self) -> None:
        """Begins streams until it is stopped; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                if self._stopping:
                    return
                names = self.fleet.serving_frontends()
                group.create_task(self._stream(names[number % len(names)]))
                await asyncio.sleep(1 / _STREAMS_PER_SECOND)

    async def _stream(self, frontend: str) -> None:
        wants, seed, prompt = self.rng.choice(_OUTPUT_TOKENS), self.rng.randrange(_SEEDS), self._prompt()
        stream = Stream(frontend, time.monotonic(), wants, seed, len(prompt))
        self.streams.append(stream)
        request = FrontendServiceGenerateRequest(
            model="mock-model",
            token_ids=TokenIds(ids=prompt),
            stop_conditions=StopConditions(max_tokens=stream.wants),
            sampling_options=SamplingOptions(seed=stream.seed),
        )
        call = self.fleet.frontend(frontend).generate(request, deadline=Deadline.after(_DEADLINE_SECONDS))
        try:
            async with aclosing(call) as pieces:
                async for piece in pieces:
                    if piece.HasField("routing"):
                        stream.workers.append(piece.routing.rank.worker_id)
                        stream.load_only += piece.routing.load_only
                    stream.tokens += piece.output.token_ids
                    stream.finish = piece.output.finish_reason or stream.finish
        except KvRouterError as error:
            stream.error = error
        stream.ended = time.monotonic()

    def _prompt(self) -> list[int]:
        """Tokens that begin as others' do, and go on as none does."""
        shared = random.Random(self.rng.randrange(12))
        return [shared.randrange(1 << 20) for _ in range(48)] + [
            self.rng.randrange(1 << 20) for _ in range(self.rng.randrange(40))
        ]


async def _until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(otherwise()) from None


@asynccontextmanager
async def traffic(fleet: Fleet, seed: int) -> AsyncIterator[Traffic]:
    """Clients that send for as long as the context lasts."""
    clients = Traffic(fleet, random.Random(seed))
    running = asyncio.create_task(clients.run())
    try:
        yield clients
    finally:
        running.cancel()
        await asyncio.wait({running})
    if not running.cancelled():
        running.result()


@cache
def expected_tokens(seed: int, prompt_tokens: int) -> list[int]:
    """The tokens that an engine draws for a prompt of that length, as many as the longest stream has."""
    engine = Engine(EngineConfig())
    engine.submit(EngineRequest("r", pack_tokens([1] * prompt_tokens), max(_OUTPUT_TOKENS), seed=seed), 0.0)
    tokens: list[int] = []
    while engine.begin_step(0.0) is not None:
        for output in engine.end_step(0.0):
            tokens += output.token_ids
    return tokens
