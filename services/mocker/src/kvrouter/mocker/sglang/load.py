"""Load of each rank on SGLang's sockets for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from kvrouter.engines.events.zmq_sockets import EventSockets
from kvrouter.mocker.driver import EngineDriver
from kvrouter.mocker.serving.kv_events import KvEventsConfig

TOPIC = "load"
_INTERVAL_SECONDS = 0.05
"""Time between two looks at the load."""
_HEARTBEAT_SECONDS = 1.0
"""Time after which an unchanged load is published again, as SGLang does."""


def base_endpoint(option: str, config: KvEventsConfig, dp_size: int) -> str:
    """Returns the endpoint of rank 0, from the option ``--load-publish-endpoint``.

    With "auto" the ports follow those of the events, or of the replays where these are in the way.
    """
    if option != "auto":
        return option
    host, _, port = config.endpoint.rpartition(":")
    base = int(port) and int(port) + dp_size
    replays = int((config.replay_endpoint or ":0").rpartition(":")[2])
    if base and replays - dp_size < base < replays + dp_size:
        base = replays + dp_size
    return f"{host}:{base}"


class LoadPublisher:
    """Publishes the load of all ranks when it changes."""

    def __init__(self, sockets: Mapping[int, EventSockets], drivers: Mapping[int, EngineDriver]) -> None:
        self._sockets = sockets
        self._drivers = drivers
        self._published: dict[int, tuple[float, list[Any]]] = {}

    async def run(self) -> None:
        """Publishes until cancelled."""
        while True:
            now = time.monotonic()
            for dp_rank, sockets in self._sockets.items():
                stat = _stat(dp_rank, self._drivers[dp_rank])
                at, last = self._published.get(dp_rank, (0.0, []))
                if stat != last or now - at >= _HEARTBEAT_SECONDS:
                    sockets.publish(msgspec.msgpack.encode(stat))
                    self._published[dp_rank] = now, stat
            await asyncio.sleep(_INTERVAL_SECONDS)


def _stat(dp_rank: int, driver: EngineDriver) -> list[Any]:
    """Returns the LoadStat of a rank. The time of its prefills, the last number, is not known."""
    load, config = driver.engine.load(), driver.engine.config
    used = load.active_blocks * config.block_size
    uncached = driver.prompt_tokens_total - driver.cached_tokens_total
    numbers = [load.running, load.waiting, used, config.capacity_tokens, dp_rank]
    return ["LoadStat", *numbers, load.prefill_tokens, used + load.prefill_tokens, config.max_sequences, uncached, 0]
