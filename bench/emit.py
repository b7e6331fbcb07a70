"""CPU that the publisher SDK uses for each token, on the engine's machine.

    python bench/emit.py [--streams 1,64,256] [--steps 200] [--profile]

An engine that does nothing else makes a step every 10 ms. Each step emits one token for every running request, built as
``RequestOutput`` by the engine. Another process reads them, over one call stream as a Frontend does, or over ordinary
Generate calls. The result is the CPU time of the worker process over the steps, minus that of the same steps with an
``emit`` that does nothing, divided by the number of tokens. Medians of several runs, with emit called from the event
loop and from a thread of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
import uvloop
from kvrouter.net.calls import CallStreamClient
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.worker_server import SERVICE, WorkerServer
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import GetLoadResponse, StopConditions, WorkerServiceGenerateRequest
from rich.console import Console
from rich.table import Table

STEP_SECONDS = 0.01
RUNS = 5


class Engine:
    """Emits a token for every running request in each step."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self._expected: tuple[int, asyncio.Event] | None = None

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        self.running.append(request.request_id)
        if self._expected is not None and len(self.running) == self._expected[0]:
            self._expected[1].set()

    async def wait_for(self, count: int) -> None:
        """Returns when that many requests run."""
        self._expected = count, asyncio.Event()
        await self._expected[1].wait()

    async def abort(self, request_ids: Sequence[str]) -> int:
        for request_id in request_ids:
            self.running.remove(request_id)
        return len(request_ids)

    def load(self) -> Mapping[int, LoadReport]:
        return {}

    def step(self, emit: Callable[[Iterable[RequestOutput]], None], number: int) -> None:
        emit([RequestOutput(request_id, [number]) for request_id in self.running])

    async def steps_on_loop(self, emit: Callable[[Iterable[RequestOutput]], None], count: int) -> float:
        """Returns the CPU time that the process used, in seconds."""
        began, due = time.process_time(), time.perf_counter()
        for number in range(count):
            self.step(emit, number)
            due += STEP_SECONDS
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return time.process_time() - began

    async def steps_in_thread(self, emit: Callable[[Iterable[RequestOutput]], None], count: int) -> float:
        """Does the same in a thread of its own."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def run() -> None:
            due = time.perf_counter()
            for number in range(count):
                self.step(emit, number)
                due += STEP_SECONDS
                time.sleep(max(0.0, due - time.perf_counter()))
            loop.call_soon_threadsafe(done.set)

        began = time.process_time()
        threading.Thread(target=run).start()
        await done.wait()
        return time.process_time() - began


class Drain:
    """Drops the responses of a call."""

    def on_response(self, encoded: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: KvRouterError) -> None: ...


def request(number: int) -> bytes:
    return WorkerServiceGenerateRequest(
        request_id=f"request-{number:06}", token_ids=[1] * 16, stop_conditions=StopConditions(max_tokens=1 << 20)
    ).SerializeToString()


async def read(target: str, streams: int, transport: str) -> None:
    """Runs the requests and reads their output until the process is killed."""
    async with grpc.aio.insecure_channel(target) as channel, asyncio.TaskGroup() as group:
        if transport == "call stream":
            client = CallStreamClient(target, client_name="bench")
            group.create_task(client.run())
            await client.wait_ready()
            for number in range(streams):
                client.start(f"{SERVICE}/Generate", request(number), Drain())
        else:
            generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")
            for number in range(streams):
                group.create_task(drain(generate(request(number))))


async def drain(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def measure(streams: int, transport: str, *, threaded: bool, steps: int, profile: bool) -> list[float]:
    """Returns the µs per token of each run."""
    engine = Engine()
    rank = RankPublisher(subject="", worker_id=1, dp_rank=0, incarnation=1, block_size=16)
    server = WorkerServer(engine, {0: rank}, GetLoadResponse)
    port = await server.start("127.0.0.1:0")
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--read", f"127.0.0.1:{port}", "--streams", str(streams), "--transport", transport
    )
    run = engine.steps_in_thread if threaded else engine.steps_on_loop
    try:
        await engine.wait_for(streams)
        await run(server.emit, 50)
        costs = []
        for _ in range(RUNS):
            idle = await run(lambda _: None, steps)
            profiler = cProfile.Profile()
            if profile:
                profiler.enable()
            emitting = await run(server.emit, steps)
            if profile:
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
            costs.append((emitting - idle) / (steps * streams) * 1e6)
        return costs
    finally:
        reader.kill()
        await reader.wait()
        await server.refuse_requests()
        await server.stop(0)


async def compare(options: argparse.Namespace) -> None:
    table = Table("requests at once", "transport", "emit called from", "µs per token", "lowest to highest")
    for streams in map(int, options.streams.split(",")):
        for transport in ("call stream", "ordinary calls"):
            for threaded in (False, True):
                costs = await measure(
                    streams, transport, threaded=threaded, steps=options.steps, profile=options.profile
                )
                median = f"{statistics.median(costs):.1f}"
                spread = f"{min(costs):.1f} to {max(costs):.1f}"
                table.add_row(str(streams), transport, "a thread" if threaded else "the loop", median, spread)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,256", help="numbers of requests at once")
    parser.add_argument("--steps", type=int, default=200, help="engine steps in each run")
    parser.add_argument("--profile", action="store_true", help="print where the time goes; profiling slows it down")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="call stream", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.read:
            runner.run(read(options.read, int(options.streams), options.transport))
        else:
            runner.run(compare(options))


if __name__ == "__main__":
    main()
