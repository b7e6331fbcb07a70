"""Publishes KV events in vLLM's ZMQ format, for engines with such consumers.

A relay (``kvrouter relay``) and other routers subscribe to the PUB socket and request missed messages from the replay
socket, as they do with vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
from kvrouter.core import Scope, TokenBuffer
from kvrouter.engines.events.zmq_sockets import EventSockets
from kvrouter.publisher.errors import InvalidConfig, InvalidEvent
from kvrouter.publisher.events import EngineHash, engine_hash_of, engine_hashes_of
from kvrouter.v1.common_pb2 import Tier

_MEDIA = {Tier.TIER_DEVICE: "GPU", Tier.TIER_HOST: "CPU", Tier.TIER_DISK: "STORAGE", Tier.TIER_SHARED: "SHARED_STORAGE"}
_BASE_SCOPE = Scope()


class ZmqPublisher:
    """Publishes the events of one rank while the context lasts.

    The reports may come from any thread and never wait for a consumer: a slow one replays missed messages. Each report
    is a message of its own, except in ``batch``.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        block_size: int,
        replay_endpoint: str = "",
        connects: bool = False,
        topic: str = "",
        dp_rank: int = 0,
        buffer_steps: int = 10_000,
        high_water_mark: int = 100_000,
    ) -> None:
        """Args:
        endpoint: Address to listen on, such as tcp://*:5557; with * as the port a free one is taken.
        block_size: Tokens per block, at least 1.
        replay_endpoint: Address to answer replay requests on; empty for none.
        connects: Whether the consumer listens on ``endpoint`` and the publisher connects to it.
        topic: Topic of the messages.
        dp_rank: Data-parallel rank, which the messages name.
        buffer_steps: Number of messages kept for replay.
        high_water_mark: Messages queued for a consumer; further ones are dropped.

        Raises:
            InvalidConfig: ``block_size`` is below 1.
        """  # noqa: D205
        if block_size < 1:
            raise InvalidConfig(f"block_size is {block_size}: expected 1 or more")
        self._sockets = EventSockets(
            endpoint,
            replay_endpoint=replay_endpoint,
            connects=connects,
            topic=topic,
            buffer_steps=buffer_steps,
            high_water_mark=high_water_mark,
        )
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._lock = threading.RLock()
        self._batch: list[dict[str, Any]] | None = None

    @property
    def endpoint(self) -> str:
        """Address of the events; once it listens, with the port taken."""
        return self._sockets.endpoint

    @property
    def replay_endpoint(self) -> str:
        """Address of replays, likewise; empty for none."""
        return self._sockets.replay_endpoint

    def __enter__(self) -> Self:
        """Listens.

        Raises:
            InvalidConfig: an address cannot be listened on.
        """
        self._sockets.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sockets.__exit__(kind, error, trace)

    def stored(
        self,
        *,
        token_ids: TokenBuffer,
        engine_hashes: Sequence[EngineHash],
        parent: EngineHash | None = None,
        tier: Tier = Tier.TIER_DEVICE,
        scope: Scope = _BASE_SCOPE,
        multimodal: Sequence[tuple[int, int | str | bytes]] = (),
    ) -> None:
        """Publishes stored blocks, each the parent of the next; the arguments are those of ``RankPublisher.stored``.

        Raises:
            InvalidEvent: tokens and hashes do not match.
        """
        hashes = list(engine_hashes_of(engine_hashes))
        tokens = _tokens(token_ids)
        if len(tokens) != len(hashes) * self._block_size:
            raise InvalidEvent(
                f"expected the tokens of {len(hashes)} full blocks of {self._block_size} tokens, received {len(tokens)}"
            )
        self._report(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None if parent is None else engine_hash_of(parent),
                "token_ids": tokens,
                "block_size": self._block_size,
                "lora_id": None,
                "medium": _medium(tier),
                "lora_name": scope.lora_name or None,
                "extra_keys": _extra_keys(len(hashes), scope, multimodal, starts=parent is None),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def stored_in_tier(self, engine_hashes: Sequence[EngineHash], *, tier: Tier) -> None:
        """Publishes that published blocks are in another tier too, each by its hash alone, as vLLM's offloading does.

        Raises:
            InvalidEvent: a hash does not fit into 64 bits, or the tier is unknown.
        """
        for engine_hash in engine_hashes_of(engine_hashes):
            self._report(
                {
                    "type": "BlockStored",
                    "block_hashes": [engine_hash],
                    "parent_block_hash": None,
                    "token_ids": [],
                    "block_size": 0,
                    "lora_id": None,
                    "medium": _medium(tier),
                    "lora_name": None,
                    "group_idx": 0,
                }
            )

    def removed(self, engine_hashes: Sequence[EngineHash], *, tier: Tier = Tier.TIER_DEVICE) -> None:
        """Publishes the removal of blocks, or of one physical copy of each, from a tier.

        Raises:
            InvalidEvent: a hash does not fit into 64 bits, or the tier is unknown.
        """
        hashes = list(engine_hashes_of(engine_hashes))
        self._report({"type": "BlockRemoved", "block_hashes": hashes, "medium": _medium(tier), "group_idx": 0})

    def cleared(self) -> None:
        """Publishes the removal of all blocks."""
        self._report({"type": "AllBlocksCleared"})

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Publishes all reports in the body as one message, such as those of a step. Other threads wait meanwhile."""
        with self._lock:
            if self._batch is not None:
                raise InvalidEvent("expected no batch() inside of another one")
            self._batch = []
            try:
                yield
            finally:
                events, self._batch = self._batch, None
                if events:
                    self._publish(events)

    def _report(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._batch is not None:
                self._batch.append(event)
            else:
                self._publish([event])

    def _publish(self, events: list[dict[str, Any]]) -> None:
        self._sockets.publish(msgspec.msgpack.encode([time.time(), events, self._dp_rank]))


def _tokens(token_ids: TokenBuffer) -> list[int]:
    try:
        view = memoryview(token_ids).cast("B").cast("I") if isinstance(token_ids, bytes | bytearray) else token_ids
        tokens = [int(token) for token in view]
    except (TypeError, ValueError) as error:
        raise InvalidEvent(f"expected token ids, received {type(token_ids).__name__}: {error}") from None
    if tokens and not (min(tokens) >= 0 and max(tokens) < 1 << 32):
        raise InvalidEvent("expected token ids of 32 bits")
    return tokens


def _medium(tier: Tier) -> str:
    try:
        return _MEDIA[tier]
    except KeyError:
        raise InvalidEvent(f"expected device, host, disk or shared as the tier, received {tier}") from None


def _extra_keys(
    blocks: int, scope: Scope, multimodal: Sequence[tuple[int, int | str | bytes]], *, starts: bool
) -> list[list[Any] | None]:
    """Returns the untyped keys of each block: its adapter, the salt of a sequence's first block, content and offset."""
    keys: list[list[Any]] = [[scope.lora_name] if scope.lora_name else [] for _ in range(blocks)]
    for index, content in multimodal:
        if not 0 <= index < blocks:
            raise InvalidEvent(f"multimodal: expected the index of one of {blocks} blocks, received {index}")
        keys[index].append(content if isinstance(content, bytes) else [content, 0])
    if starts and scope.cache_salt and keys:
        keys[0].append(scope.cache_salt)
    return [each or None for each in keys]
