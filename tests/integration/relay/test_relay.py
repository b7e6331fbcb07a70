"""A relay beside an engine whose messages get lost, or are malformed."""

from __future__ import annotations

import msgspec
import pytest
import structlog
import zmq.asyncio
from kvrouter.devtools.system.ports import free_port
from kvrouter.engines.events.zmq_frames import encode_sequence
from kvrouter.engines.relay import rank_relay
from structlog.testing import capture_logs

from ...waiting import until
from .engine import BLOCK, CLEARED, Beside, Engine, removed, stored


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
        await mute.subscribed()
        await mute.publish(stored([5], 0))
        await relay.holds(5)
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
