"""Serves requests of a worker by those to its engine's HTTP API."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp
import structlog
from kvrouter.engines.servers.api import EngineApi, EngineCall
from kvrouter.engines.servers.description import EngineDescription
from kvrouter.engines.servers.failures import EngineFailed, refusal_of_status
from kvrouter.engines.servers.http import (
    END,
    EngineAway,
    EngineHttp,
    EventStream,
    EventTooLarge,
    UnexpectedAnswer,
    read_body,
)
from kvrouter.net.budgets import loop_budget
from kvrouter.publisher.errors import RequestRefused
from kvrouter.runtime.tracing import Kind, span
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateRequest

log = structlog.get_logger(component="sidecar")

_EVENT_STREAM = "text/event-stream"
_CHUNK_US = 60
"""CPU time to pass on a chunk with one event, microseconds."""
_BYTES_PER_US = 8


@dataclass(eq=False)
class ServedEngine:
    """The engine of a worker, as the SDK sees it."""

    http: EngineHttp
    """Connection to the engine."""
    api: EngineApi
    description: EngineDescription
    """What the engine is."""
    results: Counter[str]
    """Counts requests that ended, by how: finished, aborted, refused, failed."""
    on_failure: Callable[[], None]
    """Called when the engine fails a request, and may be away."""

    def __post_init__(self) -> None:
        self.loads: Mapping[int, LoadReport] = {}
        """The latest load by rank; empty while it is unknown."""
        self._running: dict[str, asyncio.Timeout] = {}

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        """Runs a request at the engine.

        Raises:
            RequestRefused: the engine refuses it, fails, or answers with something else than outputs.
        """
        result = "aborted"
        try:
            call = self.api.call(request, self.description)
            if call.early is not None:
                yield call.early
            async with asyncio.timeout(None) as limit:
                self._running[request.request_id] = limit
                # The SDK runs and closes each generator in one task, so the span ends in the context of its beginning.
                with span(f"POST {call.path}", Kind.CLIENT) as engine_span:
                    if engine_span.recording:
                        engine_span.set({"server.address": self.http.url})
                    async with aclosing(self._outputs(call)) as outputs:
                        async for output in outputs:
                            yield output
            result = "finished"
        except EngineFailed as failure:
            result = "failed"
            if failure.was_sent and not await self.http.is_alive():
                failure.died()
            log.warning(
                "sidecar.request_failed", url=self.http.url, request_id=request.request_id, error=failure.summary
            )
            self.on_failure()
            raise
        except RequestRefused as refusal:
            result = "failed" if refusal.info.retry_elsewhere else "refused"
            raise
        except TimeoutError:
            result = "failed"
            raise EngineFailed("the engine is away") from None
        finally:
            self._running.pop(request.request_id, None)
            self.results[result] += 1

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Returns how many of the requests run. The SDK closes their generators, which aborts them at the engine."""
        return sum(each in self._running for each in request_ids)

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the latest load."""
        return self.loads

    def fail_running(self) -> None:
        """Fails all running requests, because the engine is away and may not even close its connections."""
        now = asyncio.get_running_loop().time()
        for limit in self._running.values():
            limit.reschedule(now)

    async def _outputs(self, call: EngineCall) -> AsyncGenerator[GenerateOutput]:
        has_ended = False
        try:
            async with self.http.generate(call.path, call.body, call.headers) as response:
                if response.status != 200:
                    raise refusal_of_status(response.status, await read_body(response))
                broken: Exception | None = None
                try:
                    async with aclosing(_events(response)) as events:
                        async for data in events:
                            for output in call.outputs.end() if data == END else call.outputs.read(data):
                                yield output
                except (aiohttp.ClientError, OSError) as error:
                    broken = error
                for output in _rest(call, broken):
                    yield output
            has_ended = True
        except (aiohttp.ClientError, OSError) as error:
            raise _disconnected(error) from None
        except (UnexpectedAnswer, EventTooLarge) as error:
            raise EngineFailed(f"the engine sent a malformed answer: {error}") from None
        finally:
            if not has_ended and call.engine_id:
                await self._abort(call.engine_id)

    async def _abort(self, engine_id: str) -> None:
        try:
            await self.api.abort(engine_id)
        except (EngineAway, UnexpectedAnswer) as error:
            log.warning("sidecar.abort_failed", url=self.http.url, error=str(error))


def _rest(call: EngineCall, broken: Exception | None) -> Iterator[GenerateOutput]:
    """Yields what was kept for the end. A connection that broke after the last token does no harm."""
    try:
        yield from call.outputs.end()
    except EngineFailed:
        if broken is not None:
            raise _disconnected(broken) from None
        raise


def _disconnected(error: Exception) -> EngineFailed:
    was_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return EngineFailed(f"the connection to the engine failed: {error or type(error).__name__}", was_sent=was_sent)


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yields the data of each event of a stream, or the whole body of another answer."""
    if response.content_type != _EVENT_STREAM:
        yield await read_body(response)
        return
    stream = EventStream()
    async for received in response.content.iter_any():
        await loop_budget().turn(_CHUNK_US + len(received) // _BYTES_PER_US)
        for data in stream.feed(received):
            yield data
