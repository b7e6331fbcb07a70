"""A relay stays up whatever an engine sends, and when it sends nothing any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from kvrouter.engines.relay import engine_sockets

from ...faults.wires import Wire
from ...waiting import until
from .engine import Beside, Engine, removed, stored


class SilentWire(Wire):
    """Loses everything while it is silent, without closing the connection."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.is_silent = False

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                if not self.is_silent:
                    writer.write(piece)
                    await writer.drain()


async def test_a_frame_beyond_the_limit_costs_the_rank_but_not_the_relay(
    engine: Engine, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "MAX_FRAME_BYTES", 2_000)
    async with beside(engine, replay_seconds=0.2) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        # Neither read live nor replayed, so removals in it would be unknown.
        await engine.publish(removed(*range(1000)))
        await relay.holds()
        assert relay.partial
        # A message is lost while the new subscription is on its way, and none of them can be replayed.
        while relay.blocks() != {2}:
            await engine.publish(stored([2], 0))
            await asyncio.sleep(0.02)


async def test_a_connection_that_went_silent_is_given_up_and_made_again(
    engine: Engine, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "HEARTBEAT_MS", 200)
    wire = SilentWire(int(engine.events_endpoint.rpartition(":")[2]))
    async with wire.laid(), beside(engine, kv_events=f"tcp://{wire.address}") as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        wire.is_silent = True
        await engine.publish(stored([2], 4, parent=1))
        await until(lambda: relay.count("connected") == 0)
        wire.is_silent = False
        await relay.holds(1, 2)
        assert not relay.partial


async def test_a_batch_with_too_many_events_costs_the_rank_but_not_the_relay(engine: Engine, beside: Beside) -> None:
    async with beside(engine) as relay:
        await relay.is_connected()
        await engine.publish(stored([1], 0))
        await relay.holds(1)
        await engine.publish_raw(b"\x92\x00\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20))
        await engine.publish(stored([2], 0))
        await relay.holds(2)
        assert relay.partial
        assert relay.count("left_out_total", reason="undecodable_batch") == 1
