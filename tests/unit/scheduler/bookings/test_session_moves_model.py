"""A booking has one owner, its client: no Scheduler keeps one that ended, and none that lives is lost.

Clients (the Frontend's own bookkeeping) move their sessions between Schedulers (with real leases) that may freeze.
A stream keeps its order, but what was sent before a move may come after what was sent by the next stream, or never. The
model is the list of requests that each client runs.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from kvrouter.frontend.schedulers.booking_updates import BookingUpdates, LiveBooking
from kvrouter.runtime.booking_updates import Free, Key, UpdateAnswer, UpdateCall, key_of
from kvrouter.scheduler.replication.replicas import Replicas
from kvrouter.scheduler.replication.state_transfer import Fetch, chunks
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.errors import KvRouterError, SessionLost
from kvrouter.v1.scheduler_pb2 import (
    CloseSessionRequest,
    OpenSessionRequest,
    OpenSessionResponse,
    SelectWorkerRequest,
    SelectWorkerResponse,
)
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent

from ..harness import BLOCK, POOL, Parts, prompt, routing, selecting, view, worker

GRACE = 10.0
NODES = ("n0", "n1")
FULL = os.environ.get("KVROUTER_FAULTS") == "full"

T = TypeVar("T")
Request = OpenSessionRequest | UpdateCall | SelectWorkerRequest
Response = OpenSessionResponse | UpdateAnswer | SelectWorkerResponse


def pick(items: list[T], number: int) -> T | None:
    return items[number % len(items)] if items else None


@dataclass
class Stream:
    """One stream between a client and a node, with what is on its way."""

    node: str
    closing: CloseSessionRequest
    requests: deque[Request] = field(default_factory=deque)
    responses: deque[tuple[Request, Response | None]] = field(default_factory=deque)
    """Each response with its request; None for a refusal."""
    undecided: list[SelectWorkerRequest] = field(default_factory=list)
    """Selections that the node has read and not decided."""
    unanswered: int = 0
    """Calls with updates."""
    open: bool = False
    left: bool = False
    """Whether the client has gone; the node has not noticed yet."""


class Client:
    """A Frontend's link, without its I/O."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.updates = BookingUpdates(name, name)
        self.stream: Stream | None = None
        self.waiting: dict[str, BookingKey] = {}
        self.sent: set[str] = set()
        self.live: dict[str, LiveBooking] = {}

    @property
    def keys(self) -> set[Key]:
        return {key_of(booking.key) for booking in self.live.values()}

    def open_at(self, node: str) -> Stream:
        opening = self.updates.opening()
        self.stream = Stream(node, self.updates.closing())
        self.stream.requests.append(opening)
        return self.stream

    def progress(self, booking: LiveBooking) -> None:
        update = self.updates.prefill_complete(booking)
        if self.stream is not None and self.stream.open:
            self.updates.unsent.append(update)
            self.send()
        self.updates.report_output(booking, booking.output_tokens + BLOCK)

    def send(self, *, all_of_them: bool = False) -> None:
        stream = self.stream
        if stream is None or not stream.open or (stream.unanswered and not all_of_them):
            return
        while self.updates.has_unsent:
            stream.unanswered += 1
            stream.requests.append(self.updates.next_call())

    def select(self, name: str) -> None:
        if self.stream is None or not self.stream.open:
            return
        self.send(all_of_them=True)
        select = SelectWorkerRequest(request=routing(2), booking=self.waiting[name])
        select.session_id, select.opening_number = self.name, self.updates.opening_number
        self.sent.add(name)
        self.stream.requests.append(select)

    def cancel(self, name: str) -> None:
        key = self.waiting.pop(name)
        if name in self.sent:
            self.updates.unsent.append(Free(key_of(key)))
            self.send()
        del self.updates.selecting[id(key)]

    def finish(self, name: str) -> None:
        booking = self.live.pop(name)
        self.updates.free(booking, Free(booking.value))
        self.send()

    def hear(self, request: Request, response: Response | None) -> None:
        assert self.stream is not None
        match request, response:
            case OpenSessionRequest(), OpenSessionResponse():
                self.updates.opened(response)
                self.stream.open = True
                self.send()
                for name in self.waiting:
                    self.select(name)
            case UpdateCall(), UpdateAnswer():
                self.stream.unanswered -= 1
                self.updates.answered(response, is_last=not self.stream.unanswered)
                self.send()
            case SelectWorkerRequest(), _:
                name = request.booking.request_id
                if name not in self.waiting:
                    return
                assert isinstance(response, SelectWorkerResponse), f"{name} is waited for, and refused"
                key = self.waiting.pop(name)
                booking = LiveBooking.of(key, response, prompt(2).local_hashes, 2 * BLOCK, BLOCK)
                self.live[name] = booking
                self.updates.live[booking] = None
                del self.updates.selecting[id(key)]


class Moves(RuleBasedStateMachine):
    """Clients and Schedulers that do not sync."""

    syncs = False
    numbers = st.integers(0, 3)
    nodes = st.sampled_from(NODES)
    which = st.integers(0, 1)
    mostly = st.sampled_from([True, True, True, False])

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.made = 0
        self.frozen: set[str] = set()
        self.parts: dict[str, Parts] = {}
        self.streams: list[Stream] = []
        self.events: dict[tuple[str, str], list[bytes]] = {}
        self.ended: list[BookingKey] = []
        for name in NODES:
            self.parts[name] = Parts(
                view(worker(1), worker(2)), grace=GRACE, scheduler=(1, name) if self.syncs else None
            )
            self.parts[name].now = self.now
            self.parts[name].sync.send = lambda _, event, name=name: self._replicate(name, event)  # type: ignore[misc]
        self.clients = [Client("c0"), Client("c1")]
        for client in self.clients:
            self.streams.append(client.open_at("n0"))

    def teardown(self) -> None:
        self.settle()
        for client in self.clients:
            for name in list(client.waiting):
                client.cancel(name)
            for name in list(client.live):
                self.ended.append(client.live[name].key)
                client.finish(name)
        self.settle()
        assert {name: len(parts.booking_table) for name, parts in self.parts.items()} == dict.fromkeys(NODES, 0)
        self.loop.close()

    # Requests.

    @rule(which=which, catches_up=mostly)
    def begin(self, which: int, catches_up: bool) -> None:
        client = self.clients[which]
        self.made += 1
        name = f"{client.name}-{self.made}"
        client.waiting[name] = BookingKey(request_id=name, stage=Stage.STAGE_WHOLE)
        client.updates.selecting[id(client.waiting[name])] = client.waiting[name]
        client.select(name)
        if catches_up:
            self.catch_up(which)

    @rule(which=which, number=numbers)
    def cancel(self, which: int, number: int) -> None:
        name = pick(list(self.clients[which].waiting), number)
        if name is not None:
            self.clients[which].cancel(name)

    @rule(which=which, number=numbers)
    def progress(self, which: int, number: int) -> None:
        client = self.clients[which]
        name = pick(list(client.live), number)
        if name is not None:
            booking = client.live[name]
            client.progress(booking)

    @rule(which=which, number=numbers, catches_up=mostly)
    def finish(self, which: int, number: int, catches_up: bool) -> None:
        client = self.clients[which]
        name = pick(list(client.live), number)
        if name is not None:
            self.ended.append(client.live[name].key)
            client.finish(name)
            if catches_up:
                self.catch_up(which)

    @rule(number=numbers, node=nodes)
    def free_once_more(self, number: int, node: str) -> None:
        key = pick(self.ended, number)
        if key is not None and node not in self.frozen:
            self.parts[node].updates.free(Free(key_of(key)))

    # Sessions.

    @rule(which=which, node=nodes, lost=st.sampled_from([0, 0, 1, 2]), catches_up=mostly)
    def move(self, which: int, node: str, lost: int, catches_up: bool) -> None:
        """The last messages of the stream that is left may be lost; those before them come whenever the node reads."""
        client = self.clients[which]
        if client.stream is not None:
            client.stream.left = True
            for _ in range(min(lost, len(client.stream.requests))):
                client.stream.requests.pop()
        self.streams.append(client.open_at(node))
        if catches_up:
            self.catch_up(which)

    @rule(which=which, number=numbers)
    def finish_elsewhere_and_come_back(self, which: int, number: int) -> None:
        client = self.clients[which]
        if client.stream is not None:
            home, away = client.stream.node, next(name for name in NODES if name != client.stream.node)
            self.move(which, away, lost=0, catches_up=True)
            self.finish(which, number, catches_up=True)
            self.move(which, home, lost=0, catches_up=True)

    @rule(which=which, number=numbers)
    def begin_twice_and_come_back(self, which: int, number: int) -> None:
        """A Scheduler stays behind with a selection that it has read; the other one answers it."""
        client = self.clients[which]
        if client.stream is not None:
            home, away = client.stream, next(name for name in NODES if name != client.stream.node)
            self.begin(which, catches_up=False)
            if home.node not in self.frozen:
                while home.requests:
                    self._serve(home, home.requests.popleft())
            self.move(which, away, lost=0, catches_up=True)
            self.finish(which, number, catches_up=True)
            self.move(which, home.node, lost=0, catches_up=True)

    @rule(number=numbers, count=st.integers(1, 6))
    def node_reads(self, number: int, count: int) -> None:
        stream = pick([each for each in self.streams if each.node not in self.frozen], number)
        if stream is None:
            return
        for _ in range(min(count, len(stream.requests))):
            self._serve(stream, stream.requests.popleft())
        if stream.left and not stream.requests:
            self._close(stream)

    @rule(number=numbers)
    def node_notices_that_a_client_has_left(self, number: int) -> None:
        stream = pick([each for each in self.streams if each.left and each.node not in self.frozen], number)
        if stream is not None:
            self._close(stream)

    @rule(number=numbers)
    def node_decides(self, number: int) -> None:
        waiting = [
            (each, request) for each in self.streams for request in each.undecided if each.node not in self.frozen
        ]
        found = pick(waiting, number)
        if found is not None:
            self._decide(*found)

    @rule(which=which, count=st.integers(1, 6))
    def client_reads(self, which: int, count: int) -> None:
        client = self.clients[which]
        for _ in range(count):
            if client.stream is not None and client.stream.responses:
                client.hear(*client.stream.responses.popleft())

    # Nodes.

    @rule(node=nodes)
    def freeze(self, node: str) -> None:
        self.frozen.add(node)

    @rule(node=nodes)
    def go_on(self, node: str) -> None:
        self.frozen.discard(node)
        self._expire()

    @rule(seconds=st.sampled_from([0.5, 4.0, GRACE + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._expire()

    @rule(sender=nodes, to=nodes, lost=st.booleans())
    def replicate(self, sender: str, to: str, lost: bool) -> None:
        queue = self.events.get((sender, to), [])
        if queue and to not in self.frozen:
            event = ReplicaSyncEvent.FromString(queue.pop(0))
            if not lost:
                self._replicas(to).receive(event)

    # What must hold.

    @rule(which=which)
    def catch_up(self, which: int) -> None:
        """A client and its Scheduler read everything: they agree at once, whatever other streams have left behind."""
        client = self.clients[which]
        stream = client.stream
        if stream is None or stream.node in self.frozen:
            return
        while stream.requests or stream.responses or stream.undecided:
            self._deliver(client)
        assert self._booked(stream.node, client) == client.keys

    def settle(self) -> None:
        """Everybody goes on, everything is delivered in any order, and graces end."""
        for name in NODES:
            self.go_on(name)
        for stream in [each for each in self.streams if each.left]:
            while stream.requests:
                self._serve(stream, stream.requests.popleft())
            for request in list(stream.undecided):
                self._decide(stream, request)
        for which in range(len(self.clients)):
            self.catch_up(which)
        for stream in [each for each in self.streams if each.left]:
            self._close(stream)
        for _ in range(3):
            self._exchange()
            self.wait(GRACE + 1)
        self._exchange()
        for name, parts in self.parts.items():
            here = [each for each in self.clients if each.stream is not None and each.stream.node == name]
            expected = set[Key]().union(*(each.keys for each in (self.clients if self.syncs else here)))
            assert {booking.key for booking in parts.booking_table} == expected, name
            for client in here:
                for known in client.live.values():
                    booking = parts.booking_table.get(key_of(known.key))
                    assert booking is not None
                    assert (booking.prefilled, booking.output_tokens) == (
                        known.prefill_complete,
                        known.output_tokens,
                    )

    # Means.

    def _booked(self, node: str, client: Client) -> set[Key]:
        """A client's bookings that a node owns; what it has heard from other nodes may be older."""
        booking_table = self.parts[node].booking_table
        return {
            each.key for each in booking_table if each.key[0].startswith(client.name) and booking_table.is_here(each)
        }

    def _deliver(self, client: Client) -> None:
        stream = client.stream
        assert stream is not None
        while stream.requests:
            self._serve(stream, stream.requests.popleft())
        for request in list(stream.undecided):
            self._decide(stream, request)
        while stream.responses:
            client.hear(*stream.responses.popleft())

    def _serve(self, stream: Stream, request: Request) -> None:
        """What a node does with a call, but for selections, which it decides later."""
        sessions = self.parts[stream.node].sessions
        response: Response | None = None
        try:
            match request:
                case SelectWorkerRequest():
                    stream.undecided.append(request)
                    return
                case OpenSessionRequest():
                    response = sessions.open(request)
                case UpdateCall():
                    response = sessions.update(request)
        except SessionLost:
            assert stream.left, "the session of its client"
        stream.responses.append((request, response))

    def _decide(self, stream: Stream, request: SelectWorkerRequest) -> None:
        stream.undecided.remove(request)
        response: Response | None = None
        wanted = selecting(request.booking.request_id, routing(2))
        with suppress(KvRouterError):
            selected = self.parts[stream.node].select(wanted, request.session_id, request.opening_number)
            response = self.loop.run_until_complete(selected)
        stream.responses.append((request, response))

    def _close(self, stream: Stream) -> None:
        self.streams.remove(stream)
        self.parts[stream.node].sessions.close(stream.closing)

    def _expire(self) -> None:
        for name, parts in self.parts.items():
            if name not in self.frozen:
                parts.now = self.now
                parts.updates.expire()
                parts.sync.expire(NODES)

    def _replicas(self, name: str) -> Replicas:
        return self.parts[name].sync.of(POOL)

    def _replicate(self, sender: str, event: ReplicaSyncEvent) -> None:
        for to in NODES:
            if to != sender:
                self.events.setdefault((sender, to), []).append(event.SerializeToString())

    def _exchange(self) -> None:
        """Every event is delivered, and every state that is missing is fetched."""
        if not self.syncs:
            return
        for _ in range(3):
            for name in NODES:
                self._replicate(name, self._replicas(name).announcer.heartbeat())
            while any(self.events.values()):
                for sender, to in list(self.events):
                    for event in self.events.pop((sender, to)):
                        self._replicas(to).receive(ReplicaSyncEvent.FromString(event))
            for name in NODES:
                for heard in [each for each in self._replicas(name).logs if each.state_requested]:
                    fetch = Fetch(self._replicas(name), heard)
                    for chunk in chunks(self._replicas(heard.scheduler[1])):
                        fetch.take(chunk)


class ReplicatedMoves(Moves):
    """The same with Schedulers that sync."""

    syncs = True


Moves.TestCase.settings = settings(max_examples=2000 if FULL else 200, stateful_step_count=60 if FULL else 30)
ReplicatedMoves.TestCase.settings = Moves.TestCase.settings
TestMoves = Moves.TestCase
TestReplicatedMoves = ReplicatedMoves.TestCase
