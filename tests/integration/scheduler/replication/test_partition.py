"""Links to NATS that are cut while clients book, progress and free at every Scheduler: healed, all agree with clients.

Every Scheduler has a link of its own. What clients run is kept by the test alone, from what it was answered, so that
the Schedulers are compared with something that has not gone through their bookkeeping.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random, SystemRandom

import pytest
from kvrouter.core import Rank
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.scheduler_pb2 import FreeRequest, MarkPrefillCompleteRequest, ReportOutputRequest

from ..scheduling import BLOCK, Stack, eventually, routing, selecting, soon
from .links import Cut, Link, links
from .replicating import Agreement, agreed, agreement, figure, ranks, replicas

CALLS = 60
"""Calls of clients in each phase."""
Load = dict[Rank, tuple[int, int, int]]
"""rank → (active blocks, prefill tokens, requests)"""


@dataclass
class Run:
    """A request as its client knows it."""

    number: int
    blocks: int
    rank: Rank
    prefilled: bool = False
    output: int = 0

    @property
    def booking(self) -> BookingKey:
        return BookingKey(request_id=f"r{self.number}")


@dataclass
class Clients:
    """What clients run, whichever Scheduler they called."""

    rng: Random
    stacks: Sequence[Stack]
    runs: list[Run] = field(default_factory=list)
    made: int = 0

    async def book(self, stack: Stack) -> None:
        self.made += 1
        blocks = self.rng.randrange(1, 6)
        made = await stack.select(selecting(f"r{self.made}", routing(blocks, seed=self.made)))
        self.runs.append(Run(self.made, blocks, (made.rank.worker_id, made.rank.dp_rank)))

    async def call(self) -> None:
        """One call about any request at any Scheduler; what is unknown there counts for nothing, but for its end."""
        stack = self.rng.choice(self.stacks)
        what = self.rng.choice(("book", "book", "book", "prefill", "output", "free"))
        if what == "book" or not self.runs:
            await self.book(stack)
            return
        run = self.rng.choice(self.runs)
        if what == "prefill":
            asked = MarkPrefillCompleteRequest(booking=run.booking)
            run.prefilled |= (await stack.scheduler.mark_prefill_complete(asked, deadline=soon())).known
        elif what == "output":
            tokens = self.rng.randrange(1, 4 * BLOCK)
            progress = ReportOutputRequest(booking=run.booking, output_tokens=tokens)
            if (await stack.scheduler.report_output(progress, deadline=soon())).known:
                run.output = max(run.output, tokens)
        else:
            await stack.scheduler.free(FreeRequest(booking=run.booking), deadline=soon())
            self.runs.remove(run)

    async def free_all(self) -> None:
        for run in self.runs:
            await self.rng.choice(self.stacks).scheduler.free(FreeRequest(booking=run.booking), deadline=soon())
        self.runs.clear()

    def load(self) -> Load:
        """What the ranks have to do. No two requests share a block."""
        blocks, prefill, requests = Counter[Rank](), Counter[Rank](), Counter[Rank]()
        for run in self.runs:
            blocks[run.rank] += run.blocks - (-run.output // BLOCK)
            prefill[run.rank] += 0 if run.prefilled else run.blocks * BLOCK
            requests[run.rank] += 1
        return {rank: (blocks[rank], prefill[rank], requests[rank]) for rank in requests}


async def believed(stack: Stack) -> Load:
    return {rank: (blocks, prefill, requests) for rank, blocks, prefill, requests in await ranks(stack) if requests}


@pytest.mark.parametrize("how", list(Cut))
async def test_changes_during_a_partition_reach_all_when_it_heals(
    nats_url: str, etcd_endpoint: str, namespace: str, how: Cut
) -> None:
    seed = int(os.environ.get("KVROUTER_SEED", SystemRandom().randrange(1 << 32)))
    print(f"KVROUTER_SEED={seed}")  # noqa: T201 - pytest shows it where a test fails
    async with AsyncExitStack() as exits:
        made = await exits.enter_async_context(links(nats_url, 3))
        stacks = await exits.enter_async_context(replicas(3, namespace, etcd_endpoint, [url for _, url in made]))
        clients = Clients(Random(seed), stacks)
        cuts: list[list[Link]] = [[made[0][0]], [link for link, _ in made]]
        for cut in cuts:
            for _ in range(CALLS):
                await clients.call()
            await all_have(stacks, clients)
            for link in cut:
                link.cut(how)
            # One at each: whoever does not hear of the other's is wrong from here on.
            for stack in stacks:
                await clients.book(stack)
            for _ in range(CALLS):
                await clients.call()
            if len(cut) == 1:
                await agree_of_each_other(*stacks[1:])
            assert any([await believed(stack) != clients.load() for stack in stacks]), "nothing was cut"
            for link in cut:
                link.heal()
            await all_have(stacks, clients)
        assert sum(figure(stack, "sync_repairs_total", outcome="done") for stack in stacks) >= len(stacks)
        assert [figure(stack, "sync_digest_mismatches_total") for stack in stacks] == [0, 0, 0]
        await clients.free_all()
        await all_have(stacks, clients)


async def all_have(stacks: list[Stack], clients: Clients) -> None:
    """All agree by sequence and digest, and have what clients run, rank by rank."""
    await agreed(stacks)
    for stack in stacks:
        assert await believed(stack) == clients.load()


async def agree_of_each_other(*stacks: Stack) -> None:
    """Waits until Schedulers know the same of each other, whatever they know of those beyond the cut."""
    here = {stack.runtime.instance_id for stack in stacks}

    async def ask() -> list[Agreement]:
        known = [await agreement(stack) for stack in stacks]
        return [
            {scheduler: announced for scheduler, announced in each.items() if scheduler[0] in here} for each in known
        ]

    await eventually(ask, lambda seen: len(seen[0]) == len(stacks) and all(each == seen[0] for each in seen))
