"""Translates the events of TensorRT-LLM's ``get_kv_cache_events`` into reports to the publishers of its ranks.

Run it in the engine's process, which needs ``event_buffer_max_size`` above 0:

    adapter = TensorRtLlmEvents({0: worker.rank(0)}, block_size=32)
    async for event in llm.get_kv_cache_events_async(timeout=5):
        adapter.apply(event)

An event has an ``event_id`` (consecutive for each rank), a ``window_size``, perhaps an ``attention_dp_rank``, and
``data``: created, stored, removed or updated. The engine reports each attention window apart, in later versions each
group of layers (``layer_group_id``), and partial blocks too. Hashes are numbers or, in later versions, hexadecimal
digests.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core import Scope
from kvrouter.engines.fields import split_salt
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import InvalidEvent, UnknownParent
from kvrouter.publisher.events import engine_hash_of
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.v1.common_pb2 import Tier

log = get_logger(__name__)

_TIERS = (Tier.TIER_DEVICE, Tier.TIER_HOST, Tier.TIER_DISK)
"""Tiers by cache level."""


_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors of reading a malformed event."""


class _LeftOut(Exception):
    """An event cannot be used. ``reason`` is a label for statistics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class _Rank:
    publisher: RankPublisher
    next_event_id: int = 0
    window: int | None = None
    """The largest attention window, whose blocks decide about prefixes; None if the events name none."""
    layer_group: int | None = None
    """The first group of layers with its window; others with it report the same blocks. None if events name none."""
    partial_blocks: set[int] = field(default_factory=set)


class TensorRtLlmEvents:
    """Applies events in the order in which the engine returns them. Not thread-safe."""

    def __init__(
        self, ranks: Mapping[int, RankPublisher], *, block_size: int, lora_names: Mapping[int, str] | None = None
    ) -> None:
        """Args:
        ranks: Publishers by data-parallel rank.
        block_size: Tokens per block of the engine (``tokens_per_block``).
        lora_names: Names of LoRA adapters by number, for events without the name.
        """  # noqa: D205
        self.applied = 0
        """Applied events."""
        self.left_out: Counter[str] = Counter()
        """Omitted events and blocks, by reason."""
        self._ranks = {dp_rank: _Rank(publisher) for dp_rank, publisher in ranks.items()}
        self._block_size = block_size
        self._lora_names = lora_names or {}

    def apply(self, event: Mapping[str, Any] | str) -> None:
        """Applies an event, or its JSON. Never raises because of its content."""
        try:
            decoded = json.loads(event) if isinstance(event, str) else event
            rank = self._ranks.get(decoded.get("attention_dp_rank") or 0)
            event_id = int(decoded["event_id"])
        except _MALFORMED as error:
            self._leave_out("malformed", error)
            return
        if rank is None:
            self._leave_out("unknown_rank")
            return
        self._follow(rank, event_id)
        try:
            with rank.publisher.reporting(event_id):
                self._report(rank, decoded)
        except _LeftOut as error:
            self._leave_out(error.reason, error)
            if error.reason != "other_window":
                rank.publisher.events_lost(removals=False)
        except (*_MALFORMED, InvalidEvent) as error:
            reason = "malformed"
            if isinstance(error, InvalidEvent):
                reason = "unknown_parent" if isinstance(error, UnknownParent) else "invalid"
            self._leave_out(reason, error)
            rank.publisher.events_lost(removals=False)
        else:
            self.applied += 1

    def _leave_out(self, reason: str, error: Exception | None = None) -> None:
        self.left_out[reason] += 1
        if reason == "malformed" and self.left_out[reason] == 1:
            log.warning("adapter.event_malformed", error=repr(error))

    def _follow(self, rank: _Rank, event_id: int) -> None:
        """Detects missing events, and a restart of the engine."""
        if event_id != rank.next_event_id:
            rank.partial_blocks.clear()
        if event_id < rank.next_event_id:
            rank.publisher.restarted()
        elif event_id > rank.next_event_id:
            # The engine drops events while its buffer is full.
            self.left_out["gap"] += 1
            rank.publisher.events_lost()
        rank.next_event_id = event_id + 1

    def _report(self, rank: _Rank, event: Mapping[str, Any]) -> None:
        data, window = event["data"], event.get("window_size")
        kind = data.get("type") or _kind(data)
        if window is not None and (rank.window is None or window > rank.window):
            if rank.window is not None and kind != "created":
                # Events of a smaller window were taken for those that decide about prefixes.
                rank.publisher.events_lost()
            rank.window, rank.layer_group = window, event.get("layer_group_id")
        if kind == "created":
            return
        if window is not None and (window != rank.window or event.get("layer_group_id") != rank.layer_group):
            raise _LeftOut("other_window")
        match kind:
            case "stored":
                self._store(rank, data)
            case "removed":
                self._remove(rank, data["block_hashes"])
            case "updated":
                self._update(rank, data)
            case _:
                raise _LeftOut("unknown_type")

    def _store(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        parent = None if data.get("parent_hash") is None else _hash(data["parent_hash"])
        full = []
        for block in data["blocks"]:
            if len(block["tokens"]) > self._block_size:
                raise _LeftOut("block_size")
            if len(block["tokens"]) < self._block_size:
                # Nothing can follow it; its removal is reported later.
                rank.partial_blocks.add(_hash(block["block_hash"]))
                self.left_out["partial_block"] += 1
                break
            full.append(block)
        scope = None
        if parent is None:
            tenant, salt = split_salt(str(full[0].get("cache_salt") or "") if full else "")
            scope = Scope(lora_name=self._adapter(data, full), cache_salt=salt, tenant=tenant)
        # Blocks of one event may be in different tiers.
        while full:
            tier = _tier(full[0].get("cache_level", 0))
            run = [full.pop(0)]
            while full and _tier(full[0].get("cache_level", 0)) == tier:
                run.append(full.pop(0))
            rank.publisher.stored(
                token_ids=[token["token_id"] for block in run for token in block["tokens"]],
                engine_hashes=[_hash(block["block_hash"]) for block in run],
                parent=parent,
                tier=tier,
                scope=scope,
                multimodal=[(index, content) for index, block in enumerate(run) for content in _content(block)],
            )
            parent, scope = _hash(run[-1]["block_hash"]), None

    def _remove(self, rank: _Rank, hashes: Sequence[int | str]) -> None:
        for value in hashes:
            try:
                engine_hash = _hash(value)
            except InvalidEvent as error:
                # The others are removed all the same.
                self._leave_out("invalid", error)
                rank.publisher.events_lost(removals=False)
                continue
            if engine_hash in rank.partial_blocks:
                rank.partial_blocks.discard(engine_hash)
                continue
            tiers = [tier for tier in _TIERS if rank.publisher.is_resident(engine_hash, tier=tier)]
            for tier in tiers or _TIERS[:1]:
                rank.publisher.removed([engine_hash], tier=tier)

    def _update(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        """Moves a block to another tier; changes of its priority alone mean nothing."""
        level = data.get("cache_level")
        if not level or level["old_value"] == level["new_value"]:
            return
        engine_hash = _hash(data["block_hash"])
        old = _tier(level["old_value"])
        if engine_hash in rank.partial_blocks or not rank.publisher.is_resident(engine_hash, tier=old):
            return
        # It leaves its tier, even for a level that is not known.
        if level["new_value"] in range(len(_TIERS)):
            rank.publisher.stored_in_tier([engine_hash], tier=_tier(level["new_value"]))
        else:
            self.left_out["unknown_cache_level"] += 1
        rank.publisher.removed([engine_hash], tier=old)

    def _adapter(self, data: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> str:
        """Returns the LoRA adapter of an event, which versions of the engine name in the event or in its blocks."""
        for source in (data, *blocks[:1]):
            if source.get("lora_name"):
                return str(source["lora_name"])
            if number := source.get("lora_id"):
                return self._lora_names.get(number, str(number))
        return ""


def _kind(data: Mapping[str, Any]) -> str:
    """Returns the type of unnamed data, by its fields."""
    for kind, name in (
        ("created", "num_blocks_per_cache_level"),
        ("stored", "blocks"),
        ("removed", "block_hashes"),
        ("updated", "block_hash"),
    ):
        if name in data:
            return kind
    return ""


def _hash(value: int | str) -> int:
    """Returns the 64-bit pattern of a block's hash, a number or a hexadecimal digest.

    Raises:
        InvalidEvent: it is neither.
    """
    if not isinstance(value, str):
        return engine_hash_of(value)
    try:
        return engine_hash_of(bytes.fromhex(value))
    except ValueError:
        raise InvalidEvent(
            f"expected a number or a hexadecimal digest as a block hash, received {value!r:.40}"
        ) from None


def _tier(level: int) -> Tier:
    if level not in range(len(_TIERS)):
        raise _LeftOut("unknown_cache_level")
    return _TIERS[level]


def _content(block: Mapping[str, Any]) -> list[str | bytes]:
    """Returns the content starting in a block, and other keys of its hash."""
    keys = block.get("mm_keys") or ()
    content: list[str | bytes] = [str(key["hash"]) for key in keys if not key.get("start_offset", 0)]
    extra = [int(token.get("token_extra_id") or 0) for token in block["tokens"]]
    if any(extra) and not keys:
        content.append(struct.pack(f"<{len(extra)}Q", *extra))
    return content
