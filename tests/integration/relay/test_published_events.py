"""What engines and the SDK publish reaches the index: recordings, many ranks, long messages."""

from __future__ import annotations

import asyncio
import threading

import pytest
from kvrouter.core import Scope
from kvrouter.devtools.system.ports import free_ports
from kvrouter.engines.events.vllm_sglang_events import Batch, Dialect, decode_batch
from kvrouter.engines.events.zmq_frames import read_published
from kvrouter.engines.events.zmq_publisher import ZmqPublisher
from kvrouter.net.budgets import PASS_US
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.names import ComponentName

from ...captures import read_capture
from ...waiting import until
from ..indexer.indexing import connected, indexing
from ..indexer.resync.truth import registration_of, resident_blocks
from .engine import BLOCK, Beside, Engine, hashes_of, relaying, settings, stored, tokens


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
        workers = {5: registration_of(relay.worker)}
        index.update_workers(workers)
        await until(lambda: index.has_compared(workers))  # It has subscribed to live events.
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


async def test_ten_thousand_events_in_a_message(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(*(stored([number + 1], number * BLOCK) for number in range(10_000)))
        await until(lambda: relay.count("blocks") == 10_000)


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
