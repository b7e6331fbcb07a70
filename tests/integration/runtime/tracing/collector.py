"""An OpenTelemetry collector: it receives spans over OTLP/HTTP and keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Received:
    """A span as it was received."""

    service: str
    instance: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return {each.key: _plain(each.value) for each in self.span.attributes}


@dataclass
class Collector:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    status: int = 200
    """Status of its answers."""
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def of_trace(self, trace_id: str) -> list[Received]:
        return [each for each in self.spans if each.trace_id == trace_id]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until spans have arrived that fulfil a condition."""
        try:
            async with asyncio.timeout(60):
                while not condition():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            names = [(each.service, each.name) for each in self.spans]
            raise AssertionError(f"these spans have arrived: {names}") from None

    async def receive(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        if self.status == 200:
            for of_resource in sent.resource_spans:
                resource = {each.key: _plain(each.value) for each in of_resource.resource.attributes}
                for scope in of_resource.scope_spans:
                    self.spans.extend(
                        Received(resource["service.name"], resource["service.instance.id"], span)
                        for span in scope.spans
                    )
        self._arrived.set()
        return web.Response(status=self.status)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Runs a collector on a free port."""
    collector = Collector()
    application = web.Application()
    application.add_routes([web.post("/v1/traces", collector.receive)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield collector
    finally:
        await runner.cleanup()
