"""Queries of other routers, as they publish them."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import Scope, local_hashes
from kvrouter.indexer.api.overlap_queries import OverlapQuery
from kvrouter.v1.errors import BadRequest, KvRouterError, PromptTooLong, Unimplemented
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

LIMIT = 1000


def parsed(body: dict[str, Any], *, by_hash: bool = False) -> OverlapQuery:
    return OverlapQuery.parse(json.dumps(body).encode(), by_hash=by_hash, max_prompt_tokens=LIMIT)


def overlaps(*ranks: tuple[int, int, int, int, int]) -> FindMatchesResponse:
    """(worker, rank, blocks in device, host and disk or a faster tier) of each rank."""
    workers, numbers, device, host, disk = zip(*ranks, strict=True)
    return FindMatchesResponse(
        worker_ids=workers,
        dp_ranks=numbers,
        device_blocks=device,
        host_blocks=host,
        disk_blocks=disk,
        shared_blocks=disk,
    )


def test_a_query_of_conductor_is_answered_by_tenant_and_instance() -> None:
    """As in docs/source/api-reference/http/conductor-indexer.md of Mooncake, 2026-08-22."""
    query = parsed(
        {
            "model": "deepseek",
            "lora_name": "sql-adapter",
            "token_ids": [101, 15, 100, 55, 89],
            "tenant_id": "default",
            "instance_id": "7",
            "block_size": 64,
            "cache_salt": "w8a8",
        }
    )
    assert (query.model, query.scope, query.block_size) == ("deepseek", Scope("sql-adapter", "w8a8"), 64)
    assert query.tokens == struct.pack("<5I", 101, 15, 100, 55, 89)
    assert query.answer([(64, overlaps((7, 0, 2, 2, 2), (7, 1, 1, 4, 4), (8, 0, 9, 9, 9)))]) == {
        "default": {"7": {"longest_matched": 256, "GPU": 128, "DP": {"0": 128, "1": 256}, "CPU": 256, "DISK": 256}}
    }


def test_a_query_of_a_conductor_client_names_no_more_than_it_must() -> None:
    """As PyMotor's ``ConductorApiClient.query_conductor`` sends it."""
    query = parsed({"model": "m", "block_size": 4, "token_ids": [1, 2, 3, 4]})
    answer = query.answer([(4, overlaps((7, 0, 1, 1, 1), (8, 0, 0, 0, 0)))])
    assert answer["default"]["7"]["DP"] == {"0": 4}
    assert answer["default"]["8"]["longest_matched"] == 0


def test_a_query_of_dynamo_is_answered_with_scores_and_tiers() -> None:
    """As in lib/kv-router/tests/standalone_indexer_http.rs of Dynamo 1.5.0."""
    query = parsed({"block_hashes": [11, 12, 13], "model_name": "test-model", "routing_group": "default"}, by_hash=True)
    assert query.local_hashes == struct.pack("<3Q", 11, 12, 13)
    assert query.answer([(4, overlaps((7, 0, 2, 3, 3), (8, 0, 2, 2, 2), (9, 0, 0, 0, 0)))]) == {
        "scores": {"7": {"0": 8}, "8": {"0": 8}},
        "frequencies": [],
        "instances": {
            "7": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12},
            "8": {"longest_matched": 8, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 8},
        },
    }


def test_hashes_may_be_signed() -> None:
    query = parsed({"block_hashes": [-1, -(1 << 63), (1 << 64) - 1], "model_name": "m"}, by_hash=True)
    assert query.local_hashes == struct.pack("<3Q", (1 << 64) - 1, 1 << 63, (1 << 64) - 1)


def test_local_hashes_are_those_of_dynamo() -> None:
    """A vector of its block registry: XXH3-64 of little-endian tokens with the seed 1337."""
    assert local_hashes([1, 2, 3, 4], 4) == struct.pack("<Q", 14643705804678351452)


def test_a_tenant_of_dynamo_changes_nothing() -> None:
    """It ignores ``tenant_id`` since routing groups took its place."""
    query = parsed({"model_name": "m", "token_ids": [1], "tenant_id": "other"})
    assert query.group == "default"
    assert parsed({"model": "m", "token_ids": [1], "tenant_id": "other"}).group == "other"
    assert parsed({"model_name": "m", "token_ids": [1], "routing_group": "other"}).group == "other"


def test_workers_of_two_components_are_not_mixed_up() -> None:
    query = parsed({"model_name": "m", "token_ids": [1]})
    same = (4, overlaps((7, 0, 1, 1, 1)))
    with pytest.raises(BadRequest, match="routing_group"):
        query.answer([same, same])
    assert query.answer([same, (8, overlaps((8, 0, 1, 1, 1)))])["scores"] == {"7": {"0": 4}, "8": {"0": 8}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": [1]}, "model"),
        ({"model": "m", "model_name": "m", "token_ids": [1]}, "model"),
        ({"model": "m"}, "token_ids"),
        ({"model": "m", "token_ids": 1}, "token_ids"),
        ({"model": "m", "token_ids": [1, -1]}, "token_ids.1"),
        ({"model": "m", "token_ids": [1 << 32]}, "token_ids.0"),
        ({"model": "m", "token_ids": [1], "block_size": -1}, "block_size"),
        ({"model": "m", "token_ids": [1], "lora_id": 3}, "lora_id"),
        ({"model": "m", "token_ids": [1], "cache_salt": "x" * 1025}, "cache_salt"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed(body)
    assert refused.value.info.field == field


def test_hashes_that_a_salt_may_be_missing_from_are_refused() -> None:
    for salt in ("tenant-a", ""):
        with pytest.raises(BadRequest, match="cache_salt"):
            parsed({"block_hashes": [11, 12], "model_name": "m", "cache_salt": salt}, by_hash=True)
    assert parsed({"block_hashes": [11], "model_name": "m", "cache_salt": None}, by_hash=True)
    for hashes in (None, [1 << 64], [-(1 << 63) - 1]):
        with pytest.raises(BadRequest, match="block_hashes"):
            parsed({"block_hashes": hashes, "model_name": "m"}, by_hash=True)


def test_hashes_of_conductor_are_refused() -> None:
    with pytest.raises(Unimplemented, match="token_ids"):
        parsed({"model": "m", "seq_hashes": [1], "block_size": 4}, by_hash=True)


def test_ids_are_bounded() -> None:
    assert len(parsed({"model": "m", "token_ids": [7] * LIMIT}).tokens) == 4 * LIMIT
    for count in (LIMIT + 1, 100 * LIMIT):
        with pytest.raises(PromptTooLong):
            parsed({"model": "m", "token_ids": [7] * count})
    with pytest.raises(PromptTooLong):
        parsed({"model_name": "m", "block_hashes": [7] * 2 * LIMIT}, by_hash=True)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_body_is_parsed_or_refused(body: bytes | str) -> None:
    for by_hash in (False, True):
        try:
            OverlapQuery.parse(
                body if isinstance(body, bytes) else body.encode(), by_hash=by_hash, max_prompt_tokens=LIMIT
            )
        except KvRouterError:
            continue
