"""KV events on vLLM's sockets, one pair for each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvrouter.core import Scope as CoreScope
from kvrouter.engines.events.zmq_publisher import ZmqPublisher
from kvrouter.mocker.driver import Publish
from kvrouter.mocker.engine.types import CacheEvent, CacheTier, Cleared, Removed, Stored
from kvrouter.mocker.serving.kv_events import KvEventsConfig
from kvrouter.mocker.tiers import TIERS
from kvrouter.mocker.vllm.media import SimulatedMedia


def make_publisher(config: KvEventsConfig, dp_rank: int, *, block_size: int, host: str) -> ZmqPublisher:
    """Returns the publisher of a rank, which does not listen yet."""
    return ZmqPublisher(
        config.events_endpoint(dp_rank, host),
        replay_endpoint=config.replays_endpoint(dp_rank, host),
        connects=config.connects,
        block_size=block_size,
        topic=config.topic,
        dp_rank=dp_rank,
        buffer_steps=config.buffer_steps,
        high_water_mark=config.hwm,
    )


def publish_to(publisher: ZmqPublisher, media: SimulatedMedia, block_size: int) -> Publish:
    """Returns the receiver of a rank's cache events; the events of a step are one message."""

    def publish(events: Iterable[CacheEvent]) -> None:
        with publisher.batch():
            for event in events:
                match event:
                    case Stored(_, engine_hashes, tier=tier) if tier != CacheTier.DEVICE:
                        publisher.stored_in_tier(engine_hashes, tier=TIERS[tier])
                    case Stored(parent_hash, engine_hashes, tokens, scope):
                        shown, starts = media.shown(memoryview(tokens).cast("I"), block_size)
                        publisher.stored(
                            token_ids=shown,
                            engine_hashes=engine_hashes,
                            parent=parent_hash,
                            scope=CoreScope(*scope),
                            multimodal=starts,
                        )
                    case Removed(engine_hashes, CacheTier.DEVICE):
                        for engine_hash in engine_hashes:  # vLLM removes each block by itself.
                            publisher.removed([engine_hash])
                    case Removed(engine_hashes, tier):
                        publisher.removed(engine_hashes, tier=TIERS[tier])
                    case Cleared():
                        publisher.cleared()

    return publish


def source(config: KvEventsConfig, publisher: ZmqPublisher) -> dict[str, Any]:
    """Returns a rank's entry of ``/kv_event_sources``."""
    return config.model_dump(exclude={"bind", "format"}) | {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint.replace("//0.0.0.0:", "//*:"),
        "replay_endpoint": publisher.replay_endpoint.replace("//0.0.0.0:", "//*:") or None,
    }
