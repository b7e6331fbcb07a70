"""Decodes the batches of KV events of vLLM, SGLang and engines with the same format, in msgpack.

A batch is an array ``[timestamp, events, rank]``, or a map in some development versions. An event is an array with its
type first (vLLM up to 0.23, SGLang up to 0.5.19) or a map with the key ``type``. Fields were only ever appended, so
missing fields have their defaults, and unknown ones are ignored. Each event is decoded by itself: a malformed
one does not affect the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec
from kvrouter.publisher.errors import InvalidEvent
from kvrouter.publisher.events import engine_hash_of, engine_hashes_of
from kvrouter.v1.common_pb2 import Tier

Dialect = Literal["vllm", "sglang"]
"""Whose order of fields events in array form have. The first six are the same."""

_STORED_FIELDS: Mapping[Dialect, Sequence[str]] = {
    "vllm": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership"),
        *("session_id", "lookahead_token_ids"),
    ),
    "sglang": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("cache_salt", "session_id", "lora_name"),
    ),
}
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_REQUIRED = {"BlockStored": 4, "BlockRemoved": 1, "AllBlocksCleared": 0}

_TIERS = {
    "gpu": Tier.TIER_DEVICE,
    "cpu": Tier.TIER_HOST,
    "cpu_pinned": Tier.TIER_HOST,
    "disk": Tier.TIER_DISK,
    "storage": Tier.TIER_DISK,
    "external": Tier.TIER_SHARED,
    "shared_storage": Tier.TIER_SHARED,
}


MAX_EVENTS = 1 << 18
"""Maximum number of events in a batch. A step storing and evicting a million tokens has a quarter of it."""


class UndecodableBatch(ValueError):
    """A payload is no batch of events; nothing of it can be used."""


class UndecodableEvent(ValueError):
    """An event cannot be used. ``reason`` is a label for statistics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks were stored."""

    block_hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_size: int
    tier: Tier
    lora_id: int | None
    lora_name: str
    cache_salt: str
    extra_keys: Sequence[Sequence[Any]] | None
    """For each block the keys of its hash besides its tokens, untyped; None if the engine reports none."""
    group: int | None
    """Cache group of a hybrid model; None if the engine has a single one."""
    group_kind: str
    """Attention kind of the group, such as "full_attention"; empty if unknown."""
    window: int
    """Tokens that a layer with a sliding window reads; 0 if there is none, or if unknown."""
    is_remote: bool
    """Whether the blocks are in another engine."""
    may_repeat_hits: bool
    """Whether the event may repeat the hits of a request instead of reporting new copies."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks, or copies of them, were removed."""

    block_hashes: Sequence[int]
    malformed: int
    """Number of malformed hashes, which are omitted."""
    tier: Tier
    group: int | None
    is_remote: bool


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks were removed."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message."""

    timestamp: float | None
    """Engine time, seconds; None if it is not a finite number."""
    dp_rank: int | None
    """Data-parallel rank; None if the engine does not say."""
    events: Sequence[Event | UndecodableEvent]
    """In order. An unusable event is replaced by the reason."""


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: Any
    events: msgspec.Raw
    rank: Any = None


class _MapBatch(msgspec.Struct):
    ts: Any
    events: msgspec.Raw
    data_parallel_rank: Any = None
    attn_dp_rank: Any = None


_array_batch = msgspec.msgpack.Decoder(_ArrayBatch)
_map_batch = msgspec.msgpack.Decoder(_MapBatch)
_events = msgspec.msgpack.Decoder(list[msgspec.Raw])
_anything = msgspec.msgpack.Decoder()
_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors of msgspec for malformed input; unhashable keys of maps are a TypeError."""


def decode_batch(payload: bytes, dialect: Dialect = "vllm") -> Batch:
    """Returns the events of a payload.

    Raises:
        UndecodableBatch: the payload is no batch.
    """
    try:
        if payload and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF)):
            named = _map_batch.decode(payload)
            timestamp, raw = named.ts, named.events
            rank = named.attn_dp_rank if named.data_parallel_rank is None else named.data_parallel_rank
        else:
            batch = _array_batch.decode(payload)
            timestamp, raw, rank = batch.ts, batch.events, batch.rank
        if (count := _length(raw)) > MAX_EVENTS:
            raise UndecodableBatch(f"expected at most {MAX_EVENTS} events, received {count}")
        events = _events.decode(raw)
    except UndecodableBatch:
        raise
    except _ERRORS as error:
        raise UndecodableBatch(f"expected [timestamp, events, rank]: {error}") from None
    if rank is not None and not _is_int(rank):
        raise UndecodableBatch(f"expected an integer or null as the rank, received {type(rank).__name__}")
    if not isinstance(timestamp, int | float) or not math.isfinite(timestamp):
        timestamp = None
    return Batch(timestamp, rank, [_decode(each, dialect) for each in events])


def _length(array: msgspec.Raw) -> int:
    """Returns the length of an encoded array, without decoding it; 0 for something else."""
    data = memoryview(array)
    match data[0]:
        case 0xDC:
            return int.from_bytes(data[1:3], "big")
        case 0xDD:
            return int.from_bytes(data[1:5], "big")
        case head:
            return head & 0x0F if head & 0xF0 == 0x90 else 0


def _decode(raw: msgspec.Raw, dialect: Dialect) -> Event | UndecodableEvent:
    try:
        kind, fields = _fields(_anything.decode(raw), dialect)
        if kind == "AllBlocksCleared":
            return Cleared()
        return _stored(fields, dialect) if kind == "BlockStored" else _removed(fields)
    except UndecodableEvent as error:
        return error
    except _ERRORS as error:
        return UndecodableEvent("malformed", f"the event cannot be decoded: {error}")


def _fields(event: object, dialect: Dialect) -> tuple[str, Mapping[str, Any]]:
    """Returns the type and the fields of an event in either form."""
    if isinstance(event, dict):
        kind, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        kind = event[0]
        names = _STORED_FIELDS[dialect] if kind == "BlockStored" else _REMOVED_FIELDS
        if len(event) - 1 < _REQUIRED.get(str(kind), 0):
            _malformed(f"{kind} with {len(event) - 1} fields")
        fields = dict(zip(names, event[1:], strict=False))
    else:
        _malformed("neither an array nor a map")
    if kind not in _REQUIRED:
        raise UndecodableEvent("unknown_type", f"expected one of {', '.join(_REQUIRED)}, received {kind!r:.40}")
    return str(kind), fields


def _stored(fields: Mapping[str, Any], dialect: Dialect) -> Stored:
    lora_id, lora_name = fields.get("lora_id"), fields.get("lora_name")
    if isinstance(lora_id, str):
        lora_id, lora_name = None, lora_name or lora_id
    if lora_id is not None and not _is_int(lora_id):
        # Without it the blocks of an adapter would count for the base model.
        _malformed("lora_id is neither a number nor a string")
    kind = fields.get("kv_cache_spec_kind") or ""
    if not isinstance(kind, str):
        _malformed("kv_cache_spec_kind is not a string")
    parent = fields.get("parent_block_hash")
    return Stored(
        block_hashes=_hashes(_list(fields, "block_hashes")),
        parent=None if parent is None else _hash(parent),
        token_ids=_tokens(_list(fields, "token_ids")),
        block_size=_int(fields, "block_size") or 0,
        tier=_tier(fields),
        lora_id=lora_id,
        lora_name=_text("lora_name", lora_name),
        cache_salt=_text("cache_salt", fields.get("cache_salt")),
        extra_keys=_extra_keys(fields.get("extra_keys")),
        group=_int(fields, "group_idx"),
        group_kind=kind,
        window=_int(fields, "kv_cache_spec_sliding_window") or 0,
        is_remote=_is_remote(fields),
        # vLLM names the session of a request whose hits it reports.
        may_repeat_hits=fields.get("origin") == "REUSED"
        or (dialect == "vllm" and fields.get("session_id") is not None),
    )


def _removed(fields: Mapping[str, Any]) -> Removed:
    hashes, malformed = [], 0
    for value in _list(fields, "block_hashes"):
        try:
            hashes.append(_hash(value))
        except UndecodableEvent:
            malformed += 1
    return Removed(hashes, malformed, _tier(fields), _int(fields, "group_idx"), _is_remote(fields))


def _hashes(values: list[Any]) -> Sequence[int]:
    # Nearly always numbers, all of which are checked at once.
    return list(engine_hashes_of(values)) if {*map(type, values)} <= {int} else [_hash(value) for value in values]


def _hash(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | bytes):
        _malformed(f"a block hash is of type {type(value).__name__}")
    try:
        return engine_hash_of(value)
    except InvalidEvent as error:
        _malformed(str(error))


def _tokens(values: list[Any]) -> list[int]:
    # Nearly always integers; their range is checked when they are hashed.
    return values if {*map(type, values)} <= {int} else [_token(value) for value in values]


def _token(value: object) -> int:
    """Returns a token id. Speculative decoding reports pairs of a token and the next one."""
    if isinstance(value, list) and len(value) == 2:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        _malformed("token_ids has something other than ids of 32 bits")
    return value


def _tier(fields: Mapping[str, Any]) -> Tier:
    medium = fields.get("medium")
    if medium is None:
        return Tier.TIER_DEVICE
    tier = _TIERS.get(medium.casefold()) if isinstance(medium, str) else None
    if tier is None:
        raise UndecodableEvent("unknown_medium", f"expected one of {', '.join(_TIERS)}, received {medium!r:.40}")
    return tier


def _is_remote(fields: Mapping[str, Any]) -> bool:
    return _text("locality", fields.get("locality")).casefold() == "remote"


def _extra_keys(value: object) -> Sequence[Sequence[Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        _malformed("extra_keys is not an array")
    return [[] if each is None else each if isinstance(each, list) else [each] for each in value]


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        _malformed(f"{name} is not an array")
    return value


def _int(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and not (_is_int(value) and value >= 0):
        _malformed(f"{name} is not a number of 0 or more")
    return value


def _text(name: str, value: object) -> str:
    if value is not None and not isinstance(value, str):
        _malformed(f"{name} is not a string")
    return value or ""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _malformed(detail: str) -> NoReturn:
    raise UndecodableEvent("malformed", detail)
