"""A request is one trace through all processes, whichever of a Frontend's processes serves it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.stack import until_serving
from kvrouter.net import trace_context
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.runtime.tracing import tracer
from kvrouter.runtime.tracing.configuration import TracingMetrics
from kvrouter.runtime.tracing.recording import recording
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, StopConditions, WorkerServiceGenerateRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import CollectorRegistry

from tests.integration.runtime.tracing.collector import Collector, Received, collecting

pytestmark = pytest.mark.timeout(180)

MODEL = "m"
PROMPT = list(range(1, 33))
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
STATE, BAGGAGE = "vendor=abc,other=1", "tenant=blue,experiment=7"
_GENERATE = "kvrouter.v1.FrontendService/Generate"
_ATTEMPT = "kvrouter.v1.WorkerService/Generate"


class Engine:
    """Echoes one token and notes the trace context of each request."""

    def __init__(self) -> None:
        self.traceparents: list[str] = []
        self.companions: list[tuple[str, str]] = []

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        self.traceparents.append(trace_context.current())
        self.companions.append((request.tracestate, request.baggage))
        assert trace_context.companions() == self.companions[-1]
        yield GenerateOutput(token_ids=[1], cached_tokens=0, finish_reason=FinishReason.FINISH_REASON_LENGTH)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        return {0: LoadReport()}


class System:
    def __init__(self, collector: Collector, engine: Engine, http: str, rpc: str) -> None:
        self.collector, self.engine, self.http, self.rpc = collector, engine, http, rpc

    async def complete(self, **headers: str) -> None:
        """Sends a request over a connection of its own, so that any process may serve it."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.http}/v1/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()


@pytest.fixture
async def system(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    rpc, port, indexer = f"127.0.0.1:{free_port()}", free_port(), f"127.0.0.1:{free_port()}"
    engine = Engine()
    resource = {"service.name": "kvrouter-worker", "service.instance.id": "worker"}
    config = WorkerConfig(
        component=ComponentName(namespace, "workers"),
        model=MODEL,
        block_size=16,
        ranks={0: 64},
        etcd=etcd_endpoint,
        nats=nats_url,
    )
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(collecting())
        metrics = TracingMetrics(CollectorRegistry())
        await stack.enter_async_context(recording(collector.url, 1.0, resource, metrics))
        where = ("--namespace", namespace, "--nats", nats_url, "--etcd", etcd_endpoint, "--drain-seconds", "1")
        traced = (*where, "--otlp-endpoint", collector.url)
        await stack.enter_async_context(running(replace(config, tracer=tracer()), engine))
        async with asyncio.TaskGroup() as starting:
            for name, *options in (
                ("indexer", "--bind", indexer),
                # An Indexer that is there answers, however busy the machine is.
                ("scheduler", "--router-mode", "kv", "--indexer-timeout-ms", "20000"),
                ("frontend", "--bind", rpc, "--port", str(port), "--processes", "2"),
            ):
                command = (sys.executable, "-m", f"kvrouter.{name}", *traced, *options)
                starting.create_task(_start(stack, Command(name, command, dict(os.environ)), tmp_path))
        await until_serving(indexer, "kvrouter.v1.IndexerService")
        await until_serving(rpc, "kvrouter.v1.FrontendService")
        started = System(collector, engine, f"http://127.0.0.1:{port}", rpc)
        await _until_complete(started)
        yield started


async def _start(stack: AsyncExitStack, command: Command, logs: Path) -> None:
    process = await ManagedProcess.start(command, logs)
    stack.push_async_callback(process.stop, 20)


async def _until_complete(system: System) -> None:
    """Waits until every process of the Frontend has served a request, and every service has exported its spans."""

    def frontends() -> set[str]:
        return {each.instance for each in system.collector.spans if each.service == "kvrouter-frontend"}

    async with asyncio.timeout(60):
        while len(frontends()) < 2 or not any(each.service == "kvrouter-indexer" for each in system.collector.spans):
            try:
                await system.complete()
            except (AssertionError, aiohttp.ClientError):
                await asyncio.sleep(0.05)


def by_name(spans: list[Received]) -> dict[tuple[str, str, int], Received]:
    """Spans by service, name and kind."""
    return {(each.service.removeprefix("kvrouter-"), each.name, each.span.kind): each for each in spans}


async def test_spans_of_all_processes_form_one_trace_with_the_terms_of_the_decision(system: System) -> None:
    collector = system.collector
    await system.complete(traceparent=SAMPLED, tracestate=STATE, baggage=BAGGAGE)
    assert system.engine.companions[-1] == (STATE, BAGGAGE)
    await collector.until(lambda: len(collector.of_trace(CLIENT_TRACE)) >= 10)
    server, client, internal = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL
    select, match = "kvrouter.v1.SchedulerService/SelectWorker", "kvrouter.v1.IndexerService/FindMatches"
    spans = by_name(collector.of_trace(CLIENT_TRACE))
    parents = {
        ("frontend", "POST /v1/completions", server): None,
        ("frontend", "generate", internal): ("frontend", "POST /v1/completions", server),
        ("frontend", select, client): ("frontend", "generate", internal),
        ("scheduler", select, server): ("frontend", select, client),
        ("scheduler", match, client): ("scheduler", select, server),
        ("indexer", match, server): ("scheduler", match, client),
        ("frontend", _ATTEMPT, client): ("frontend", "generate", internal),
        ("worker", _ATTEMPT, server): ("frontend", _ATTEMPT, client),
        ("worker", "prefill", internal): ("worker", _ATTEMPT, server),
        ("worker", "decode", internal): ("worker", _ATTEMPT, server),
    }
    assert spans.keys() == parents.keys()
    for name, parent in parents.items():
        expected = CLIENT_SPAN if parent is None else spans[parent].span.span_id.hex()
        assert spans[name].span.parent_span_id.hex() == expected, name
        if name[0] in ("frontend", "worker"):
            assert spans[name].span.trace_state == STATE, name
    attempt = spans["frontend", _ATTEMPT, client]
    served = spans["worker", _ATTEMPT, server]
    assert f"00-{CLIENT_TRACE}-{served.span.span_id.hex()}-01" in system.engine.traceparents
    assert served.attributes["kvrouter.cached_tokens"] == 0
    assert [event.name for event in attempt.span.events] == ["first_token"]
    described = spans["frontend", "generate", internal].attributes
    assert {name: value for name, value in described.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvrouter",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 1,
        "gen_ai.usage.input_tokens": 32,
        "gen_ai.usage.output_tokens": 1,
    }
    decision = spans["scheduler", select, server].attributes
    assert decision["kvrouter.mode"] == "kv"
    assert decision["kvrouter.prompt_blocks"] == 2
    assert decision["kvrouter.cheapest.ranks"] == [decision["kvrouter.rank"]]
    assert {"kvrouter.terms.decode_blocks", "kvrouter.terms.prefill_blocks"} <= decision.keys()

    # Over gRPC, in a trace that the Frontend starts.
    request = FrontendServiceGenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=PROMPT), stop_conditions=StopConditions(max_tokens=1)
    )
    async with grpc.aio.insecure_channel(system.rpc) as channel:
        generate = channel.unary_stream(f"/{_GENERATE}")  # type: ignore[var-annotated]
        sent = (("tracestate", STATE), ("baggage", BAGGAGE))
        assert [each async for each in generate(request.SerializeToString(), metadata=sent)]
        assert system.engine.companions[-1] == ("", BAGGAGE), "a tracestate means nothing without its trace context"
        sent = (*sent, ("traceparent", f"00-{'2' * 32}-{CLIENT_SPAN}-00"))
        assert [each async for each in generate(request.SerializeToString(), metadata=sent)]
        assert system.engine.companions[-1] == (STATE, BAGGAGE)
    await collector.until(lambda: any(each.name == _GENERATE for each in collector.spans))
    root = next(each for each in collector.spans if each.name == _GENERATE)
    assert not root.span.parent_span_id
    await collector.until(lambda: len(collector.of_trace(root.trace_id)) >= 10)

    # The client does not want its request recorded; the worker still receives the context.
    unsampled = "1" * 32
    await system.complete(traceparent=f"00-{unsampled}-{CLIENT_SPAN}-00")
    assert system.engine.traceparents[-1].startswith(f"00-{unsampled}-")
    # A header that is no trace context starts a new trace.
    await system.complete(traceparent=f"00-{'0' * 32}-{CLIENT_SPAN}-01")
    last = system.engine.traceparents[-1][3:35]
    await collector.until(lambda: len(collector.of_trace(last)) >= 10)
    assert not collector.of_trace(unsampled)

    # A collector that fails costs spans, no request.
    collector.status = 500
    for _ in range(3):
        await system.complete(traceparent=SAMPLED)
