"""Every form in which engines publish events is decoded, and what is malformed costs nothing else."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from kvrouter.engines.events.vllm_sglang_events import (
    Cleared,
    Dialect,
    Removed,
    Stored,
    UndecodableBatch,
    UndecodableEvent,
    decode_batch,
)
from kvrouter.v1.common_pb2 import Tier

from .engine_frames import CLEARED, payload, removed, stored

MEASURED = bytes.fromhex(
    "93cb3ff800000000000093"
    "89a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfd1ed1ed1ed1ed1ed"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394010203cd012c"
    "aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800"
    "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f69647800"
    "81a474797065b0416c6c426c6f636b73436c656172656400"
)
"""A batch as vLLM 0.33 puts it on the wire."""


def only(event: Any, dialect: Dialect = "vllm") -> Any:
    (decoded,) = decode_batch(payload(event), dialect).events
    return decoded


def test_measured_bytes() -> None:
    batch = decode_batch(MEASURED)
    assert (batch.timestamp, batch.dp_rank) == (1.5, 0)
    store, removal, clear = batch.events
    assert isinstance(store, Stored)
    assert (store.block_hashes, store.parent, store.token_ids) == ([0xD1ED1ED1ED1ED1ED], None, [1, 2, 3, 300])
    assert (store.block_size, store.tier, store.group) == (4, Tier.TIER_DEVICE, 0)
    assert removal == Removed([7], 0, Tier.TIER_DEVICE, 0, False)
    assert clear == Cleared()


@pytest.mark.parametrize("fields", range(4, 16))
def test_a_store_in_array_form_has_as_many_fields_as_its_engine_knew(fields: int) -> None:
    values = [
        *([7, 8], 6, [1, 2, 3, 4], 2, 5, "CPU", "adapter", [None, ["adapter"]]),
        *(1, "full_attention", 32, "REMOTE", "own", "session", [9], "later"),
    ]
    event = only(["BlockStored", *values[:fields]])
    assert isinstance(event, Stored)
    assert (event.block_hashes, event.parent, event.token_ids, event.block_size) == ([7, 8], 6, [1, 2, 3, 4], 2)
    assert event.lora_id == (5 if fields > 4 else None)
    assert event.tier == (Tier.TIER_HOST if fields > 5 else Tier.TIER_DEVICE)
    assert event.lora_name == ("adapter" if fields > 6 else "")
    assert event.extra_keys == ([[], ["adapter"]] if fields > 7 else None)
    assert event.group == (1 if fields > 8 else None)
    assert event.group_kind == ("full_attention" if fields > 9 else "")
    assert event.is_remote == (fields > 11)
    assert event.may_repeat_hits == (fields > 13)


@pytest.mark.parametrize("fields", range(4, 11))
def test_a_store_of_the_other_engine_in_array_form(fields: int) -> None:
    values = [[-7], None, [1], 1, None, "CPU_PINNED", "salt", "session", "adapter", "later"]
    event = only(["BlockStored", *values[:fields]], "sglang")
    assert isinstance(event, Stored)
    assert event.block_hashes == [(1 << 64) - 7]
    assert event.tier == (Tier.TIER_HOST if fields > 5 else Tier.TIER_DEVICE)
    assert event.cache_salt == ("salt" if fields > 6 else "")
    assert event.lora_name == ("adapter" if fields > 8 else "")
    assert not event.may_repeat_hits


@pytest.mark.parametrize("fields", range(1, 7))
def test_a_removal_in_array_form(fields: int) -> None:
    event = only(["BlockRemoved", *[[7], "DISK", 2, "REMOTE", "own", "later"][:fields]])
    tier = Tier.TIER_DISK if fields > 1 else Tier.TIER_DEVICE
    assert event == Removed([7], 0, tier, 2 if fields > 2 else None, fields > 3)


def test_a_clear_in_array_form() -> None:
    assert only(["AllBlocksCleared"]) == Cleared()
    assert only(["AllBlocksCleared", "later"]) == Cleared()


def test_a_batch_in_map_form() -> None:
    batch = decode_batch(msgspec.msgpack.encode({"ts": 2.0, "events": [CLEARED], "data_parallel_rank": 3, "more": 1}))
    assert (batch.timestamp, batch.dp_rank, batch.events) == (2.0, 3, [Cleared()])
    assert decode_batch(msgspec.msgpack.encode({"ts": 2, "events": [], "attn_dp_rank": 4})).dp_rank == 4


@pytest.mark.parametrize(("batch", "rank"), [([1.0, []], None), ([1.0, [], None], None), ([1.0, [], 2, "later"], 2)])
def test_the_rank_may_be_absent(batch: list[Any], rank: int | None) -> None:
    assert decode_batch(msgspec.msgpack.encode(batch)).dp_rank == rank


@pytest.mark.parametrize(
    ("hashed", "expected"),
    [
        (0, 0),
        ((1 << 64) - 1, (1 << 64) - 1),
        (-1, (1 << 64) - 1),
        (-(1 << 63), 1 << 63),
        (bytes(range(32)), 0x18191A1B1C1D1E1F),
        (b"12345678", 0x3132333435363738),
    ],
    ids=str,
)
def test_hashes_become_64_bits(hashed: Any, expected: int) -> None:
    event = only(stored([hashed], 0, parent=hashed))
    assert (event.block_hashes, event.parent) == ([expected], expected)
    assert only(removed([hashed])).block_hashes == [expected]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.TIER_DEVICE),
        ("GPU", Tier.TIER_DEVICE),
        ("gpu", Tier.TIER_DEVICE),
        ("CPU", Tier.TIER_HOST),
        ("cpu", Tier.TIER_HOST),
        ("CPU_PINNED", Tier.TIER_HOST),
        ("DISK", Tier.TIER_DISK),
        ("STORAGE", Tier.TIER_DISK),
        ("EXTERNAL", Tier.TIER_SHARED),
        ("SHARED_STORAGE", Tier.TIER_SHARED),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    assert only(stored([1], 0, medium=medium)).tier == tier
    assert only(removed([1], medium=medium)).tier == tier


def test_pairs_of_speculative_decoding_are_tokens() -> None:
    assert only(stored([1], 0, token_ids=[[1, 2], [2, 3], [3, 4], 4])).token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("text", "malformed"),
        ([], "malformed"),
        (None, "malformed"),
        ({}, "unknown_type"),
        ({"type": None}, "unknown_type"),
        ({"type": ["BlockStored"]}, "malformed"),
        (["BlockMoved", [1]], "unknown_type"),
        ({"type": "BlockMoved"}, "unknown_type"),
        (["BlockStored", [1], None, [1]], "malformed"),
        (["BlockRemoved"], "malformed"),
        ({"type": "BlockStored"}, "malformed"),
        ({"type": "BlockRemoved"}, "malformed"),
        (stored([1], 0, medium="TAPE"), "unknown_medium"),
        (stored([1], 0, medium=5), "unknown_medium"),
        (stored(["text"], 0), "malformed"),
        (stored([b"short"], 0), "malformed"),
        (stored([True], 0), "malformed"),
        (stored([1], 0, parent=1.5), "malformed"),
        (stored([1], 0, block_size=-4), "malformed"),
        (stored([1], 0, block_size="4"), "malformed"),
        (stored([1], 0, token_ids=None), "malformed"),
        (stored([1], 0, token_ids=[1, 2, 3, 1 << 32, "x"]), "malformed"),
        (stored([1], 0, token_ids=[1, 2, [3], 4]), "malformed"),
        (stored([1], 0, lora_name=5), "malformed"),
        (stored([1], 0, lora_id=1.5), "malformed"),
        (stored([1], 0, lora_id=True), "malformed"),
        (stored([1], 0, locality=1), "malformed"),
        (stored([1], 0, cache_salt=b"salt"), "malformed"),
        (stored([1], 0, extra_keys="text"), "malformed"),
        (stored([1], 0, group_idx="0"), "malformed"),
        (stored([1], 0, kv_cache_spec_kind=3), "malformed"),
    ],
    ids=str,
)
def test_a_malformed_event_costs_no_other_event_of_its_batch(event: Any, reason: str) -> None:
    first, bad, last = decode_batch(payload(removed([1]), event, CLEARED)).events
    assert isinstance(first, Removed)
    assert isinstance(bad, UndecodableEvent)
    assert bad.reason == reason
    assert last == Cleared()


def test_a_malformed_hash_costs_no_other_hash_of_a_removal() -> None:
    assert only(removed([1, "text", 2, None])) == Removed([1, 2], 2, Tier.TIER_DEVICE, None, False)


@pytest.mark.parametrize("timestamp", [math.nan, math.inf, None, "now", [1]])
def test_a_timestamp_that_is_none_costs_nothing(timestamp: Any) -> None:
    batch = decode_batch(payload(CLEARED, timestamp=timestamp))
    assert batch.timestamp is None
    assert batch.events == [Cleared()]


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        b"\xc0",
        MEASURED[:-1],
        MEASURED[: len(MEASURED) // 2],
        MEASURED + b"\x00",
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([1.5, None]),
        msgspec.msgpack.encode([1.5, [], "0"]),
        msgspec.msgpack.encode({"ts": 1.0}),
        b"\x91" * 1_000_000,
        b"\x92\x00\x91" + b"\x91" * 1_000_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xc6\xff\xff\xff\xff",
    ],
    ids=lambda encoded: f"{encoded[:8].hex()}-{len(encoded)}",
)
def test_what_is_no_batch_is_refused_as_a_whole(encoded: bytes) -> None:
    with pytest.raises(UndecodableBatch):
        decode_batch(encoded)


def test_ten_thousand_events_in_a_batch() -> None:
    batch = decode_batch(payload(*(removed([number]) for number in range(10_000))))
    assert len(batch.events) == 10_000


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(encoded: bytes) -> None:
    with contextlib.suppress(UndecodableBatch):
        decode_batch(encoded)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from([*stored([1], 0), "extra_keys", "group_idx", "kv_cache_spec_kind", "lora_name", "cache_salt"])


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from([stored([1], 0), removed([1]), CLEARED]))
def test_any_fields_are_decoded_or_refused(fields: dict[str, Any], event: dict[str, Any]) -> None:
    _, last = decode_batch(payload(event | fields, CLEARED)).events
    assert last == Cleared()
