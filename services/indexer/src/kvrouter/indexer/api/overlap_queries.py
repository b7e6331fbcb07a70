"""Overlap queries of other routers: the JSON of Mooncake Conductor (RFC #1403) and of Dynamo's standalone indexer.

Both name a prompt by its tokens, and get the overlap of every instance in tokens. Conductor names the model ``model``,
Dynamo ``model_name``, which tells the two apart. Instances are workers; a tenant or routing group is a component.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from kvrouter.core import NotATokenId, Scope, tokens_from_json
from kvrouter.v1.errors import BadRequest, PromptTooLong, Unimplemented
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

ANY_GROUP = "default"
"""The tenant or routing group that stands for all components of the model."""
TOKEN_BYTES = 4
HASH_BYTES = 8
_MAX_NAME_BYTES = 1024
_MAX_BLOCK_SIZE = 1 << 20


class _Body(msgspec.Struct):
    """The fields of both forms; others are ignored."""

    model: str = ""
    model_name: str = ""
    token_ids: msgspec.Raw = msgspec.Raw()
    block_hashes: list[int] | None = None
    seq_hashes: list[int] | None = None
    block_hash: list[int] | None = None
    block_size: int = 0
    tenant_id: str | None = None
    routing_group: str | None = None
    instance_id: str | int | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class OverlapQuery:
    """A query in either form."""

    model: str
    group: str
    """Name of a component of the model; ANY_GROUP for all of them."""
    scope: Scope
    tokens: bytes
    """Packed token ids; empty for a query by hashes."""
    local_hashes: bytes
    """Packed local hashes; empty for a query by tokens."""
    block_size: int
    """The one that the client assumes; 0 if it names none."""
    instance: str
    """Id of the worker that is asked about; empty for all."""
    is_conductor: bool
    """Whether the answer has the form of Conductor."""

    @classmethod
    def parse(cls, body: bytes, *, by_hash: bool, max_prompt_tokens: int) -> OverlapQuery:
        """Parses a body; ``by_hash`` for one of /query_by_hash.

        Raises:
            BadRequest: a field is malformed, missing or contradicts another.
            PromptTooLong: the prompt has more than ``max_prompt_tokens`` tokens, or more hashes.
            Unimplemented: the prompt is named by hashes of Conductor.
        """
        if body.count(b",") > max_prompt_tokens + len(_Body.__struct_fields__):
            raise PromptTooLong(body.count(b","), max_prompt_tokens)
        try:
            given = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"body: {error}"[:512], advice="Send one JSON object, as the guide shows.") from None
        if bool(given.model) == bool(given.model_name):
            raise _invalid("model", "expected either model (Conductor) or model_name (Dynamo)")
        tokens, hashes = b"", b""
        if not by_hash:
            tokens = _tokens(given.token_ids, max_prompt_tokens)
        elif given.model:
            raise Unimplemented(
                "sequence hashes depend on a seed of Conductor, which the Indexer does not know",
                advice="Send token_ids to /query, or local hashes with model_name.",
            )
        else:
            hashes = _packed(given.block_hashes)
        if given.lora_id is not None and not given.lora_name:
            raise _invalid("lora_id", "expected the adapter's name")
        if by_hash and given.cache_salt is not None:
            raise _invalid("cache_salt", "hashes include their salt already")
        if not 0 <= given.block_size <= _MAX_BLOCK_SIZE:
            raise _invalid("block_size", f"expected 1 to {_MAX_BLOCK_SIZE}")
        scope = Scope(_name("lora_name", given.lora_name), _name("cache_salt", given.cache_salt))
        group = given.tenant_id if given.model else given.routing_group
        return cls(
            _name("model", given.model or given.model_name),
            ANY_GROUP if group is None else _name("tenant_id" if given.model else "routing_group", group),
            scope,
            tokens,
            hashes,
            given.block_size,
            "" if given.instance_id is None else _name("instance_id", str(given.instance_id)),
            is_conductor=bool(given.model),
        )

    def answer(self, found: Iterable[tuple[int, FindMatchesResponse]]) -> dict[str, Any]:
        """Returns the body of the answer, from the block size and the overlaps of each component.

        Raises:
            BadRequest: workers of several components have the same id, and the query names no component.
        """
        instances: dict[int, list[_RankOverlap]] = {}
        for block_size, overlaps in found:
            if not instances.keys().isdisjoint(overlaps.worker_ids):
                field = "tenant_id" if self.is_conductor else "routing_group"
                raise _invalid(field, "components of the model have workers of the same id: name one of them")
            for rank in _ranks(overlaps, block_size):
                if not self.instance or self.instance == str(rank.worker_id):
                    instances.setdefault(rank.worker_id, []).append(rank)
        if self.is_conductor:
            return {self.group: {str(worker_id): _conductor(ranks) for worker_id, ranks in instances.items()}}
        hits = {worker_id: ranks for worker_id, ranks in instances.items() if _most(rank.shared for rank in ranks)}
        scores = {
            str(worker_id): {str(rank.dp_rank): rank.device for rank in ranks if rank.device}
            for worker_id, ranks in hits.items()
        }
        return {
            "scores": {worker_id: ranks for worker_id, ranks in scores.items() if ranks},
            "frequencies": [],
            "instances": {str(worker_id): _dynamo(ranks) for worker_id, ranks in hits.items()},
        }


@dataclass(frozen=True, slots=True)
class _RankOverlap:
    """Overlap of a rank in tokens: in each tier or a faster one."""

    worker_id: int
    dp_rank: int
    device: int
    host: int
    disk: int
    shared: int


def _ranks(overlaps: FindMatchesResponse, block_size: int) -> Iterable[_RankOverlap]:
    names = zip(overlaps.worker_ids, overlaps.dp_ranks, strict=True)
    tiers = zip(overlaps.device_blocks, overlaps.host_blocks, overlaps.disk_blocks, overlaps.shared_blocks, strict=True)
    for name, blocks in zip(names, tiers, strict=True):
        yield _RankOverlap(*name, *(block_size * each for each in blocks))


def _conductor(ranks: Sequence[_RankOverlap]) -> dict[str, Any]:
    return {
        "longest_matched": _most(rank.shared for rank in ranks),
        "GPU": _most(rank.device for rank in ranks),
        "DP": {str(rank.dp_rank): rank.shared for rank in ranks},
        "CPU": _most(rank.host for rank in ranks),
        "DISK": _most(rank.shared for rank in ranks),
    }


def _dynamo(ranks: Sequence[_RankOverlap]) -> dict[str, Any]:
    return {
        "longest_matched": _most(rank.shared for rank in ranks),
        "gpu": _most(rank.device for rank in ranks),
        "dp": {str(rank.dp_rank): rank.device for rank in ranks},
        "cpu": _most(rank.host for rank in ranks),
        "disk": _most(rank.shared for rank in ranks),
    }


def _most(tokens: Iterable[int]) -> int:
    return max(tokens, default=0)


def _tokens(text: msgspec.Raw, limit: int) -> bytes:
    encoded = bytes(text)
    if not encoded.startswith(b"["):
        raise _invalid("token_ids", "expected a list of token ids")
    try:
        tokens = tokens_from_json(encoded, limit)
    except NotATokenId as error:
        raise _invalid(f"token_ids.{error.index}", "expected an integer from 0 to 2^32 - 1") from None
    if len(tokens) > limit * TOKEN_BYTES:
        raise PromptTooLong(1 + encoded.count(b","), limit)
    return tokens


def _packed(hashes: list[int] | None) -> bytes:
    if hashes is None:
        raise _invalid("block_hashes", "expected a list of local hashes")
    try:
        # Dynamo writes them signed.
        return struct.pack(
            f"<{len(hashes)}Q", *(each + (1 << 64) if -(1 << 63) <= each < 0 else each for each in hashes)
        )
    except struct.error:
        raise _invalid("block_hashes", "expected integers of 64 bits, signed or unsigned") from None


def _name(field: str, value: str | None) -> str:
    if value is not None and len(value.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise _invalid(field, f"expected at most {_MAX_NAME_BYTES} bytes")
    return value or ""


def _invalid(field: str, message: str) -> BadRequest:
    return BadRequest(f"{field}: {message}", field=field, advice="Correct the field, or leave it out.")
