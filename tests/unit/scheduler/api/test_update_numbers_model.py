"""Numbered updates reach a Scheduler in order and once, whatever happens to the calls that carry them.

A client sends updates to two Schedulers, at which it opens its session in turn. Calls are delayed, repeated, overtaken
by others, and lost with their answers when the connection breaks. The model is the list of all updates.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, TypeVar, cast

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvrouter.frontend.schedulers import booking_updates
from kvrouter.frontend.schedulers.booking_updates import BookingUpdates
from kvrouter.runtime.booking_updates import Free, OutputReport, PrefillComplete, UpdateAnswer, UpdateCall
from kvrouter.scheduler.api.sessions import Sessions
from kvrouter.scheduler.bookings.ownership import BookingOwnership
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.bookings.updates import BookingUpdates as Bookings
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import SessionLost

NODES = ("n0", "n1")
FULL = os.environ.get("KVROUTER_FAULTS") == "full"
T = TypeVar("T")


class Recording:
    """Records updates in place of the bookings of a Scheduler."""

    def __init__(self) -> None:
        self.applied: list[str] = []

    def record(self, update: Free | OutputReport | PrefillComplete) -> None:
        self.applied.append(update.key[0])

    mark_prefill_complete = report_output = free = record


class Node:
    """A Scheduler's sessions over a recording."""

    def __init__(self) -> None:
        self.recording = Recording()
        ownership = BookingOwnership(BookingTable(), session_grace_seconds=10)
        bookings = cast(Bookings, self.recording)
        self.sessions = Sessions(ownership, bookings, scheduler_id="", grace_seconds=10, clock=lambda: 0.0)


class NumberedUpdates(RuleBasedStateMachine):
    """A client and two Schedulers."""

    which = st.integers(0, 7)
    nodes = st.sampled_from(NODES)

    def __init__(self) -> None:
        super().__init__()
        # So small that updates of one opening travel in several calls.
        self.batch_bytes, booking_updates.BATCH_BYTES = booking_updates.BATCH_BYTES, 40
        self.servers = {name: Node() for name in NODES}
        self.client = BookingUpdates("s", "c")
        self.all: list[str] = []
        self.node = ""
        """The node at which the session is open; empty while it is not."""
        self.calls: list[tuple[str, UpdateCall]] = []
        """Calls under way, with those of earlier openings."""
        self.answers: list[tuple[int, UpdateAnswer]] = []
        """Answers under way, with the number of the opening."""
        self.unanswered = 0

    def teardown(self) -> None:
        self.settle()
        booking_updates.BATCH_BYTES = self.batch_bytes

    @rule(kind=st.integers(0, 2))
    def add(self, kind: int) -> None:
        name = f"{len(self.all):04}"
        key = (name, 0, Stage.STAGE_WHOLE)
        self.all.append(name)
        if kind == 0:
            self.client.unsent.append(Free(key))
        elif kind == 1:
            self.client.unsent.append(PrefillComplete(key))
        else:
            self.client.unsent.append(OutputReport(key, 1))

    @rule(waits=st.booleans())
    def send(self, waits: bool) -> None:
        """Sends everything, or nothing while a call is unanswered."""
        if not self.node or (waits and self.unanswered):
            return
        while self.client.unsent:
            self.calls.append((self.node, self.client.next_call()))
            self.unanswered += 1

    @rule(which=which, again=st.booleans())
    def deliver(self, which: int, again: bool) -> None:
        """A call arrives, perhaps after later ones, and perhaps once more."""
        if self.calls:
            at = which % len(self.calls)
            node, request = self.calls[at] if again else self.calls.pop(at)
            try:
                response = self.servers[node].sessions.update(request)
            except SessionLost:
                assert request.opening_number != self.client.opening_number or not self.node
                return
            if not again:
                self.answers.append((request.opening_number, response))

    @rule(which=which)
    def answer(self, which: int) -> None:
        if self.answers:
            opening_number, response = self.answers.pop(which % len(self.answers))
            if self.node and opening_number == self.client.opening_number:
                self.unanswered -= 1
                self.client.answered(response, is_last=not self.unanswered)

    @rule(node=nodes, lost=st.integers(0, 7), is_answered=st.booleans())
    def open_again(self, node: str, lost: int, is_answered: bool) -> None:
        """The connection breaks: some of its calls are lost, others arrive later, and no answer is heard."""
        del self.calls[len(self.calls) - min(lost, len(self.calls)) :]
        self.answers.clear()
        self.unanswered = 0
        response = self.servers[node].sessions.open(self.client.opening())
        self.node = ""
        if is_answered:
            self.client.opened(response)
            self.node = node

    @rule()
    def catch_up(self) -> None:
        """Everything arrives and is answered: nothing is left, without another opening."""
        for rounds in itertools.count():
            if not self.node or not (self.calls or self.answers):
                break
            assert rounds < 50, "the same updates are sent for ever"
            while self.calls:
                self.deliver(len(self.calls) - 1, again=False)
            while self.answers:
                self.answer(0)
            self.send(waits=True)
        if self.node:
            self.send(waits=True)

    @invariant()
    def each_node_applies_every_update_once_and_in_order(self) -> None:
        for server in self.servers.values():
            applied = server.recording.applied
            assert applied == sorted(set(applied))

    @invariant()
    def what_a_node_applies_leaves_no_gap_since_the_opening(self) -> None:
        applied = {name for server in self.servers.values() for name in server.recording.applied}
        assert sorted(applied) == self.all[: len(applied)]

    def settle(self) -> None:
        """The session is open, and nothing is lost any more."""
        if not self.node:
            self.open_again("n0", 0, is_answered=True)
        self.send(waits=True)
        self.catch_up()
        assert not self.client.unsent
        applied = {name for server in self.servers.values() for name in server.recording.applied}
        assert sorted(applied) == self.all


NumberedUpdates.TestCase.settings = settings(
    max_examples=2000 if FULL else 100, stateful_step_count=60 if FULL else 40, deadline=None
)
TestNumberedUpdates = NumberedUpdates.TestCase


def test_what_waits_for_too_long_is_replaced_by_the_next_opening(monkeypatch: Any) -> None:
    monkeypatch.setattr(booking_updates, "MAX_UPDATES", 4)
    node, client = Node(), BookingUpdates("s", "c")
    client.opened(node.sessions.open(client.opening()))
    for number in range(6):
        key = (f"r{number}", 0, Stage.STAGE_WHOLE)
        client.unsent.append(OutputReport(key, 1))
        client.unsent.append(Free(key))
    assert client.overflowed
    client.opened(node.sessions.open(client.opening()))
    request = client.next_call()
    response = node.sessions.update(request)
    client.answered(response, is_last=True)
    assert (request.first_number, response.acknowledged, len(client.unsent)) == (13, 18, 0)
    assert node.recording.applied == [f"r{number}" for number in range(6)]
