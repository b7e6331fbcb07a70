"""An engine or its relay ends and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvrouter.engines.events.zmq_frames import read_published
from kvrouter.net.etcd import connect
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

from ...captures import read_capture
from ...waiting import until
from .engine import Beside, Engine, removed, stored


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
        engine.forget()
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
        engine.forget()
        for number in range(messages):
            await engine.publish(stored([10 + number], 40 * number))
        await relay.holds(*range(10, 10 + messages))
        assert relay.count("restarts_total") == 1
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


async def test_the_recorded_restart_of_an_engine(engine: Engine, beside: Beside) -> None:
    before = [message for frames in read_capture("capture_vllm.bin") if (message := read_published(frames))]
    after = [message for frames in read_capture("capture_vllm_restart.bin") if (message := read_published(frames))]
    async with beside(engine, block_size=16) as relay:
        await relay.is_connected()
        for message in before[:8]:
            await engine.publish_raw(message.payload)
        await until(lambda: relay.count("messages_total") == 8)
        # In the same process, as seen from the relay: the numbers begin again, and nothing is cleared.
        engine.forget()
        for message in after:
            await engine.publish_raw(message.payload)
        await until(lambda: relay.count("restarts_total") == 1 and relay.count("blocks") == 4)
        assert not relay.partial


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
