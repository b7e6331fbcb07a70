"""Load is exact whatever happens to bookings, their owners, their Schedulers and the messages between these.

Schedulers with all their parts, and between them a network that delays, reorders, doubles and loses. Clients hold
sessions, move, die, and call whom they like. The model knows nothing of how load is shared: it is the list of requests
that live clients run. At every step each Scheduler's slots must be the sum over its own table; once the network is
whole again and the graces are over, every table must be the model.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.bookings.booking import SchedulerIncarnation
from kvrouter.scheduler.replication import state_transfer as replica_state
from kvrouter.scheduler.replication.replicas import Replicas
from kvrouter.scheduler.replication.state_transfer import Fetch, StateBroken, chunks
from kvrouter.v1 import common_pb2
from kvrouter.v1.common_pb2 import BookingKey, Component, Stage
from kvrouter.v1.scheduler_pb2 import (
    FreeRequest,
    MarkPrefillCompleteRequest,
    ReassertBooking,
    ReportOutputRequest,
    SelectWorkerResponse,
)
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncStateResponse

from ..harness import BLOCK, POOL, Parts, prompt, routing, selecting, view, worker

GRACE = 10.0
NODES = ("n0", "n1", "n2")
RANKS: list[Rank] = [(1, 0), (2, 0)]
FULL = os.environ.get("KVROUTER_FAULTS") == "full"

Seen = tuple[Rank, bool, int]
"""(rank, whether the prompt is computed, output tokens)"""


@dataclass
class Request:
    """What a client knows of a request that it runs."""

    number: int
    blocks: int
    seed: int
    rank: Rank = (0, 0)
    prefill_tokens: int = 0
    prefilled: bool = False
    output: int = 0

    @property
    def booking(self) -> BookingKey:
        return BookingKey(request_id=f"r{self.number}")

    @property
    def key(self) -> Key:
        return (f"r{self.number}", 0, int(Stage.STAGE_WHOLE))

    def answered(self, outcome: SelectWorkerResponse) -> None:
        self.rank = (outcome.rank.worker_id, outcome.rank.dp_rank)
        self.prefill_tokens = outcome.prefill_tokens

    def reassert(self) -> ReassertBooking:
        return ReassertBooking(
            booking=self.booking,
            rank=common_pb2.Rank(worker_id=self.rank[0], dp_rank=self.rank[1]),
            component=Component(namespace=POOL.namespace, name=POOL.name),
            sequence_hashes=memoryview(prompt(self.blocks, seed=self.seed).sequence_hashes).cast("Q").tolist(),
            prompt_tokens=self.blocks * BLOCK,
            prefill_tokens=self.prefill_tokens,
            prefill_complete=self.prefilled,
            output_tokens=self.output,
        )


@dataclass
class Client:
    """One that holds a session; without a node while its Scheduler is dead."""

    name: str
    node: str = ""
    runs: dict[Key, Request] = field(default_factory=dict)


@dataclass
class Leased:
    """A request without a session, and the lives of Schedulers that hold it."""

    request: Request
    owners: set[SchedulerIncarnation]


class Cluster(RuleBasedStateMachine):
    """Three Schedulers and their clients."""

    numbers = st.integers(0, 7)
    nodes = st.sampled_from(NODES)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.incarnations: Counter[str] = Counter()
        self.alive: dict[str, Parts] = {}
        self.flying: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self.cut: set[frozenset[str]] = set()
        self.fetches: dict[tuple[str, SchedulerIncarnation], tuple[Fetch, Iterator[SyncStateResponse]]] = {}
        self.clients = [Client("c0"), Client("c1")]
        self.leases: dict[Key, Leased] = {}
        self.made = 0
        self.announced_at: dict[str, set[Key]] = defaultdict(set)
        self.unsure: set[Key] = set()
        """Keys that only a Scheduler knew which was killed before it announced them."""
        for name in NODES:
            self._start(name)
        for client in self.clients:
            self._open(client, "n0")

    def teardown(self) -> None:
        self.settle()
        self.loop.close()

    # Clients.

    @rule(which=st.integers(0, 1), blocks=st.integers(1, 3), seed=st.integers(0, 2))
    def book(self, which: int, blocks: int, seed: int) -> None:
        client = self.clients[which]
        if client.node:
            request = self._new(blocks, seed)
            request.answered(self._select(client.node, request, client.name))
            client.runs[request.key] = request

    @rule(which=st.integers(0, 1), number=numbers)
    def book_again(self, which: int, number: int) -> None:
        client = self.clients[which]
        request = _pick(list(client.runs.values()), number)
        if client.node and request is not None:
            request.answered(self._select(client.node, request, client.name))

    @rule(node=nodes, blocks=st.integers(1, 3), seed=st.integers(0, 2))
    def book_leased(self, node: str, blocks: int, seed: int) -> None:
        if node in self.alive:
            request = self._new(blocks, seed)
            request.answered(self._select(node, request, ""))
            self.leases[request.key] = Leased(request, {self._incarnation_of(node)})

    @rule(node=nodes, number=numbers)
    def book_leased_again(self, node: str, number: int) -> None:
        leased = _pick(list(self.leases.values()), number)
        parts = self.alive.get(node)
        if leased is not None and parts is not None and parts.booking_table.get(leased.request.key) is not None:
            leased.request.answered(self._select(node, leased.request, ""))
            leased.owners.add(self._incarnation_of(node))

    @rule(number=numbers, elsewhere=st.none() | nodes)
    def prefill(self, number: int, elsewhere: str | None) -> None:
        called = self._called(number, elsewhere)
        if called is not None:
            parts, request = called
            request.prefilled |= parts.bookings.mark_prefill_complete(
                MarkPrefillCompleteRequest(booking=request.booking)
            )

    @rule(number=numbers, elsewhere=st.none() | nodes, tokens=st.integers(1, 3 * BLOCK))
    def output(self, number: int, elsewhere: str | None, tokens: int) -> None:
        called = self._called(number, elsewhere)
        if called is not None:
            parts, request = called
            if parts.bookings.report_output(ReportOutputRequest(booking=request.booking, output_tokens=tokens)):
                request.output = max(request.output, tokens)

    @rule(number=numbers, elsewhere=st.none() | nodes, twice=st.booleans())
    def free(self, number: int, elsewhere: str | None, twice: bool) -> None:
        called = self._called(number, elsewhere)
        if called is not None:
            parts, request = called
            for _ in range(1 + twice):
                parts.bookings.free(FreeRequest(booking=request.booking))
            self._forget(request.key)

    @rule(which=st.integers(0, 1), node=nodes)
    def move(self, which: int, node: str) -> None:
        client = self.clients[which]
        if node in self.alive:
            self._close(client)
            self._open(client, node)

    @rule(which=st.integers(0, 1), node=nodes)
    def die(self, which: int, node: str) -> None:
        if node in self.alive:
            self._close(self.clients[which])
            self.made += 1
            self.clients[which] = Client(f"client{self.made}")
            self._open(self.clients[which], node)

    # Schedulers.

    @rule(node=nodes)
    def kill(self, node: str) -> None:
        if node not in self.alive or len(self.alive) == 1:
            return
        scheduler = self._incarnation_of(node)
        del self.alive[node]
        self.unsure |= self.announced_at.pop(node, set())
        for client in self.clients:
            if client.node == node:
                client.node = ""
                # It tells the next Scheduler what it knows of those that it runs.
                self.unsure -= client.runs.keys()
        for key, leased in list(self.leases.items()):
            leased.owners.discard(scheduler)
            if not leased.owners:
                del self.leases[key]
                self.unsure.discard(key)
        for fetch in [each for each in self.fetches if each[0] == node]:
            del self.fetches[fetch]

    @rule(node=nodes)
    def restart(self, node: str) -> None:
        if node not in self.alive:
            self._start(node)

    @rule(seconds=st.sampled_from([0.5, 4.0, GRACE + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for parts in self.alive.values():
            parts.now = self.now
            parts.updates.expire()
            parts.sync.expire(self.alive)

    # The network.

    @rule(one=nodes, other=nodes)
    def part(self, one: str, other: str) -> None:
        self.cut.add(frozenset((one, other)))

    @rule()
    def heal(self) -> None:
        self.cut.clear()

    @rule(node=nodes)
    def heartbeat(self, node: str) -> None:
        if node in self.alive:
            self._send(node, self._replicas(node).announcer.heartbeat())

    @rule(sender=nodes, to=nodes, count=st.integers(1, 5))
    def deliver(self, sender: str, to: str, count: int) -> None:
        queue = self.flying[sender, to]
        for _ in range(min(count, len(queue))):
            encoded = queue.pop(0)
            if to in self.alive:
                self._replicas(to).receive(ReplicaSyncEvent.FromString(encoded))

    @rule(sender=nodes, to=nodes, at=numbers, how=st.sampled_from(["lose", "double", "delay"]))
    def disturb(self, sender: str, to: str, at: int, how: str) -> None:
        queue = self.flying[sender, to]
        if at < len(queue):
            encoded = queue[at] if how == "double" else queue.pop(at)
            if how != "lose":
                queue.append(encoded)

    @rule(to=nodes)
    def fetch(self, to: str) -> None:
        for event_log in list(self._replicas(to).logs) if to in self.alive else []:
            sender = event_log.scheduler[1]
            reachable = sender in self.alive and frozenset((sender, to)) not in self.cut
            if event_log.state_requested and (to, event_log.scheduler) not in self.fetches and reachable:
                state = chunks(self._replicas(sender))
                self.fetches[to, event_log.scheduler] = (Fetch(self._replicas(to), event_log), state)

    @precondition(lambda self: self.fetches)
    @rule(number=numbers, loses=st.sampled_from([False, False, False, True]))
    def fetch_on(self, number: int, loses: bool) -> None:
        (to, scheduler), (fetch, state) = list(self.fetches.items())[number % len(self.fetches)]
        sender = scheduler[1]
        reachable = sender in self.alive and frozenset((sender, to)) not in self.cut
        try:
            if not reachable or self._incarnation_of(sender) != scheduler:
                raise StateBroken("no answer")
            if loses:
                next(state, None)
            chunk = next(state, None)
            if chunk is None:
                raise StateBroken("no more")
            done = fetch.take(SyncStateResponse.FromString(chunk.SerializeToString()))
        except StateBroken:
            fetch.give_up()
            done = True
        if done:
            del self.fetches[to, scheduler]

    # What must hold.

    @rule()
    def settle(self) -> None:
        """The network is whole, everybody is connected, and the graces are over."""
        self.heal()
        for client in self.clients:
            if not client.node:
                self._open(client, next(iter(self.alive)))
        for _ in range(3):
            self._exchange()
            self.wait(GRACE + 1)
        self._exchange()
        self.announced_at.clear()
        expected = self._expected()
        for name, parts in self.alive.items():
            assert self._table(parts) == expected, name
        announced = [
            {(each.scheduler_id, each.incarnation): each for each in self._replicas(name).status()}
            for name in self.alive
        ]
        for known in announced:
            for scheduler, entry in known.items():
                assert entry.complete
                assert {
                    (other[scheduler].next_sequence, other[scheduler].bookings, other[scheduler].digest)
                    for other in announced
                } == {(entry.next_sequence, entry.bookings, entry.digest)}

    @invariant()
    def slots_are_the_sum_over_the_table(self) -> None:
        for parts in self.alive.values():
            pool = parts.pools.get(POOL)
            assert pool is not None
            booking_table = list(parts.booking_table)
            for rank, load in pool.booked_load.load_by_rank().items():
                here = [booking for booking in booking_table if booking.rank == rank]
                shared = {
                    booking.prompt.sequence_hashes[at : at + 8]
                    for booking in here
                    for at in range(0, len(booking.prompt.sequence_hashes), 8)
                }
                filled = sum(-(-booking.output_tokens // BLOCK) for booking in here)
                prefill = sum(0 if booking.prefilled else booking.placement.prefill_tokens for booking in here)
                assert load[:3] == (len(shared) + filled, prefill, len(here))
            assert sum(load.requests for load in pool.booked_load.load_by_rank().values()) == len(booking_table)

    @invariant()
    def what_is_owned_here_is_what_is_announced(self) -> None:
        for name, parts in self.alive.items():
            owned = {booking.key for booking in parts.booking_table if parts.booking_table.is_here(booking)}
            assert set(self._replicas(name).announcer.announced) == owned
            assert all(booking.owners for booking in parts.booking_table)

    # Means.

    def _start(self, name: str) -> None:
        self.incarnations[name] += 1
        parts = Parts(view(worker(1), worker(2)), grace=GRACE, scheduler=(self.incarnations[name], name))
        parts.now = self.now
        parts.sync.send = lambda _, event: self._send(name, event)
        self.alive[name] = parts

    def _send(self, sender: str, event: ReplicaSyncEvent) -> None:
        for to in NODES:
            if to != sender and frozenset((sender, to)) not in self.cut:
                self.flying[sender, to].append(event.SerializeToString())

    def _replicas(self, name: str) -> Replicas:
        return self.alive[name].sync.of(POOL)

    def _incarnation_of(self, name: str) -> SchedulerIncarnation:
        return (self.incarnations[name], name)

    def _new(self, blocks: int, seed: int) -> Request:
        self.made += 1
        return Request(self.made, blocks, seed)

    def _select(self, node: str, request: Request, session_id: str) -> SelectWorkerResponse:
        state_requested = selecting(request.key[0], routing(request.blocks, seed=request.seed))
        self.announced_at[node].add(request.key)
        return self.loop.run_until_complete(self.alive[node].select(state_requested, session_id))

    def _open(self, client: Client, node: str) -> None:
        parts = self.alive[node]
        client.node = node
        parts.booking_ownership.open_session(client.name, client.name)
        for request in client.runs.values():
            self.announced_at[node].add(request.key)
            parts.updates.reassert(request.reassert(), client.name)

    def _close(self, client: Client) -> None:
        if client.node:
            self.alive[client.node].booking_ownership.close_session(client.name, self.now)
            client.node = ""

    def _called(self, number: int, elsewhere: str | None) -> tuple[Parts, Request] | None:
        """A request, and the Scheduler that is called about it: its client's, or any."""
        homes = [(client.node, request) for client in self.clients for request in client.runs.values()]
        homes += [(max(leased.owners)[1], leased.request) for leased in self.leases.values()]
        found = _pick(homes, number)
        node = "" if found is None else elsewhere or found[0]
        if found is None or node not in self.alive:
            return None
        self.announced_at[node].add(found[1].key)
        return self.alive[node], found[1]

    def _forget(self, key: Key) -> None:
        self.leases.pop(key, None)
        for client in self.clients:
            client.runs.pop(key, None)

    def _exchange(self) -> None:
        """Everything is delivered, and every state that is wanted is fetched."""
        for _ in range(4):
            for name in self.alive:
                self.heartbeat(name)
            while any(self.flying.values()):
                for sender, to in list(self.flying):
                    self.deliver(sender, to, 1000)
            for name in self.alive:
                self.fetch(name)
            while self.fetches:
                self.fetch_on(0, loses=False)

    def _expected(self) -> dict[Key, Seen]:
        runs = [request for client in self.clients for request in client.runs.values()]
        runs += [leased.request for leased in self.leases.values()]
        return {run.key: (run.rank, run.prefilled, run.output) for run in runs if run.key not in self.unsure}

    def _table(self, parts: Parts) -> dict[Key, Seen]:
        return {
            booking.key: (booking.rank, booking.prefilled, booking.output_tokens)
            for booking in parts.booking_table
            if booking.key not in self.unsure
        }


T = TypeVar("T")


def _pick(items: list[T], number: int) -> T | None:
    return items[number % len(items)] if items else None


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """States come in many chunks."""
    monkeypatch.setattr(replica_state, "CHUNK_BYTES", 1)


Cluster.TestCase.settings = settings(max_examples=600 if FULL else 100, stateful_step_count=100 if FULL else 50)
TestCluster = Cluster.TestCase
