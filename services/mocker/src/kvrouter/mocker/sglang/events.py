"""KV events in SGLang's format.

SGLang's cache is a tree, so equal content is stored once: copies that the simulated engine has besides the first one
are not published. A removal lists the blocks from the root to the leaf.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from kvrouter.engines.events.zmq_sockets import EventSockets
from kvrouter.mocker.engine.types import CacheEvent, CacheTier, Cleared, Removed, Stored
from kvrouter.mocker.serving.kv_events import KvEventsConfig

_MEDIA = {CacheTier.DEVICE: "GPU", CacheTier.HOST: "CPU_PINNED", CacheTier.SHARED: "EXTERNAL"}


def make_sockets(config: KvEventsConfig, dp_rank: int, *, host: str) -> EventSockets:
    """Returns the sockets of a rank, which do not listen yet."""
    return EventSockets(
        config.events_endpoint(dp_rank, host),
        replay_endpoint=config.replays_endpoint(dp_rank, host),
        connects=config.connects,
        topic=config.topic,
        buffer_steps=config.buffer_steps,
        high_water_mark=config.hwm,
    )


class SglangPublisher:
    """Publishes the cache events of one rank. The first event is that the cache is empty."""

    def __init__(self, sockets: EventSockets, dp_rank: int, block_size: int) -> None:
        self._sockets = sockets
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._copies: Counter[tuple[CacheTier, int]] = Counter()
        self._publish([{"type": "AllBlocksCleared"}])

    def publish(self, events: Iterable[CacheEvent]) -> None:
        """Publishes the events of a step as one message."""
        encoded = [each for event in events for each in self._encode(event)]
        if encoded:
            self._publish(encoded)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        self._sockets.publish(msgspec.msgpack.encode([time.time(), events, self._dp_rank]))

    def _encode(self, event: CacheEvent) -> Iterator[dict[str, Any]]:
        match event:
            case Stored():
                yield from self._stored(event)
            case Removed(engine_hashes, tier):
                self._copies.subtract((tier, each) for each in engine_hashes)
                gone = [each for each in reversed(engine_hashes) if not self._copies[tier, each]]
                for each in gone:
                    del self._copies[tier, each]
                if gone:
                    yield {"type": "BlockRemoved", "block_hashes": list(map(_signed, gone)), "medium": _MEDIA[tier]}
            case Cleared():
                self._copies.clear()
                yield {"type": "AllBlocksCleared"}

    def _stored(self, event: Stored) -> Iterator[dict[str, Any]]:
        """Yields a store for each run of blocks of which there was no copy."""
        parent, run, tokens = event.parent_hash, list[int](), list[int]()
        run_parent = parent
        all_tokens, size = memoryview(event.tokens).cast("I"), self._block_size
        for number, engine_hash in enumerate(event.engine_hashes):
            self._copies[event.tier, engine_hash] += 1
            if self._copies[event.tier, engine_hash] == 1:
                run.append(engine_hash)
                tokens += all_tokens[number * size : (number + 1) * size]
            else:
                if run:
                    yield self._store(event, run_parent, run, tokens)
                run, tokens, run_parent = [], [], engine_hash
        if run:
            yield self._store(event, run_parent, run, tokens)

    def _store(self, event: Stored, parent: int | None, hashes: list[int], tokens: list[int]) -> dict[str, Any]:
        stored: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": list(map(_signed, hashes)),
            "parent_block_hash": None if parent is None else _signed(parent),
            "token_ids": tokens,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": _MEDIA[event.tier],
        }
        # SGLang leaves fields out that have their defaults.
        if event.scope.cache_salt:
            stored["cache_salt"] = event.scope.cache_salt
        if event.scope.lora_name:
            stored["lora_name"] = event.scope.lora_name
        return stored


def _signed(engine_hash: int) -> int:
    return engine_hash - (1 << 64) if engine_hash >> 63 else engine_hash


def describe(
    config: KvEventsConfig, sockets: EventSockets, load: EventSockets | None, *, block_size: int, dp_size: int
) -> dict[str, Any]:
    """Returns ``kv_events`` of ``/server_info``, from the sockets of rank 0 for events and for load."""
    host, _, port = sockets.endpoint.removeprefix("tcp://").rpartition(":")
    described = {
        "publisher": "zmq",
        "endpoint_host": "*" if host == "0.0.0.0" else host,  # noqa: S104
        "endpoint_port_base": int(port),
        "topic": config.topic,
        "block_size": block_size,
        "dp_size": dp_size,
    }
    if sockets.replay_endpoint:
        described["replay_endpoint_port_base"] = int(sockets.replay_endpoint.rpartition(":")[2])
    if load is not None:
        described["load_endpoint_port_base"] = int(load.endpoint.rpartition(":")[2])
        described["load_topic"] = load.topic
    return described
