"""A worker fails at each stage of a request, aggregated and disaggregated: clients see whole streams, nothing is left.

Every stream must have exactly the tokens of an undisturbed one, since another worker of the pool can serve it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pytest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import FinishReason, SamplingOptions, StopConditions

from .pools import SCHEDULER, Fault, FaultyWorker, Mode, Pool, Pools, running_pools, until_nothing
from .processes import MODEL, PATIENCE_SECONDS, Processes
from .traffic import expected_tokens

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PROMPT_TOKENS = 1500
TOKENS = 40
_DEADLINE_SECONDS = 90.0


class Stage(StrEnum):
    """How far requests are when the worker fails."""

    QUEUED = "queued"
    PREFILL = "prefill"
    HANDOVER = "hand-over"
    FIRST_TOKEN = "first token"  # noqa: S105 - no password
    MID_STREAM = "mid-stream"


STAGES: dict[tuple[Mode, Pool], Sequence[Stage]] = {
    (Mode.AGGREGATED, Pool.BOTH): [each for each in Stage if each is not Stage.HANDOVER],
    (Mode.SEQUENTIAL, Pool.PREFILL): list(Stage),
    (Mode.SEQUENTIAL, Pool.DECODE): list(Stage),
    (Mode.CONCURRENT, Pool.PREFILL): list(Stage),
    (Mode.CONCURRENT, Pool.DECODE): list(Stage),
}
REQUESTS = {Stage.QUEUED: 16}
"""More than the workers of a pool run at a time."""
QUEUED_REQUESTS = 8
"""Twice as many as have room in the KV caches of a system with few blocks."""
MATRIX = [(mode, pool, fault) for mode, pool in STAGES for fault in Fault]


@dataclass
class Stream:
    """A request, and what its client received."""

    number: int
    tokens: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED
    error: Exception | None = None

    @property
    def is_whole(self) -> bool:
        expected = expected_tokens(self.number % 7, PROMPT_TOKENS)[:TOKENS]
        return self.tokens == expected and self.finish == FinishReason.FINISH_REASON_LENGTH

    async def run(self, frontend: Frontend) -> None:
        first = self.number * PROMPT_TOKENS
        request = FrontendServiceGenerateRequest(
            model=MODEL,
            token_ids=TokenIds(ids=range(first, first + PROMPT_TOKENS)),
            stop_conditions=StopConditions(max_tokens=TOKENS),
            sampling_options=SamplingOptions(seed=self.number % 7),
        )
        try:
            async for each in frontend.generate(request, deadline=Deadline.after(_DEADLINE_SECONDS)):
                self.tokens.extend(each.output.token_ids)
                self.finish = each.output.finish_reason or self.finish
                if each.HasField("routing"):
                    self.workers.append(each.routing.rank.worker_id)
                    self.prefills.append(each.routing.prefill_rank.worker_id)
        except Exception as error:
            self.error = error

    def __str__(self) -> str:
        what = f"{type(self.error).__name__}: {self.error}" if self.error else FinishReason.Name(self.finish)
        return f"{len(self.tokens)} tokens, workers {self.workers}, prefills {self.prefills}, {what}"


@pytest.mark.parametrize(("mode", "pool", "fault"), MATRIX, ids=lambda part: str(part).replace(" ", "-"))
async def test_a_worker_that_fails_at_any_stage_costs_no_token(
    processes: Processes,
    seed: int,
    mode: Mode,
    pool: Pool,
    fault: Fault,
    record_property: Callable[[str, object], None],
) -> None:
    numbers = itertools.count()
    async with running_pools(processes, mode, random.Random(seed)) as pools:
        struck = pools.struck(pool)
        await serve_until_used(pools, struck, numbers)
        moved = 0
        for stage in STAGES[mode, pool]:
            streams = [Stream(next(numbers)) for _ in range(REQUESTS.get(stage, 6))]
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.run(pools.frontend))
                await until_at(stage, pools, struck, streams)
                await struck.strike(fault)
            failed = [str(stream) for stream in streams if not stream.is_whole]
            assert not failed, f"{stage}: {len(failed)} of {len(streams)} streams are not whole: {failed}"
            moved += sum(len(stream.workers) > 1 for stream in streams)
            await struck.heal(fault)
            await pools.until_all_serve()
            await pools.until_nothing_is_left()
            await serve_until_used(pools, struck, numbers)
        record_property("observed", f"{moved} streams continued on another worker")


async def test_a_worker_that_fails_while_requests_are_queued_at_the_scheduler_costs_no_token(
    processes: Processes, seed: int, record_property: Callable[[str, object], None]
) -> None:
    numbers = itertools.count()
    rng = random.Random(seed)
    options = {"scheduler": ("--router-mode", "forecast"), "engine": ("--num-blocks", "256", "--clock-factor", "1")}
    async with running_pools(processes, Mode.AGGREGATED, rng, **options) as pools:
        struck = pools.struck(Pool.BOTH)
        queued = 0
        for fault in Fault:
            await serve_until_used(pools, struck, numbers)
            streams = [Stream(next(numbers)) for _ in range(QUEUED_REQUESTS)]
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.run(pools.frontend))
                queued += await until_queued(processes)
                await struck.strike(fault)
            failed = [str(stream) for stream in streams if not stream.is_whole]
            assert not failed, f"{fault}: {len(failed)} of {len(streams)} streams are not whole: {failed}"
            await struck.heal(fault)
            await pools.until_all_serve()
            await pools.until_nothing_is_left()
        record_property("observed", f"{queued} requests were queued in {len(Fault)} rounds")


async def until_queued(processes: Processes) -> int:
    """Returns how many requests are queued at the Scheduler, once there are some."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := (await processes.queued(SCHEDULER)).requests):
            await asyncio.sleep(0.02)
        return found


async def serve_until_used(pools: Pools, worker: FaultyWorker, numbers: itertools.count[int]) -> None:
    """Serves requests until a worker has served one of them, which teaches the Frontend its speed too."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            streams = [Stream(next(numbers)) for _ in range(4)]
            await asyncio.gather(*[stream.run(pools.frontend) for stream in streams])
            assert all(stream.is_whole for stream in streams), [str(stream) for stream in streams]
            if any(worker.worker_id in (*stream.workers, *stream.prefills) for stream in streams):
                return


async def until_at(stage: Stage, pools: Pools, struck: FaultyWorker, streams: Sequence[Stream]) -> None:
    """Returns when streams that the worker serves are at a stage."""

    async def not_there() -> object:
        return [str(stream) for stream in streams] if await is_before() else None

    async def is_before() -> bool:
        here = [stream for stream in streams if struck.worker_id in (*stream.workers, *stream.prefills)]
        health = await pools.health(struck)
        calls = 0 if health is None else health.calls
        match stage:
            case Stage.QUEUED:
                return calls < 2 or not any(stream.tokens for stream in streams)
            case Stage.PREFILL:
                return not calls
            case Stage.HANDOVER:
                return not await hands_over(pools, struck, streams)
            case Stage.FIRST_TOKEN:
                return not any(stream.tokens for stream in here)
            case Stage.MID_STREAM:
                return not here or any(len(stream.tokens) < 4 for stream in streams)

    await until_nothing(not_there, f"no request is at the stage {stage}")


async def hands_over(pools: Pools, struck: FaultyWorker, streams: Sequence[Stream]) -> bool:
    """Returns whether a decode worker waits for the blocks of a prefill that is complete."""
    prefills = decodes = 0
    for worker in pools.workers:
        health = await pools.health(worker)
        calls = 0 if health is None else health.calls
        if worker.pool is Pool.PREFILL:
            prefills += calls
        elif worker is struck or struck.pool is Pool.PREFILL:
            decodes += calls
    generating = [stream for stream in streams if stream.tokens and not stream.finish]
    if struck.pool is Pool.DECODE:
        generating = [stream for stream in generating if stream.workers[-1] == struck.worker_id]
    # In the sequential style, a decode worker is called when the prefill is complete.
    return decodes - len(generating) > (prefills if pools.mode is Mode.CONCURRENT else 0)


async def test_a_worker_whose_connection_fell_silent_serves_again_by_itself(processes: Processes, seed: int) -> None:
    numbers = itertools.count()
    async with running_pools(processes, Mode.AGGREGATED, random.Random(seed)) as pools:
        struck = pools.struck(Pool.BOTH)
        await serve_until_used(pools, struck, numbers)
        streams = [Stream(next(numbers)) for _ in range(6)]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.run(pools.frontend))
            await until_at(Stage.MID_STREAM, pools, struck, streams)
            await struck.strike(Fault.HALF_OPEN)
        assert all(stream.is_whole for stream in streams), [str(stream) for stream in streams]
        # gRPC finds the connection dead, and makes another one, which passes.
        await pools.until_all_serve()
        await pools.until_nothing_is_left()
        await serve_until_used(pools, struck, numbers)
