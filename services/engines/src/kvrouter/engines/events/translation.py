"""Translates the decoded events of one rank into reports to its publisher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core import Scope
from kvrouter.engines.events.checkpoints import Checkpoints
from kvrouter.engines.events.vllm_sglang_events import Batch, Cleared, Event, Removed, Stored, UndecodableEvent
from kvrouter.engines.fields import split_salt
from kvrouter.publisher.errors import InvalidEvent, UnknownParent
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.v1.common_pb2 import Tier

_PREFIX_GROUPS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups whose blocks decide how much of a prefix can be reused."""

_WINDOW_GROUPS = frozenset({"sliding_window", "sliding_window_mla"})
"""Kinds of cache groups that need the last blocks of a prefix only."""

_EXPECTED = frozenset({"remote", "other_group", "partial_block", "masked_blocks", "unknown_block"})
"""Reasons to omit an event without making the rank's prefixes incomplete."""


@dataclass(frozen=True, slots=True)
class TranslationOptions:
    """Facts about the engine, missing in its events."""

    block_size: int
    """Tokens per block of the component."""
    lora_names: Mapping[int, str] = field(default_factory=dict)
    """Name of each LoRA adapter by its number in older engines. A number without a name becomes its digits."""
    full_reports: bool = False
    """Whether stores from the start of a sequence, of resident blocks only, repeat the hits of a request."""
    offloaded_blocks: int = 1
    """Blocks in an offloaded chunk, reported by the hash of its last block alone."""


class EventTranslator:
    """Applies the events of one rank to its publisher. Not thread-safe."""

    def __init__(self, rank: RankPublisher, options: TranslationOptions) -> None:
        self.applied = 0
        """Applied events."""
        self.left_out: Counter[str] = Counter()
        """Omitted events and hashes of removals, by reason."""
        self._rank = rank
        self._options = options
        self._groups: dict[int, bool] = {}
        """Cache groups, and whether their blocks decide about prefixes."""
        self._checkpoints = Checkpoints(rank)
        self._has_parts = False
        """Whether blocks are divided, so that groups may have names for blocks of other lengths."""
        self._partial_blocks: set[int] = set()

    def apply(self, batch: Batch, position: int) -> None:
        """Applies a batch as the engine's message number ``position``. Never raises because of its content."""
        with self._rank.reporting(position):
            for event in batch.events:
                try:
                    self._apply(event)
                except UndecodableEvent as error:
                    self._leave_out(error.reason)
            self._checkpoints.settle()

    def lost(self, reason: str) -> None:
        """Drops all blocks, because messages of the engine were lost."""
        self.left_out[reason] += 1
        self._forget()
        self._rank.events_lost()

    def restarted(self) -> None:
        """Drops all blocks, because the engine restarted."""
        self._forget()
        self._groups.clear()
        self._checkpoints = Checkpoints(self._rank)
        self._rank.restarted()

    def _forget(self) -> None:
        self._partial_blocks.clear()
        self._checkpoints.forget()

    def _leave_out(self, reason: str, count: int = 1) -> None:
        self.left_out[reason] += count
        if reason not in _EXPECTED:
            self._rank.events_lost(removals=False)

    def _apply(self, event: Event | UndecodableEvent) -> None:
        match event:
            case UndecodableEvent():
                raise event
            case Stored():
                self._store(event)
            case Removed():
                self._remove(event)
            case Cleared():
                self._forget()
                self._rank.cleared()
        self.applied += 1

    def _store(self, event: Stored) -> None:
        if event.is_remote:
            raise UndecodableEvent("remote", "the blocks are in another engine")
        if not self._is_prefix_group(event):
            self._store_in_group(event)
            return
        if not event.token_ids and not event.block_size:
            self._store_known(self._offloaded(event.block_hashes), event.tier)
            return
        if event.tier != Tier.TIER_DEVICE and not (event.cache_salt or event.extra_keys) and self._knows(event):
            # Tokens of an offloaded block do not say its salt and content; its hash does.
            self._store_known(event.block_hashes, event.tier)
            return
        tokens, blocks, size = len(event.token_ids), len(event.block_hashes), event.block_size
        if 0 < size < self._options.block_size and self._options.block_size % size == 0:
            # The engine reports the whole block once it is full, and removes this part of it.
            self._partial_blocks.update(event.block_hashes)
            raise UndecodableEvent("partial_block", f"{size} of {self._options.block_size} tokens")
        if not size or size % self._options.block_size:
            raise UndecodableEvent("block_size", f"expected {self._options.block_size} tokens, received {size}")
        self._has_parts = size > self._options.block_size
        if tokens > blocks * size:
            # Which blocks are masked is not said, so no hash can be matched with its tokens.
            raise UndecodableEvent("masked_blocks", f"{tokens} tokens for {blocks} blocks of {size}")
        scope, multimodal, repeats = self._scope(event), self._multimodal(event), self._repeats_hits(event)
        if repeats:
            self._checkpoints.repeated(event.block_hashes)
        try:
            self._rank.stored(
                token_ids=event.token_ids,
                engine_hashes=event.block_hashes,
                parent=event.parent,
                tier=event.tier,
                scope=scope,
                multimodal=multimodal,
                new_copies=not repeats,
                block_size=size,
            )
        except UnknownParent as error:
            raise UndecodableEvent("unknown_parent", str(error)) from None
        except InvalidEvent as error:
            raise UndecodableEvent("invalid", str(error)) from None

    def _store_in_group(self, event: Stored) -> None:
        """Notes blocks of layers without full attention, which a hash of the same prefix names in every group."""
        is_known_size = event.block_size in (0, self._options.block_size)
        window = self._window(event) if is_known_size and not self._has_parts else 0
        if event.group is None or not window:
            raise UndecodableEvent("other_group", f"group {event.group} is of kind {event.group_kind}")
        hashes = event.block_hashes if event.block_size else self._offloaded(event.block_hashes)
        self._checkpoints.stored(event.group, window, hashes, may_repeat=self._may_repeat_hits(event))

    def _window(self, event: Stored) -> int:
        """Returns how many of the last blocks of a prefix a group needs; 0 if that is unknown."""
        known = 0 if event.group is None else self._checkpoints.window_of(event.group)
        if known or not event.block_size:
            return known
        if event.group_kind == "mamba":
            return 1
        # As vLLM does; the next token reads itself too.
        is_window = event.group_kind in _WINDOW_GROUPS and event.window
        return max(1, -(-(event.window - 1) // event.block_size)) if is_window else 0

    def _knows(self, event: Stored) -> bool:
        return all(self._rank.chunk(each, 1) for each in event.block_hashes)

    def _store_known(self, hashes: Sequence[int], tier: Tier) -> None:
        """Stores blocks by their hashes alone."""
        missing = len(hashes) - self._rank.stored_in_tier(hashes, tier=tier)
        if missing:
            self._leave_out("unknown_block", missing)

    def _offloaded(self, hashes: Sequence[int]) -> list[int]:
        """Returns the hashes of all blocks in chunks of which the last ones are given."""
        size = self._options.offloaded_blocks
        if size == 1:
            return list(hashes)
        return [each for last in hashes for each in self._rank.chunk(last, size) or (last,)]

    def _remove(self, event: Removed) -> None:
        if event.malformed:
            self._leave_out("malformed", event.malformed)
        if event.is_remote:
            raise UndecodableEvent("remote", "the blocks are in another engine")
        if event.group is not None and not self._groups.get(event.group, True):
            # A hash is the same in all groups, so the removal from one must not touch the others. Of a group without a
            # store yet, as in a resumed relay, the removal counts: better to know less than the engine holds than more.
            if not self._checkpoints.window_of(event.group):
                raise UndecodableEvent("other_group", f"group {event.group} does not decide about prefixes")
            on_device = event.tier == Tier.TIER_DEVICE
            self._checkpoints.removed(
                event.group, event.block_hashes if on_device else self._offloaded(event.block_hashes)
            )
            return
        hashes = [each for each in event.block_hashes if each not in self._partial_blocks]
        self._partial_blocks.difference_update(event.block_hashes)
        if event.tier != Tier.TIER_DEVICE:
            hashes = self._offloaded(hashes)
        self._rank.removed(hashes, tier=event.tier)

    def _is_prefix_group(self, event: Stored) -> bool:
        if event.group is None:
            return not event.group_kind or event.group_kind in _PREFIX_GROUPS
        # Engines that number groups without saying their kind have the main one first.
        kept = event.group_kind in _PREFIX_GROUPS if event.group_kind else event.group == 0
        self._groups[event.group] = kept
        return kept

    def _repeats_hits(self, event: Stored) -> bool:
        return self._may_repeat_hits(event) and all(
            self._rank.is_resident(each, tier=event.tier) for each in event.block_hashes
        )

    def _may_repeat_hits(self, event: Stored) -> bool:
        return (event.may_repeat_hits or self._options.full_reports) and event.parent is None

    def _scope(self, event: Stored) -> Scope | None:
        """Returns the scope of a sequence's first blocks; None to inherit the parent's.

        Events of later blocks may repeat the adapter and omit the salt.
        """
        if event.parent is not None:
            return None
        lora_name = event.lora_name or self._adapter(event.lora_id)
        tenant, salt = split_salt(event.cache_salt or self._salt(event, lora_name))
        return Scope(lora_name=lora_name, cache_salt=salt, tenant=tenant)

    def _adapter(self, lora_id: int | None) -> str:
        # Engines number adapters from 1.
        return self._options.lora_names.get(lora_id, str(lora_id)) if lora_id else ""

    def _salt(self, event: Stored, lora_name: str) -> str:
        """Returns the salt among the untyped keys: the string other than the adapter in a sequence's first block."""
        if not event.extra_keys:
            return ""
        texts = [key for key in event.extra_keys[0] if isinstance(key, str) and key != lora_name]
        if len(texts) > 1:
            raise UndecodableEvent("extra_keys", f"expected one salt, received {len(texts)} strings")
        return texts[0] if texts else ""

    def _multimodal(self, event: Stored) -> list[tuple[int, str | int | bytes]]:
        """Returns the content starting in each block: negative offsets started in an earlier one."""
        starts: list[tuple[int, str | int | bytes]] = []
        parts = event.block_size // self._options.block_size
        for number, keys in enumerate(event.extra_keys or ()):
            for key in keys:
                match key:
                    case str():
                        continue
                    case bytes():
                        starts.append((number * parts, key))
                    case [(str() | int() | bytes()) as content, int() as offset] if offset < event.block_size:
                        if offset >= 0:
                            starts.append((number * parts + offset // self._options.block_size, content))
                    case _:
                        raise UndecodableEvent(
                            "extra_keys",
                            f"expected strings, bytes or pairs with an offset below {event.block_size}, received "
                            f"{_kind(key)}",
                        )
        return starts


def _kind(value: Any) -> str:
    return f"[{', '.join(type(each).__name__ for each in value)}]" if isinstance(value, Sequence) else repr(type(value))
