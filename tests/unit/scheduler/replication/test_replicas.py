"""What Schedulers announce to each other: sequences, gaps, digests, states, and the rank on which a booking counts."""

from __future__ import annotations

import struct

import pytest
import xxhash
from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.bookings.booking import SchedulerIncarnation
from kvrouter.scheduler.replication import event_log as replica_log
from kvrouter.scheduler.replication.announcer import AnnouncedBookings
from kvrouter.scheduler.replication.event_log import EventLog
from kvrouter.scheduler.replication.replicas import Replicas
from kvrouter.scheduler.replication.state_transfer import Fetch, StateBroken, chunks
from kvrouter.v1 import common_pb2
from kvrouter.v1.common_pb2 import BookingKey, Component, Stage
from kvrouter.v1.scheduler_pb2 import FreeRequest, MarkPrefillCompleteRequest, ReportOutputRequest
from kvrouter.v1.sync_pb2 import AddRequest, ReplicaSyncEvent, SyncHeartbeat, SyncStateResponse

from ..harness import BLOCK, POOL, Parts, prompt, routing, selecting, view, worker

OTHER: SchedulerIncarnation = (7, "other")


def key(number: int) -> Key:
    return (f"r{number}", 0, int(Stage.STAGE_WHOLE))


class Node:
    """A Scheduler that syncs, with what it has sent."""

    def __init__(self, name: str, incarnation: int = 1) -> None:
        self.parts = Parts(view(worker(1), worker(2)), scheduler=(incarnation, name))
        self.sent: list[ReplicaSyncEvent] = []
        self.parts.sync.send = lambda _, event: self.sent.append(event)

    @property
    def replicas(self) -> Replicas:
        return self.parts.sync.of(POOL)

    def receive(self, *events: ReplicaSyncEvent) -> None:
        for event in events:
            self.replicas.receive(ReplicaSyncEvent.FromString(event.SerializeToString()))

    def log(self) -> EventLog:
        (only,) = self.replicas.logs
        return only

    def rank(self, number: int) -> Rank:
        booking = self.parts.booking_table.get(key(number))
        assert booking is not None
        return booking.rank

    def quarantined(self, reason: str) -> float:
        return self.parts.figure("kvrouter_scheduler_sync_quarantined_total", reason=reason)


def event(sequence: int, scheduler: SchedulerIncarnation = OTHER, **fields: object) -> ReplicaSyncEvent:
    return ReplicaSyncEvent(
        scheduler_id=scheduler[1],
        incarnation=scheduler[0],
        sequence=sequence,
        component=Component(namespace=POOL.namespace, name=POOL.name),
        **fields,  # type: ignore[arg-type]
    )


def added(
    sequence: int, number: int, *, rank: int = 1, seed: int = 0, scheduler: SchedulerIncarnation = OTHER
) -> ReplicaSyncEvent:
    announced = AddRequest(
        booking=BookingKey(request_id=f"r{number}"),
        rank=common_pb2.Rank(worker_id=rank),
        sequence_hashes=prompt(2, seed=seed).sequence_hashes,
        prompt_tokens=2 * BLOCK,
        prefill_tokens=2 * BLOCK,
        session_id="theirs",
    )
    return event(sequence, scheduler, add_request=announced)


def heartbeat(sequence: int, owned: AnnouncedBookings) -> ReplicaSyncEvent:
    return event(sequence, heartbeat=SyncHeartbeat(digest=owned.digest, bookings=len(owned)))


def test_the_digest_is_the_sum_over_owned_bookings() -> None:
    owned = AnnouncedBookings()
    keys: list[Key] = [("a", 0, 1), ("b", 2, 2), ("\u00e9", 1, 3)]
    for each in keys:
        owned.put(each, "s")
    owned.prefilled(keys[0])
    assert not owned.prefilled(keys[0])
    owned.prefilled(keys[1])
    owned.put(keys[1], "another")
    assert owned.of_session("another") == [keys[1]]

    def term(each: Key, state: int) -> int:
        encoded = each[0].encode() + struct.pack("<IIB", each[1], each[2], state)
        return xxhash.xxh3_64_intdigest(encoded, seed=1337)

    states = {keys[0]: 1, keys[1]: 1, keys[2]: 0}
    while states:
        assert owned.digest == sum(term(each, state) for each, state in states.items()) % 2**64
        assert len(owned) == len(states)
        dropped, _ = states.popitem()
        assert owned.drop(dropped)
        assert not owned.drop(dropped)
    assert owned.digest == 0
    assert owned.of_session("s") == []


def test_events_are_applied_once_in_order_and_a_gap_is_detected() -> None:
    node = Node("n")
    node.receive(added(0, 0), added(0, 0), added(2, 2))
    assert node.log().state_requested == "gap"
    assert len(node.parts.booking_table) == 1
    node.receive(added(1, 1), added(2, 2))
    assert len(node.parts.booking_table) == 3
    assert node.log().next_sequence == 3
    assert node.quarantined("duplicate") == 2
    assert node.parts.figure("kvrouter_scheduler_sync_gaps_total") == 1


def test_a_heartbeat_reveals_lost_events_and_drift() -> None:
    node = Node("n")
    node.receive(added(0, 0))
    node.receive(heartbeat(1, node.log().announced))
    assert node.log().state_requested == ""
    other = AnnouncedBookings()
    node.receive(heartbeat(1, other))
    assert node.log().state_requested == "digest"
    assert node.parts.figure("kvrouter_scheduler_sync_digest_mismatches_total") == 1
    lagging = Node("m")
    lagging.receive(heartbeat(0, other), heartbeat(4, other))
    assert lagging.log().state_requested == "join"


def test_a_state_is_requested_once_for_a_digest_that_stays_wrong() -> None:
    log, wrong = EventLog(OTHER, 0.0), AnnouncedBookings()
    wrong.put(key(1), "")
    for _ in range(3):
        assert list(log.receive(heartbeat(0, wrong), 0.0)) == []
    assert log.state_requested == "digest"
    log.fetch()
    assert list(log.fetched(0)) == []
    assert list(log.receive(heartbeat(0, wrong), 0.0)) == []
    assert log.state_requested == ""


def test_events_that_wait_for_a_state_are_bounded_and_later_ones_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_log, "MAX_WAITING", 3)
    log = EventLog(OTHER, 0.0)
    log.fetch()
    for sequence in (5, 6, 7):
        assert list(log.receive(added(sequence, sequence), 0.0)) == []
    assert [each.sequence for each in log.fetched(6)] == [6, 7]
    assert log.next_sequence == 8
    for sequence in (10, 11, 12, 13):
        assert list(log.receive(added(sequence, sequence), 0.0)) == []
    log.fetch()
    assert list(log.fetched(10)) == []
    assert list(log.receive(added(10, 10), 0.0)) != []


def test_events_of_an_earlier_incarnation_are_fenced() -> None:
    node = Node("n")
    node.receive(
        added(0, 0, scheduler=(1, "other")), added(0, 1, scheduler=(2, "other")), added(1, 2, scheduler=(1, "other"))
    )
    assert node.quarantined("old_incarnation") == 1
    assert node.parts.booking_table.get(key(2)) is None
    # The earlier life's bookings are orphans: registered or not, their Scheduler is gone.
    node.parts.now += 11
    node.parts.sync.expire({"other"})
    assert [booking.key for booking in node.parts.booking_table] == [key(1)]


async def test_a_registered_incarnation_is_not_gone_even_if_it_is_silent() -> None:
    node = Node("n")
    node.receive(added(0, 0))
    node.parts.now += 1000
    node.parts.sync.expire({"other"})
    assert len(node.parts.booking_table) == 1
    node.parts.sync.expire(set())
    assert node.parts.idle()
    assert node.parts.figure("kvrouter_scheduler_sync_orphans_dropped_total") == 1


def test_of_two_placements_that_of_the_greater_incarnation_counts() -> None:
    node = Node("n")
    node.receive(added(0, 0, rank=1, scheduler=(1, "a")), added(0, 0, rank=2, scheduler=(2, "b")))
    assert node.rank(0) == (2, 0)
    late = Node("m")
    late.receive(added(0, 0, rank=2, scheduler=(2, "b")), added(0, 0, rank=1, scheduler=(1, "a")))
    assert late.rank(0) == (2, 0)
    for each in (node, late):
        each.receive(event(1, (1, "a"), mark_prefill_completed={"booking": {"request_id": "r0"}}))
        assert each.parts.load(2) == (2, 0, 1)
        each.receive(event(1, (2, "b"), session_ended={"session_id": "theirs"}))
        assert (each.rank(0), each.parts.load(1), each.parts.load(2)) == ((1, 0), (2, 0, 1), (0, 0, 0))


async def test_a_reused_id_with_another_prompt_is_quarantined_and_does_not_disturb_the_digest() -> None:
    node = Node("n")
    await node.parts.select(selecting("r0", routing(2)))
    node.receive(added(0, 0, seed=5))
    assert node.quarantined("already_exists") + node.quarantined("invalid_argument") == 1
    assert len(node.parts.booking_table) == 1
    node.receive(heartbeat(1, node.log().announced))
    assert node.log().state_requested == ""


async def test_a_free_that_overtakes_its_booking_holds() -> None:
    node = Node("n")
    node.receive(event(0, (1, "b"), free={"booking": {"request_id": "r0"}}), added(0, 0))
    assert node.parts.idle()


async def test_an_update_received_elsewhere_is_announced_again_by_the_owner() -> None:
    node = Node("n")
    await node.parts.select(selecting("r0", routing(2)))
    node.receive(event(0, mark_prefill_completed={"booking": {"request_id": "r0"}}))
    node.receive(event(1, output_progress={"booking": {"request_id": "r0"}, "output_tokens": 5}))
    node.receive(event(2, free={"booking": {"request_id": "r0"}}))
    kinds = [each.WhichOneof("event") for each in node.sent]
    assert kinds == ["add_request", "mark_prefill_completed", "output_progress", "free"]
    assert [each.sequence for each in node.sent] == [0, 1, 2, 3]
    assert len(node.replicas.announcer.announced) == 0
    assert node.parts.idle()


async def test_a_state_has_progress_of_others_bookings_and_comes_whole_or_not_at_all() -> None:
    sender, receiver = Node("sender"), Node("receiver")
    sender.receive(added(0, 0))
    sender.parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=BookingKey(request_id="r0")))
    for number in range(1, 4):
        await sender.parts.select(selecting(f"r{number}", routing(2, seed=number)))
    receiver.receive(added(0, 0))
    receiver.receive(sender.replicas.announcer.heartbeat())
    event_log = next(each for each in receiver.replicas.logs if each.scheduler == (1, "sender"))
    assert event_log.state_requested == "join"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrouter.scheduler.replication.state_transfer.CHUNK_BYTES", 1)
        parts = list(chunks(sender.replicas))
    assert len(parts) == 5
    broken = Fetch(receiver.replicas, event_log)
    assert not broken.take(parts[0])
    with pytest.raises(StateBroken):
        broken.take(parts[2])
    broken.give_up()
    assert event_log.state_requested
    fetch = Fetch(receiver.replicas, event_log)
    assert [fetch.take(part) for part in parts] == [False] * 4 + [True]
    assert not event_log.state_requested
    assert (event_log.announced.digest, len(event_log.announced)) == (sender.replicas.announcer.announced.digest, 3)
    assert sum(receiver.parts.load(each)[1] for each in (1, 2)) == 3 * 2 * BLOCK


def fetch_state(receiver: Node, sender: Node) -> None:
    """The receiver misses events of the sender, and fetches its state."""
    receiver.receive(sender.replicas.announcer.heartbeat())
    event_log = next(each for each in receiver.replicas.logs if each.scheduler == sender.parts.booking_table.here)
    fetch = Fetch(receiver.replicas, event_log)
    for chunk in chunks(sender.replicas):
        fetch.take(SyncStateResponse.FromString(chunk.SerializeToString()))


def report_progress(node: Node) -> None:
    booking = BookingKey(request_id="r0")
    node.parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=booking))
    node.parts.bookings.report_output(ReportOutputRequest(booking=booking, output_tokens=2 * BLOCK + 1))


def progress_of(node: Node) -> tuple[bool, int]:
    booking = node.parts.booking_table.get(key(0))
    assert booking is not None
    load = node.parts.load(booking.rank[0])
    assert load == (2 + 3 * bool(booking.output_tokens), 2 * BLOCK * (not booking.prefilled), 1)
    return booking.prefilled, booking.output_tokens


async def test_progress_reported_while_cut_off_from_the_owner_outlives_the_grace() -> None:
    owner, reporter = Node("owner"), Node("reporter")
    await owner.parts.select(selecting("r0", routing(2)))
    reporter.receive(*owner.sent)
    report_progress(reporter)  # its events do not reach the owner
    reporter.parts.now += 1000
    reporter.parts.sync.expire(set())
    assert reporter.parts.idle()

    fetch_state(owner, reporter)
    assert progress_of(owner) == (True, 2 * BLOCK + 1)
    assert owner.sent[-1].output_progress.output_tokens == 2 * BLOCK + 1


async def test_progress_of_a_dropped_booking_counts_when_it_returns() -> None:
    owner, reporter = Node("owner"), Node("reporter")
    await owner.parts.select(selecting("r0", routing(2)))
    reporter.receive(*owner.sent)
    report_progress(reporter)
    reporter.parts.now += 1000
    reporter.parts.sync.expire(set())

    fetch_state(reporter, owner)
    assert progress_of(reporter) == (True, 2 * BLOCK + 1)
    fetch_state(owner, reporter)
    assert progress_of(owner) == (True, 2 * BLOCK + 1)
    fetch_state(reporter, owner)
    assert progress_of(reporter) == (True, 2 * BLOCK + 1)


async def test_a_freed_booking_leaves_no_progress_behind() -> None:
    owner, reporter = Node("owner"), Node("reporter")
    await owner.parts.select(selecting("r0", routing(2)))
    reporter.receive(*owner.sent)
    report_progress(reporter)
    reporter.parts.now += 1000
    reporter.parts.sync.expire(set())
    reporter.parts.bookings.free(FreeRequest(booking=BookingKey(request_id="r0")))
    (state,) = chunks(reporter.replicas)
    assert (len(state.progress), [each.request_id for each in state.tombstones]) == (0, ["r0"])


async def test_progress_reported_to_a_former_owner_is_in_its_state() -> None:
    former, other = Node("former", 1), Node("other", 2)
    token = former.parts.booking_ownership.open_session("s", "client")
    await former.parts.select(selecting("r0", routing(2)), session_id="s")
    other.receive(*former.sent)
    await other.parts.select(selecting("r0", routing(2)))
    former.receive(*other.sent)
    report_progress(former)
    former.parts.booking_ownership.close_session("s", token, former.parts.now)
    former.parts.now += 1000
    former.parts.updates.expire()

    fetch_state(other, former)
    assert progress_of(other) == (True, 2 * BLOCK + 1)


async def test_a_booking_too_large_to_announce_is_counted_here_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrouter.scheduler.replication.announcer.MAX_ANNOUNCED_BYTES", 10)
    node = Node("n")
    await node.parts.select(selecting("r0", routing(2)))
    assert node.sent == []
    assert len(node.parts.booking_table) == 1
    assert node.quarantined("too_large") == 1


def test_strangers_are_bounded() -> None:
    node = Node("n")
    for number in range(100):
        node.receive(added(0, number, scheduler=(1, f"s{number}")))
    assert len(node.replicas.logs) == 64
    assert node.quarantined("too_many_replicas") == 36


def test_a_forged_incarnation_is_corrected_by_its_scheduler() -> None:
    sender, node = Node("other", incarnation=5), Node("n")
    node.receive(
        added(0, 0, scheduler=(5, "other")), added(0, 1, scheduler=(99, "other")), added(1, 2, scheduler=(5, "other"))
    )
    assert node.quarantined("old_incarnation") == 1
    lacking, disputed = node.replicas.due()
    assert (lacking, disputed) == ([], ["other"])
    node.replicas.settle("other", 5)
    assert node.log().scheduler == (5, "other"), "what was forged is forgotten"
    assert node.log().state_requested
    fetch = Fetch(node.replicas, node.log())
    assert [fetch.take(chunk) for chunk in chunks(sender.replicas)] == [True]
    assert node.log().next_sequence == sender.replicas.announcer.next_sequence
    assert len(node.parts.booking_table) == 0, "what the Scheduler does not hold is not counted"
    node.receive(added(0, 3, scheduler=(99, "other")))
    assert node.quarantined("unconfirmed_incarnation") == 1


def test_a_state_of_another_incarnation_settles_which_one_counts() -> None:
    sender, node = Node("other", incarnation=5), Node("n")
    node.receive(added(0, 1, scheduler=(99, "other")), added(3, 2, scheduler=(99, "other")))
    fetch = Fetch(node.replicas, node.log())
    with pytest.raises(StateBroken):
        fetch.take(next(chunks(sender.replicas)))
    fetch.give_up()
    assert node.log().scheduler == (5, "other")


def test_sequences_that_a_scheduler_never_sent_are_undone() -> None:
    sender, node = Node("other", incarnation=7), Node("n")
    node.receive(added(0, 0), added(1, 1), added(2, 2))
    node.receive(sender.replicas.announcer.heartbeat())
    assert node.log().state_requested == ""
    node.parts.now += 5
    node.receive(sender.replicas.announcer.heartbeat())
    assert node.log().state_requested == "behind"
    fetch = Fetch(node.replicas, node.log())
    assert [fetch.take(chunk) for chunk in chunks(sender.replicas)] == [True]
    assert (node.log().next_sequence, len(node.parts.booking_table)) == (0, 0)
    node.receive(sender.replicas.announcer.heartbeat())
    assert node.log().state_requested == ""


def test_states_that_bring_no_news_are_fetched_ever_more_rarely() -> None:
    sender, node = Node("other", incarnation=7), Node("n")
    fetches = 0
    for number in range(600):
        node.receive(added(100 + number, number))
        node.parts.now += 0.1
        for event_log in node.replicas.due()[0]:
            fetches += 1
            fetch = Fetch(node.replicas, event_log)
            assert [fetch.take(chunk) for chunk in chunks(sender.replicas)] == [True]
    assert fetches < 15
