"""A relay beside an engine whose messages get lost, and which dies and comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import zmq.asyncio
from kvrouter.core import Scope
from kvrouter.devtools.system.ports import free_port, free_ports
from kvrouter.engines.events.vllm_sglang_events import Batch, Dialect, decode_batch
from kvrouter.engines.events.zmq_frames import encode_sequence, read_published
from kvrouter.engines.events.zmq_publisher import ZmqPublisher
from kvrouter.engines.relay import rank_relay
from kvrouter.net.budgets import PASS_US
from kvrouter.net.etcd import connect
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from structlog.testing import capture_logs

from ...captures import read_capture
from ..indexer.indexing import connected, indexing
from ..indexer.resync.truth import registration_of, resident_blocks
from .engine import (
    BLOCK,
    CLEARED,
    Engine,
    Relay,
    hashes_of,
    relaying,
    removed,
    settings,
    stored,
    tokens,
    until,
)

Beside = Callable[..., AbstractAsyncContextManager[Relay]]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def mute() -> AsyncIterator[Engine]:
    """An engine without a replay socket."""
    engine = Engine(replays=False)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def beside(namespace: str, etcd_endpoint: str, nats_url: str) -> Beside:
    """Runs a relay beside an engine."""

    def run(engine: Engine, /, **options: Any) -> AbstractAsyncContextManager[Relay]:
        return relaying(settings(namespace, etcd_endpoint, nats_url, engine, **options))

    return run


async def test_what_an_engine_published_before_the_relay_started(engine: Engine, beside: Beside) -> None:
    await engine.publish(stored([1, 2], 0))
    await engine.publish(stored([3], 8, parent=2), removed(1))
    async with beside(engine) as relay:
        await relay.holds(2, 3)
        assert not relay.partial
        await relay.is_connected()
        await engine.publish(removed(2, 3), stored([4], 40))
        await relay.holds(4)
        assert relay.count("losses_total") == 0
        assert relay.count("restarts_total") == 0


async def test_a_lost_message_is_replayed(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        await engine.publish(stored([2], 4, parent=1), live=False)
        await engine.publish(removed(1), live=False)
        await engine.publish(stored([3], 8, parent=2))
        await relay.holds(2, 3)
        assert relay.count("gaps_total") == 1
        assert relay.count("losses_total") == 0
        assert not relay.partial


async def test_a_message_that_cannot_be_replayed_costs_the_rank(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        await engine.publish(removed(1), live=False, kept=False)
        await engine.publish(stored([3], 40))
        await relay.holds(3)
        assert relay.partial
        assert relay.count("losses_total") == 1
        await engine.publish(CLEARED, stored([4], 80))
        await relay.holds(4)
        assert not relay.partial


async def test_an_engine_that_forgot_its_first_messages(engine: Engine, beside: Beside) -> None:
    for number in range(4):
        await engine.publish(stored([number + 1], number * BLOCK, parent=number or None))
    del engine.kept[:2]
    await engine.publish(stored([9], 90))
    async with beside(engine) as relay:
        await relay.holds(9)
        assert relay.partial
        assert relay.count("left_out_total", reason="unknown_parent") == 2


async def test_an_engine_without_replays(mute: Engine, beside: Beside) -> None:
    await mute.publish(stored([1], 0))
    async with beside(mute) as relay:
        await relay.is_connected()
        await mute.publish(stored([2], 40))
        await relay.holds(2)
        assert relay.partial
        await mute.publish(stored([3], 80), live=False)
        await mute.publish(stored([4], 120))
        await relay.holds(4)
        assert relay.count("losses_total") == 2
        await mute.restart()
        await until(lambda: relay.count("losses_total") == 3)
        assert relay.blocks() == set()
        await mute.publish(stored([5], 0))
        await relay.holds(5)
        assert relay.count("restarts_total") == 1
        assert not relay.partial


async def test_a_restart_is_noticed_although_nothing_is_published(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        await engine.restart()
        await relay.holds()
        assert relay.count("restarts_total") == 1
        assert not relay.partial
        await relay.is_connected()
        await engine.publish(stored([2], 0))
        await relay.holds(2)


async def test_a_restart_that_has_passed_the_last_message_is_no_gap(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        for number in range(3):
            await engine.publish(stored([number + 1], 40 * number))
        await relay.holds(1, 2, 3)
        engine.next_sequence = 0
        engine.kept.clear()
        for number in range(5):
            await engine.publish(stored([10 + number], 40 * number), live=number == 4)
        await relay.holds(10, 11, 12, 13, 14)
        assert relay.count("restarts_total") == 1
        assert relay.count("losses_total") == 0


@pytest.mark.parametrize("messages", [1, 2, 3, 4])
async def test_a_restarted_engine_counts_from_the_start(engine: Engine, beside: Beside, messages: int) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        for number in range(3):
            await engine.publish(stored([number + 1], 40 * number))
        await relay.holds(1, 2, 3)
        engine.next_sequence = 0
        engine.kept.clear()
        for number in range(messages):
            await engine.publish(stored([10 + number], 40 * number))
        await relay.holds(*range(10, 10 + messages))
        assert relay.count("restarts_total") == 1
        assert not relay.partial


async def test_live_messages_that_overlap_a_replay_count_once(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await engine.publish(stored([1], 0), live=False)
        for _ in range(20):
            await engine.publish(stored([2], 40))
        await until(lambda: relay.count("messages_total") + relay.count("duplicates_total") >= 22)
        await until(lambda: relay.count("messages_total") == 22)
        await engine.publish(*2 * [removed(1)], *20 * [removed(2)])
        await relay.holds()
        assert relay.worker.rank(0).stats().unknown_removals == 0


async def test_what_is_malformed_costs_little(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0), ["BlockStored"], stored([2], 40))
        await relay.holds(1, 2)
        for frames in ([b"kv"], [b"kv", b"short", b""], [b"kv", b"12345678", b"", b""]):
            await engine.send_frames(frames)
        await engine.publish(stored([3], 80))
        await relay.holds(1, 2, 3)
        assert relay.count("malformed_total") == 3
        assert relay.count("left_out_total", reason="malformed") == 1
        await engine.publish_raw(b"\x93")
        await engine.publish(stored([4], 120))
        await relay.holds(4)
        assert relay.partial
        assert relay.count("left_out_total", reason="undecodable_batch") == 1


async def test_wrong_copy_counting_is_reported(engine: Engine, beside: Beside) -> None:
    async with beside(engine, copy_counting="set") as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0), stored([1], 0), removed(1), removed(1))
        await until(lambda: relay.count("copy_counting_doubts_total") == 1)


async def test_chunks_that_are_offloaded_by_their_last_hash(engine: Engine, beside: Beside) -> None:
    async with beside(engine, offloaded_blocks=2) as relay:
        await relay.is_connected()
        await engine.publish(stored([1, 2, 3, 4], 0))
        await engine.publish(stored([4], 0, token_ids=[], block_size=0, medium="CPU"), removed(4, 3, 2, 1))
        await relay.holds(3, 4)


async def test_another_topic_is_ignored(engine: Engine, beside: Beside) -> None:
    async with beside(engine, kv_topic="kv") as relay:
        await relay.is_connected()
        payload = msgspec.msgpack.encode([1.0, [stored([9], 0)], 0])
        await engine.send_frames([b"kv-other", encode_sequence(0), payload])
        await engine.publish(stored([1], 0))
        await relay.holds(1)


async def test_a_message_of_another_rank_is_left_out(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish_raw(msgspec.msgpack.encode([1.0, [stored([9], 0)], 3]))
        await engine.publish(stored([1], 40))
        await relay.holds(1)
        assert relay.count("malformed_total") == 1


@pytest.mark.parametrize("frames_first", [True, False])
async def test_the_first_of_each_kind_of_malformed_message_is_logged(
    engine: Engine, beside: Beside, monkeypatch: pytest.MonkeyPatch, *, frames_first: bool
) -> None:
    # A logger that was used before in this process writes past ``capture_logs``.
    monkeypatch.setattr(rank_relay, "log", structlog.get_logger(component="relay"))
    other = msgspec.msgpack.encode([1.0, [stored([9], 0)], 3])
    with capture_logs() as logs:
        async with beside(engine) as relay:
            await relay.is_connected()
            for is_frames in (frames_first, not frames_first):
                for _ in range(2):
                    await (engine.send_frames([b"kv"]) if is_frames else engine.publish_raw(other))
            await until(lambda: relay.count("malformed_total") == 4)
    logged = [log["event"] for log in logs if log["event"] in ("relay.message_malformed", "relay.other_rank")]
    assert sorted(logged) == ["relay.message_malformed", "relay.other_rank"]


async def test_routers_avoid_a_worker_whose_engine_is_away(
    engine: Engine, beside: Beside, namespace: str, etcd_endpoint: str
) -> None:
    async def until_draining(draining: bool) -> None:
        async with asyncio.timeout(30), connect(etcd_endpoint) as client:
            key = ComponentName(namespace, "workers").worker_key(relay.worker.config.worker_id).encode()
            while (found := await client.get(key)) is None or (
                WorkerRegistration.FromString(found.value).draining != draining
            ):
                await asyncio.sleep(0.01)

    async with beside(engine) as relay:
        await relay.is_connected()
        await until_draining(False)
        await engine.stop()
        await until_draining(True)
        await engine.start()
        await until_draining(False)


async def test_a_relay_resumes_where_it_was(engine: Engine, beside: Beside, tmp_path: Path) -> None:
    resumable = {"state": tmp_path, "worker_id": 7}
    await engine.publish(stored([1], 0))
    async with beside(engine, **resumable) as relay:
        await relay.holds(1)
        incarnation = relay.worker.incarnation
    await engine.publish(stored([2], 4, parent=1))
    del engine.kept[:0]
    async with beside(engine, **resumable) as relay:
        await relay.holds(1, 2)
        assert relay.worker.incarnation == incarnation
        assert relay.count("messages_total") == 1
        assert engine.requests[-1] in (0, 1)


async def test_a_relay_does_not_resume_beside_another_engine(engine: Engine, beside: Beside, tmp_path: Path) -> None:
    resumable = {"state": tmp_path, "worker_id": 7}
    await engine.publish(stored([1], 0))
    async with beside(engine, **resumable) as relay:
        await relay.holds(1)
        incarnation = relay.worker.incarnation
    await engine.restart()
    await engine.publish(stored([2], 40))
    async with beside(engine, **resumable) as relay:
        await relay.holds(2)
        assert relay.worker.incarnation > incarnation
        assert not relay.partial


async def test_a_relay_begins_anew_if_the_engine_forgot_what_it_missed(
    engine: Engine, beside: Beside, tmp_path: Path
) -> None:
    resumable = {"state": tmp_path, "worker_id": 7}
    await engine.publish(stored([1], 0))
    async with beside(engine, **resumable) as relay:
        await relay.holds(1)
    await engine.publish(removed(1))
    await engine.publish(stored([2], 40))
    del engine.kept[:2]
    async with beside(engine, **resumable) as relay:
        await relay.holds(2)
        assert relay.partial


async def test_every_rank_has_sockets_of_its_own(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    first = free_ports(4).start
    base = Engine()
    base.events_endpoint, base.replay_endpoint = f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 2}"
    publishers = [
        ZmqPublisher(
            f"tcp://127.0.0.1:{first + rank}",
            replay_endpoint=f"tcp://127.0.0.1:{first + 2 + rank}",
            block_size=BLOCK,
            dp_rank=rank,
        )
        for rank in (0, 1)
    ]
    with publishers[0] as zero, publishers[1] as one:
        zero.stored(token_ids=tokens(0, 1), engine_hashes=[1])
        one.stored(token_ids=tokens(0, 2), engine_hashes=[8, 9])
        async with relaying(settings(namespace, etcd_endpoint, nats_url, base, dp_size=2)) as relay:
            await relay.holds(1)
            await relay.holds(8, 9, dp_rank=1)


async def test_an_engine_may_serve_only_a_later_rank(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    first = free_ports(4).start
    base = Engine()
    base.events_endpoint, base.replay_endpoint = f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 2}"
    publisher = ZmqPublisher(
        f"tcp://127.0.0.1:{first + 1}", replay_endpoint=f"tcp://127.0.0.1:{first + 3}", block_size=BLOCK, dp_rank=1
    )
    with publisher:
        publisher.stored(token_ids=tokens(0, 1), engine_hashes=[1])
        async with relaying(settings(namespace, etcd_endpoint, nats_url, base, dp_start_rank=1)) as relay:
            await relay.holds(1, dp_rank=1)
            assert relay.count("malformed_total", dp_rank=1) == 0


async def test_what_the_sdk_publishes_reaches_the_index(engine: Engine, beside: Beside) -> None:
    await engine.stop()
    publisher = ZmqPublisher(
        engine.events_endpoint, replay_endpoint=engine.replay_endpoint, topic="kv@pod@m", block_size=BLOCK
    )
    scope = Scope(lora_name="adapter", cache_salt="salt")
    with publisher:
        publisher.stored(token_ids=tokens(0, 2), engine_hashes=[1, 2], scope=scope)
        async with beside(engine, kv_topic="kv@pod@m") as relay:
            await relay.holds(1, 2)
            await relay.is_connected()
            with publisher.batch():
                publisher.stored(token_ids=tokens(8, 1), engine_hashes=[3], parent=2, scope=scope)
                publisher.stored(token_ids=tokens(0, 1), engine_hashes=[-1], tier=Tier.TIER_HOST)
                publisher.removed([2])
            await relay.holds(1, 3, (1 << 64) - 1)
            assert relay.count("messages_total") == 2
            scoped = list(hashes_of(tokens(0, 3), scope))
            assert relay.local_hashes() == {scoped[0], scoped[2], *hashes_of(tokens(0, 1))}
            publisher.cleared()
            await relay.holds()


@pytest.mark.parametrize(("name", "dialect"), [("capture_vllm.bin", "vllm"), ("capture_sglang.bin", "sglang")])
async def test_recordings_of_engines_are_relayed(engine: Engine, beside: Beside, name: str, dialect: str) -> None:
    messages = [message for frames in read_capture(name) if (message := read_published(frames))]
    async with beside(engine, block_size=16, engine=dialect) as relay:
        await relay.is_connected()
        for message in messages[:-1]:
            # Every third message is lost, and replayed before the next one.
            await engine.publish_raw(message.payload, live=message.sequence % 3 != 1)
        await until(lambda: relay.count("messages_total") == len(messages) - 1)
        assert relay.blocks()
        await engine.publish_raw(messages[-1].payload)
        await relay.holds()
        assert relay.count("losses_total") == 0
        assert relay.worker.rank(0).stats().unknown_removals == 0


@pytest.mark.parametrize("transport", ["durable", "core-nats"])
@pytest.mark.parametrize(("name", "dialect"), [("capture_vllm.bin", "vllm"), ("capture_sglang.bin", "sglang")])
async def test_an_index_equals_the_recorded_engine(
    engine: Engine, beside: Beside, namespace: str, nats_url: str, name: str, dialect: str, transport: str
) -> None:
    messages = [message for frames in read_capture(name) if (message := read_published(frames))]
    async with (
        beside(engine, block_size=16, engine=dialect, worker_id=5, transport=transport) as relay,
        connected(nats_url) as connection,
        indexing(connection, ComponentName(namespace, "workers"), block_size=16) as index,
    ):
        index.update_workers({5: registration_of(relay.worker)})
        await relay.is_connected()
        sizes = []
        for number, message in enumerate(messages, start=1):
            await engine.publish_raw(message.payload, live=number % 4 != 2)
            if number % 4 == 2:  # shows with the next message
                continue
            async with asyncio.timeout(30):
                await until(lambda done=number: relay.count("messages_total") == done)
                while await resident_blocks(index, 5) != relay.blocks():
                    await asyncio.sleep(0.01)
            sizes.append(len(relay.blocks()))
        assert max(sizes) > 8
        assert sizes[-1] == 0
        assert index.state.events.tally.repairs == 0


async def test_the_recorded_restart_of_an_engine(engine: Engine, beside: Beside) -> None:
    before = [message for frames in read_capture("capture_vllm.bin") if (message := read_published(frames))]
    after = [message for frames in read_capture("capture_vllm_restart.bin") if (message := read_published(frames))]
    async with beside(engine, block_size=16) as relay:
        await relay.is_connected()
        for message in before[:8]:
            await engine.publish_raw(message.payload)
        await until(lambda: relay.count("messages_total") == 8)
        # In the same process, as seen from the relay: the numbers begin again, and nothing is cleared.
        engine.next_sequence = 0
        engine.kept.clear()
        for message in after:
            await engine.publish_raw(message.payload)
        await until(lambda: relay.count("restarts_total") == 1 and relay.count("blocks") == 4)
        assert not relay.partial


async def test_an_engine_that_restarts_with_another_block_size_is_left_out(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        await engine.restart()
        await engine.publish(stored([2], 0, token_ids=list(range(6)), block_size=6))
        await until(lambda: relay.count("left_out_total", reason="block_size") == 1)
        assert relay.blocks() == set()
        assert relay.partial


async def test_ten_thousand_events_in_a_message(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(*(stored([number + 1], number * BLOCK) for number in range(10_000)))
        await until(lambda: relay.count("blocks") == 10_000)


async def test_a_relay_that_listens_for_engines(engine: Engine, beside: Beside) -> None:
    await engine.stop()
    port = free_port()
    engine.events_endpoint = f"tcp://*:{port}"
    engine.replay_endpoint = ""
    context = zmq.asyncio.Context()
    async with beside(engine) as relay:
        publisher = context.socket(zmq.XPUB)
        publisher.connect(f"tcp://127.0.0.1:{port}")
        assert await publisher.recv() == b"\x01"  # the subscription, without which a message is lost
        payload = msgspec.msgpack.encode([1.0, [stored([1], 0)], 0])
        await publisher.send_multipart([b"kv", encode_sequence(0), payload])
        await relay.holds(1)
    context.destroy(linger=0)


async def test_the_event_loop_runs_between_a_backlog_of_messages(engine: Engine, beside: Beside) -> None:
    backlog = 1_000
    for number in range(backlog):
        await engine.publish(stored([number + 1], number * BLOCK))
    in_a_pass = 0
    async with beside(engine) as relay:
        applied = 0
        while applied < backlog:
            await asyncio.sleep(0)
            before, applied = applied, int(relay.count("messages_total"))
            in_a_pass = max(in_a_pass, applied - before)
    # At least 100 us are estimated for a message, and two counts may be up to two passes apart.
    assert in_a_pass <= 2 * PASS_US / 100


async def test_a_long_message_is_applied_by_a_thread(
    engine: Engine, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders: dict[int, bool] = {}

    def decode(payload: bytes, dialect: Dialect) -> Batch:
        decoders[len(payload)] = threading.current_thread() is threading.main_thread()
        return decode_batch(payload, dialect)

    monkeypatch.setattr("kvrouter.engines.relay.rank_relay.decode_batch", decode)
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await engine.publish(stored(list(range(2, 20_001)), BLOCK, parent=1))
        await relay.holds(*range(1, 20_001))
    short, long = sorted(decoders)
    assert decoders[short]
    assert not decoders[long]
