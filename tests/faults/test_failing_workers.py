"""Workers freeze, fail and lie while streams begin and end: clients see whole answers, and nothing stays behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, cast

import grpc
import pytest
from kvrouter.runtime.contracts import Frontend, Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import RoutingConstraints, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceGenerateRequest,
    GetWorkerHealthRequest,
    WorkerHealth,
    WorkerHealthState,
)
from kvrouter.v1.indexer_pb2 import VerifyRequest
from kvrouter.v1.worker_pb2 import FinishReason, StopConditions

from ..hostile_worker import Behaviour, HostileWorker, aborts, answers, piece, registered_beside, writes
from .processes import MODEL, PATIENCE_SECONDS, Processes, start_system
from .rig import FULL

CLIENTS = 24 if FULL else 8
"""Clients that send a request after the other."""
TOKENS = 4
PROBING = () if FULL else ("--worker-probe-seconds", "0.2")
"""The long form has the default, which suspects a worker after 5 s."""
Report = Callable[[str, object], None]
FROZEN, SOUND, HOSTILE = 1, 2, 9
FRONTEND, SCHEDULER, INDEXER = "frontend-0", "scheduler-0", "indexer-0"


class Traffic:
    """Clients whose every request must be answered whole, and the workers that ran them."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._stopping = False
        self._number = 0
        self._without_output: set[int] = set()
        self.served: list[tuple[int, int]] = []
        """Number and worker of each request that has been answered."""
        self.longest_seconds = 0.0

    def observed(self) -> str:
        """What a report says."""
        return f"{len(self.served)} requests, all answered; the longest took {self.longest_seconds:.1f} s"

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[Traffic]:
        """Requests flow while the context lasts, and have all been answered when it ends."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client())
            try:
                yield self
            finally:
                self._stopping = True

    async def settled(self) -> None:
        """Returns when every request that has no output now has some."""
        await self._until(lambda pending=frozenset(self._without_output): not pending & self._without_output)  # type: ignore[misc]

    async def more(self, count: int) -> list[int]:
        """Returns the workers of requests that begin from here on, once ``count`` of them have been answered."""
        newest, before = self._number, len(self.served)

        def workers() -> list[int]:
            return [worker for number, worker in self.served[before:] if number > newest]

        await self._until(lambda: len(workers()) >= count)
        return workers()

    async def until_serves(self, worker_id: int) -> None:
        """Returns when that worker has run a request that ended from here on."""
        before = len(self.served)
        await self._until(lambda: worker_id in [worker for _, worker in self.served[before:]])

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await asyncio.sleep(0.01)

    async def _client(self) -> None:
        while not self._stopping:
            self._number += 1
            number, began = self._number, time.monotonic()
            self._without_output.add(number)
            had_output = partial(self._without_output.discard, number)
            self.served.append((number, await run(self._frontend, number, TOKENS, on_output=had_output)))
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)


async def run(
    frontend: Frontend,
    number: int,
    max_tokens: int,
    worker_id: int | None = None,
    on_output: Callable[[], None] = lambda: None,
) -> int:
    """Runs a request, whose answer must be whole. Returns the worker that ran it."""
    request = FrontendServiceGenerateRequest(
        model=MODEL,
        token_ids=TokenIds(ids=range(number * 40, (number + 1) * 40)),
        stop_conditions=StopConditions(max_tokens=max_tokens),
        constraints=RoutingConstraints(worker_id=worker_id),
    )
    tokens, ran, finish = 0, -1, FinishReason.FINISH_REASON_UNSPECIFIED
    async for each in frontend.generate(request, deadline=Deadline.after(120)):
        tokens += len(each.output.token_ids)
        on_output()
        finish = each.output.finish_reason
        ran = each.routing.rank.worker_id if each.HasField("routing") else ran
    assert (tokens, finish) == (max_tokens, FinishReason.FINISH_REASON_LENGTH)
    return ran


async def started(processes: Processes, *, engine: Sequence[str] = (), clock_factor: float = 1.0) -> Frontend:
    """Two workers with an Indexer, a Scheduler and a Frontend that suspects a worker within some seconds."""
    await processes.start("indexer", INDEXER)
    await start_system(processes, schedulers=1, frontends=1, clock_factor=clock_factor, frontend=PROBING, engine=engine)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await processes.directory.wait_for(
            lambda seen: INDEXER in seen.services("indexer") and set(view_of(processes).workers) == {FROZEN, SOUND}
        )
    return processes.frontend(FRONTEND)


def view_of(processes: Processes) -> ComponentView:
    return next(iter(processes.directory.components.values()))


def etcd_of(processes: Processes) -> str:
    return processes.where[processes.where.index("--etcd") + 1]


@asynccontextmanager
async def hostile(processes: Processes, behave: Behaviour) -> AsyncIterator[HostileWorker]:
    """A worker of the test's own beside the two, while the context lasts."""
    async with (
        HostileWorker(behave).serving() as worker,
        registered_beside(view_of(processes), etcd_of(processes), HOSTILE, worker.endpoint),
    ):
        yield worker


async def health(frontend: Frontend, worker_id: int) -> WorkerHealth | None:
    answer = await frontend.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
    return next((each for each in answer.workers if each.worker_id == worker_id), None)


async def until_state(frontend: Frontend, worker_id: int, state: WorkerHealthState) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := await health(frontend, worker_id)) is None or found.state != state:
            await asyncio.sleep(0.02)


async def nothing_is_left(processes: Processes) -> None:
    """Waits until no booking is left, no call is under way, and the index equals what the workers hold."""
    await processes.until_idle(SCHEDULER, FRONTEND)
    component = view_of(processes).descriptor.component
    async with open_channel(processes.directory.services("indexer")[INDEXER].endpoint) as channel:
        indexer = cast(Indexer, remote(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], channel))
        last: Any = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    stream = indexer.verify(VerifyRequest(component=component), deadline=Deadline.after(20))
                    async with aclosing(stream) as answers_:
                        last = [each async for each in answers_]
                    compared = {each.rank.worker_id for each in last if each.compared and not each.differences}
                    if {FROZEN, SOUND} <= compared:
                        break
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"the index differs from the workers: {last}") from None
    assert any(each.common_blocks for each in last)


@pytest.mark.parametrize("lease", [pytest.param("short of its lease", marks=pytest.mark.full), "beyond its lease"])
async def test_a_frozen_worker_costs_no_request(processes: Processes, lease: str, record_property: Report) -> None:
    beyond = lease == "beyond its lease"
    frontend = await started(processes, engine=("--lease-seconds", "2" if beyond else "60"))
    async with asyncio.TaskGroup() as group, Traffic(frontend).flowing() as traffic:
        # Streams that have output when their worker freezes go on when it does.
        have_output = {FROZEN: asyncio.Event(), SOUND: asyncio.Event()}
        for worker_id, has_output in have_output.items():
            group.create_task(run(frontend, 10_000 + worker_id, 300, worker_id, has_output.set))
        for has_output in have_output.values():
            await has_output.wait()
        await traffic.until_serves(FROZEN)
        processes.signal("mocker-0", signal.SIGSTOP)
        if beyond:
            await processes.directory.wait_for(lambda _: FROZEN not in view_of(processes).workers)
        else:
            await until_state(frontend, FROZEN, WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED)
        # Those that wait at the frozen worker are retried at the other one, and none goes there.
        await traffic.settled()
        assert set(await traffic.more(5 * CLIENTS)) == {SOUND}
        processes.signal("mocker-0", signal.SIGCONT)
        await traffic.until_serves(FROZEN)
    record_property("observed", traffic.observed())
    await nothing_is_left(processes)


@pytest.mark.full
async def test_a_worker_that_only_accepts_connections_costs_no_request(
    processes: Processes, record_property: Report
) -> None:
    frontend = await started(processes)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    endpoint = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    registered = registered_beside(view_of(processes), etcd_of(processes), HOSTILE, endpoint)
    async with silent, Traffic(frontend).flowing() as traffic, registered:
        await until_state(frontend, HOSTILE, WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED)
        assert set(await traffic.more(5 * CLIENTS)) <= {FROZEN, SOUND}
    record_property("observed", traffic.observed())
    await nothing_is_left(processes)


@pytest.mark.full
async def test_a_worker_whose_loop_stops_after_it_accepted_requests_costs_no_request(
    processes: Processes, record_property: Report
) -> None:
    frontend = await started(processes)

    async def hold(context: object) -> None:
        worker.freeze()
        await asyncio.Event().wait()

    async with hostile(processes, hold) as worker, Traffic(frontend).flowing() as traffic:
        await until_state(frontend, HOSTILE, WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED)
        await traffic.settled()
        assert set(await traffic.more(5 * CLIENTS)) == {FROZEN, SOUND}
        assert worker.calls > 0
        worker.behave = answers
        worker.thaw()
        await traffic.until_serves(HOSTILE)
    record_property("observed", traffic.observed())
    await nothing_is_left(processes)


def every_failure() -> dict[str, Behaviour]:
    """The ways in which a worker fails before it has output, by a name for the report."""
    client = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}
    failures: dict[str, Behaviour] = {code.name: aborts(code) for code in grpc.StatusCode if code not in client}
    failures["garbage"] = writes(b"\xff\xfe\xfd")
    failures["cut short"] = writes(b"\x0a\x7f")
    failures["nothing"] = writes()
    failures["engine error"] = writes(piece(finish=FinishReason.FINISH_REASON_ERROR))
    return failures


async def test_a_worker_that_fails_in_every_way_costs_no_request(processes: Processes, record_property: Report) -> None:
    frontend = await started(processes)
    left = list(every_failure().items())

    async def fail(context: object) -> None:
        _, behave = left.pop() if left else ("", answers)
        await behave(context)

    refusals: list[KvRouterError] = []
    async with hostile(processes, fail), Traffic(frontend).flowing() as traffic:
        # Its back-off alone would make this take minutes: these requests must go there.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while left:
                try:
                    await run(frontend, 20_000 + len(left), TOKENS, HOSTILE)
                except KvRouterError as error:
                    refusals.append(error)
        await traffic.until_serves(HOSTILE)
    assert all(f"worker {HOSTILE}" in str(error) for error in refusals)
    record_property("observed", f"{len(every_failure())} kinds of failure; {traffic.observed()}")
    await nothing_is_left(processes)


@pytest.mark.full
async def test_a_worker_that_ignores_max_tokens_is_stopped_and_its_clients_get_max_tokens(
    processes: Processes, record_property: Report
) -> None:
    frontend = await started(processes)

    async def go_on(context: Any) -> None:
        while True:
            await context.write(piece(1, 2, 3))
            await asyncio.sleep(0)

    async with hostile(processes, go_on) as worker:
        async with Traffic(frontend).flowing() as traffic:
            await traffic.until_serves(HOSTILE)
            await traffic.more(5 * CLIENTS)
        # Its clients have their answers, and none of its calls goes on.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while worker.under_way:
                await asyncio.sleep(0.01)
    record_property("observed", traffic.observed())
    await nothing_is_left(processes)
