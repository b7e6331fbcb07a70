"""Schedulers announce bookings to each other over a real NATS, and agree again after every disturbance."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any, cast

from kvrouter.devtools.system.servers import NatsServer
from kvrouter.net.nats.connection import connect_nats
from kvrouter.v1.common_pb2 import BookingKey, Component, RoutingConstraints, Stage
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    CloseSessionRequest,
    FreeRequest,
    MarkPrefillCompleteRequest,
    OpenSessionRequest,
    ReportOutputRequest,
)
from kvrouter.v1.sync_pb2 import AddRequest, ReplicaSyncEvent

from ..scheduling import BLOCK, eventually, routing, scheduling, selecting, soon
from .replicating import agreed, agreement, disconnects, figure, ranks, reaches, replicas


async def test_load_that_one_books_counts_at_all_and_any_may_change_it(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with replicas(3, namespace, etcd_endpoint, nats_url) as stacks:
        first, second, third = stacks
        for number in range(4):
            await first.select(selecting(f"r{number}", routing(4, seed=number)))
        await agreed(stacks)
        assert [await stack.booked() for stack in stacks] == [4, 4, 4]
        assert sum(blocks for _, blocks, _, _ in await ranks(third)) == 16

        key = BookingKey(request_id="r0")
        await second.scheduler.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key), deadline=soon())
        await second.scheduler.report_output(ReportOutputRequest(booking=key, output_tokens=BLOCK), deadline=soon())
        await eventually(lambda: ranks(first), lambda seen: sum(tokens for _, _, tokens, _ in seen) == 3 * 4 * BLOCK)
        await agreed(stacks)
        assert sum(blocks for _, blocks, _, _ in await ranks(third)) == 17

        freed = await third.scheduler.free(FreeRequest(booking=key), deadline=soon())
        assert freed.known
        await eventually(first.booked, lambda count: count == 3)
        await agreed(stacks)
        assert not (await first.scheduler.free(FreeRequest(booking=key), deadline=soon())).known
        for number in range(1, 4):
            await second.scheduler.free(FreeRequest(booking=BookingKey(request_id=f"r{number}")), deadline=soon())
        for stack in stacks:
            await eventually(stack.booked, lambda count: count == 0)
        assert {count for _, count, _ in (await agreed(stacks)).values()} == {0}


async def test_a_retried_selection_has_its_first_outcome_at_another_scheduler(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks:
        made = await stacks[0].select(selecting("r", routing(4)))
        await eventually(stacks[1].booked, lambda count: count == 1)
        again = await stacks[1].select(selecting("r", routing(4)))
        assert again.repeated
        assert (again.rank, again.endpoint, again.overlap_blocks) == (made.rank, made.endpoint, made.overlap_blocks)
        await agreed(stacks)
        assert [await stack.booked() for stack in stacks] == [1, 1]


async def test_a_scheduler_does_not_receive_its_own_events(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks, connect_nats(nats_url, "test") as client:
        events = await client.subscribe(stacks[0].component.sync_subject)
        await client.flush()
        for number in range(5):
            await stacks[0].select(selecting(f"r{number}", routing(4, seed=number)))
        await agreed(stacks)
        announced: list[int] = []
        while len(announced) < 5:
            event = ReplicaSyncEvent.FromString((await events.next_msg(timeout=20)).data)
            announced += [event.sequence] * event.HasField("add_request")
        assert announced == list(range(5)), "NATS delivers every event to every subscriber"
        assert (figure(stacks[0], "sync_sent_total"), figure(stacks[0], "sync_received_total")) == (5, 0)
        assert figure(stacks[1], "sync_received_total") == 5
        assert figure(stacks[0], "replicas") == 1, "not itself"
        assert [await stack.booked() for stack in stacks] == [5, 5]


async def test_one_without_sync_tells_nothing_and_hears_nothing(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with (
        replicas(2, namespace, etcd_endpoint, nats_url) as stacks,
        scheduling(stacks[0].component, etcd_endpoint, nats_url, how="object", instance_id="alone") as alone,
    ):
        await alone.register(1, 2)
        await alone.select(selecting("here", routing(4)))
        await stacks[0].select(selecting("there", routing(4, seed=1)))
        await agreed(stacks)
        assert [await stack.booked() for stack in (*stacks, alone)] == [1, 1, 1]
        assert await agreement(alone) == {}
        await alone.scheduler.free(FreeRequest(booking=BookingKey(request_id="there")), deadline=soon())
        await stacks[1].select(selecting("more", routing(4, seed=2)))
        await agreed(stacks)
        assert [await stack.booked() for stack in (*stacks, alone)] == [2, 2, 1]


async def test_replicas_in_sync_balance_load_like_one(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    """Who takes the emptier of two workers each time keeps them within one request of each other."""
    rng, largest = Random(5), 30
    async with replicas(4, namespace, etcd_endpoint, nats_url) as stacks:
        for number in range(40):
            await stacks[number % 4].select(selecting(f"r{number}", routing(rng.randint(1, largest), seed=number)))
            for stack in stacks:
                await eventually(stack.booked, lambda count: count == number + 1)  # noqa: B023 - awaited at once
            (_, one, _, _), (_, other, _, _) = await ranks(stacks[0])
            assert abs(one - other) <= largest


async def test_one_that_joins_gets_the_state(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(1, namespace, etcd_endpoint, nats_url) as stacks:
        # Several chunks of a state.
        for number in range(60):
            await stacks[0].select(selecting(f"r{number}", routing(500, seed=number)))
        await stacks[0].scheduler.mark_prefill_complete(
            MarkPrefillCompleteRequest(booking=BookingKey(request_id="r7")), deadline=soon()
        )
        component = ComponentName(namespace, "pool")
        async with scheduling(
            component,
            etcd_endpoint,
            nats_url,
            how="object",
            instance_id="late",
            replica_sync=True,
            replica_heartbeat_seconds=0.1,
        ) as late:
            await late.register(1, 2)
            await agreed([*stacks, late])
            assert await late.booked() == 60
            await reaches(lambda: figure(late, "sync_repairs_total", outcome="done"), 1)
            assert figure(late, "sync_repairs_total", outcome="done") == 1


async def test_a_session_that_ends_takes_its_bookings_at_all(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url, session_grace_seconds=0.2) as stacks:
        first, second = stacks
        first.scheduler.open_session(OpenSessionRequest(session_id="session", client_name="client"), deadline=soon())
        for number in range(3):
            await first.select(selecting(f"r{number}", routing(4, seed=number), session_id="session"))
        await first.select(selecting("leased", routing(4, seed=9)))
        await eventually(second.booked, lambda count: count == 4)
        first.scheduler.close_session(CloseSessionRequest(session_id="session"), deadline=soon())
        for stack in stacks:
            await eventually(stack.booked, lambda count: count == 1)
        await agreed(stacks)


async def test_a_partition_heals_to_agreement(own_nats: NatsServer, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, own_nats.url) as stacks:
        first, second = stacks
        for number in range(6):
            await stacks[number % 2].select(selecting(f"before{number}", routing(4, seed=number)))
        await agreed(stacks)
        await own_nats.kill()
        # What they say before they notice may be sent when NATS is back.
        for stack in stacks:
            await reaches(partial(disconnects, stack), 1)
        # Each decides by itself, and the clients of one free at the other what it does not hear of.
        for number in range(4):
            await stacks[number % 2].select(selecting(f"apart{number}", routing(4, seed=10 + number)))
        await first.scheduler.free(FreeRequest(booking=BookingKey(request_id="before1")), deadline=soon())
        await second.scheduler.free(FreeRequest(booking=BookingKey(request_id="before0")), deadline=soon())
        await second.scheduler.mark_prefill_complete(
            MarkPrefillCompleteRequest(booking=BookingKey(request_id="before2")), deadline=soon()
        )
        await first.scheduler.free(FreeRequest(booking=BookingKey(request_id="apart0")), deadline=soon())
        assert [await stack.booked() for stack in stacks] == [6, 7]
        await own_nats.start()
        await reaches(lambda: figure(first, "sync_gaps_total"), 1)
        await agreed(stacks)
        assert [await stack.booked() for stack in stacks] == [7, 7]
        assert sum(tokens for _, _, tokens, _ in await ranks(first)) == 6 * 4 * BLOCK
        assert figure(first, "sync_digest_mismatches_total") == 0


async def test_drift_is_detected_by_digest_and_repaired(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks:
        for number in range(3):
            await stacks[0].select(selecting(f"r{number}", routing(4, seed=number)))
        before = await agreed(stacks)
        # One that joined late has fetched a state already.
        repairs = figure(stacks[1], "sync_repairs_total", outcome="done")
        (scheduler, (sequence, _, _)) = next(
            (scheduler, announced) for scheduler, announced in before.items() if scheduler[0] == "s0"
        )
        # What no Scheduler sends: a booking under its next number that it knows nothing of.
        forged = ReplicaSyncEvent(
            scheduler_id=scheduler[0], incarnation=scheduler[1], sequence=sequence, component=stacks[0].named
        )
        forged.add_request.CopyFrom(AddRequest(booking=BookingKey(request_id="ghost"), prompt_tokens=1))
        forged.add_request.rank.worker_id = 1
        async with connect_nats(nats_url, "test") as client:
            await client.publish(stacks[0].component.sync_subject, forged.SerializeToString())
        await eventually(stacks[1].booked, lambda count: count == 4)
        await stacks[0].scheduler.free(FreeRequest(booking=BookingKey(request_id="r2")), deadline=soon())
        await reaches(lambda: figure(stacks[1], "sync_digest_mismatches_total"), 1)
        await agreed(stacks)
        assert await stacks[1].booked() == 2
        await reaches(lambda: figure(stacks[1], "sync_repairs_total", outcome="done"), repairs + 1)


async def test_messages_that_make_no_sense_are_counted_and_change_nothing(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks, connect_nats(nats_url, "test") as client:
        first = stacks[0]
        subject = first.component.sync_subject

        async def quarantined(reason: str, event: ReplicaSyncEvent | bytes) -> None:
            encoded = event if isinstance(event, bytes) else event.SerializeToString()
            before = figure(first, "sync_quarantined_total", reason=reason)
            await client.publish(subject, encoded)
            await reaches(lambda: figure(first, "sync_quarantined_total", reason=reason), before + 1)

        def event(**fields: Any) -> ReplicaSyncEvent:
            known: dict[str, Any] = {"scheduler_id": "stranger", "incarnation": 5, "component": first.named}
            return ReplicaSyncEvent(**(known | fields))

        def announced(sequence: int, **fields: Any) -> ReplicaSyncEvent:
            add: dict[str, Any] = {"booking": BookingKey(request_id="x"), "prompt_tokens": 1, "sequence_hashes": b""}
            return event(sequence=sequence, add_request=AddRequest(**(add | fields)))

        await quarantined("unparsable", b"\xff\xff\xff")
        await quarantined("other_component", event(component=Component(namespace="else", name="where")))
        await quarantined("own_id", event(scheduler_id="s0"))
        await quarantined("bad_incarnation", event(incarnation=1 << 63))
        await quarantined("bad_incarnation", event(incarnation=0))
        await quarantined("bad_id", event(scheduler_id="no.subject >"))
        # Blocks of another size: two hashes for as many tokens as one block has.
        await quarantined("invalid_argument", announced(0, prompt_tokens=BLOCK, sequence_hashes=bytes(16)))
        # No whole number of hashes.
        await quarantined("invalid_argument", announced(1, prompt_tokens=BLOCK, sequence_hashes=bytes(9)))
        await quarantined("invalid_argument", announced(2, booking=BookingKey(request_id="y" * 200)))
        await quarantined("invalid_argument", announced(3, booking=BookingKey(request_id="y", stage=cast(Stage, 77))))
        await quarantined("unknown_event", event(sequence=4))
        await quarantined("duplicate", event(sequence=4))
        await quarantined("old_incarnation", event(incarnation=4))
        await client.publish(first.component.sync_state_subject("s0"), b"")
        await reaches(lambda: figure(first, "sync_quarantined_total", reason="state_request"), 1)
        assert await first.booked() == 0
        await first.select(selecting("r", routing(4)))
        await eventually(stacks[1].booked, lambda count: count == 1)


async def test_a_forged_incarnation_silences_no_scheduler(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks, connect_nats(nats_url, "test") as client:
        await stacks[0].select(selecting("before", routing(4)))
        before = await agreed(stacks)
        incarnation = next(incarnation for name, incarnation in before if name == "s0")
        for number in range(1, 4):
            forged = ReplicaSyncEvent(scheduler_id="s0", incarnation=incarnation + number, component=stacks[0].named)
            forged.heartbeat.bookings = 0
            await client.publish(stacks[0].component.sync_subject, forged.SerializeToString())
        await reaches(lambda: figure(stacks[1], "sync_quarantined_total", reason="old_incarnation"), 1)
        await stacks[0].select(selecting("after", routing(4, seed=1)))
        # The Scheduler itself says which incarnation it is in, so that the forged ones are forgotten.
        assert {name for name, _ in await agreed(stacks)} == {"s0", "s1"}
        assert [await stack.booked() for stack in stacks] == [2, 2]
        assert figure(stacks[1], "sync_orphans_dropped_total") == 0


async def test_a_stranger_far_ahead_stops_nobody(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks, connect_nats(nats_url, "test") as client:
        ahead = ReplicaSyncEvent(scheduler_id="ghost", incarnation=5, sequence=1 << 60, component=stacks[0].named)
        await client.publish(stacks[0].component.sync_subject, ahead.SerializeToString())
        await reaches(lambda: figure(stacks[0], "sync_repairs_total", outcome="failed"), 1)
        await stacks[1].select(selecting("r", routing(4)))
        await eventually(stacks[0].booked, lambda count: count == 1)


async def test_bookings_of_a_scheduler_that_is_gone_are_kept_for_the_grace_alone(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with replicas(1, namespace, etcd_endpoint, nats_url, session_grace_seconds=60.0) as (survivor,):
        options: dict[str, Any] = {"replica_sync": True, "replica_heartbeat_seconds": 0.1}
        async with scheduling(
            survivor.component, etcd_endpoint, nats_url, how="object", instance_id="gone", **options
        ) as gone:
            await gone.register(1, 2)
            await gone.select(selecting("orphan", routing(4)))
            await gone.select(selecting("adopted", routing(4, seed=1)))
            await eventually(survivor.booked, lambda count: count == 2)
        repeated = await survivor.select(selecting("adopted", routing(4, seed=1)))
        assert repeated.repeated
        sync = survivor.service.status.sync
        assert sync is not None
        sync.of(survivor.component).grace_seconds = 0.0  # The grace is over.
        await eventually(survivor.booked, lambda count: count == 1)
        assert figure(survivor, "sync_orphans_dropped_total") == 1
        assert figure(survivor, "replicas") == 0


async def test_predictions_are_shared(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    options: dict[str, Any] = {"kv_events": False}
    async with replicas(2, namespace, etcd_endpoint, nats_url, **options) as stacks:
        first, second = stacks
        made = await first.select(selecting("r", routing(4)))
        await eventually(second.booked, lambda count: count == 1)
        loads = {load.rank.worker_id: load.overlap_blocks for load in await second.loads(routing(4))}
        assert loads == {made.rank.worker_id: 3, 3 - made.rank.worker_id: 0}


async def test_conversations_are_shared(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with replicas(2, namespace, etcd_endpoint, nats_url) as stacks:
        first, second = stacks
        made = await first.select(selecting("r", routing(4, conversation_id="talk")))
        await eventually(second.booked, lambda count: count == 1)
        there = RoutingConstraints(worker_id=made.rank.worker_id)
        follows = await second.select(selecting("next", routing(5, conversation_id="talk", constraints=there)))
        assert follows.overlap_blocks == 4
