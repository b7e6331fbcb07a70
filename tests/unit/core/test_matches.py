"""Answers of Indexers: the native reader and the reference read the same in any message, and refuse the same."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import example, given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, read_matches
from kvrouter.core.interface import Matches
from kvrouter.core.reference.matches import read_matches as reference
from kvrouter.net.wire_format import encode_varint
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["read_matches"] != "native", reason="the native core is not built")

LARGEST = (1 << 64) - 1
blocks = st.integers(0, 200) | st.integers(0, (1 << 32) - 1)
numbers = st.integers(0, 3) | st.integers(0, LARGEST)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    count = draw(st.integers(0, 5))
    ranks = st.lists(blocks, min_size=count, max_size=count)
    wide = st.lists(numbers, min_size=count, max_size=count)
    device = draw(ranks)
    lower = [draw(st.just(device) | ranks | st.lists(blocks, max_size=5)) for _ in range(3)]
    return FindMatchesResponse(
        worker_ids=draw(wide),
        dp_ranks=draw(ranks),
        device_blocks=device,
        host_blocks=lower[0],
        disk_blocks=lower[1],
        shared_blocks=lower[2],
        incarnations=draw(wide),
        next_event_ids=draw(wide),
        partial=[True] * count,
        prompt_blocks=draw(blocks),
        pooled_blocks=draw(blocks),
    ).SerializeToString()


def one_by_one(number: int, values: list[int]) -> bytes:
    """A repeated field whose numbers are not packed."""
    return b"".join(encode_varint(number << 3) + encode_varint(value) for value in values)


def read(answer: bytes, most: int) -> Matches | None:
    """What both readers say of an answer; None if they refuse it."""
    results: list[Matches | None] = []
    for reader in (read_matches, reference):
        try:
            results.append(reader(answer, most))
        except ValueError:
            results.append(None)
    native, expected = results
    if native is None or expected is None:
        assert native is expected
        return None
    assert FindMatchesResponse.FromString(native[0]) == FindMatchesResponse.FromString(expected[0])
    assert native[1:] == expected[1:]
    return native


@given(answers(), blocks)
def test_columns_are_those_of_the_message(answer: bytes, most: int) -> None:
    read(answer, most)


@given(answers(), answers(), st.integers(0, 9), st.lists(numbers, max_size=3))
def test_messages_in_parts_are_read_as_protobuf_reads_them(
    one: bytes, other: bytes, number: int, values: list[int]
) -> None:
    read(one + one_by_one(number + 1, values) + other, 1 << 20)


@given(answers(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.binary(min_size=1, max_size=2))))
@example(b"", [(0, 0, b"\x0a"), (1, 0, b"\x01"), (2, 0, b"\xb3")])
@example(b"", [(0, 0, b"\x12\x01"), (2, 0, b"\x80")])
@example(b"", [(0, 0, b"\x3a\x01"), (2, 0, b"\x00")])
def test_damaged_messages_are_read_or_refused_alike(answer: bytes, damages: list[tuple[int, int, bytes]]) -> None:
    """Each damage replaces some bytes."""
    for at, count, inserted in damages:
        start = min(at, len(answer))
        answer = answer[:start] + inserted + answer[start + count :]
    read(answer, 9)


@given(answers(), st.integers(0, 300))
def test_what_is_cut_off_is_refused_or_ends_at_a_field(answer: bytes, at: int) -> None:
    end = min(at, len(answer))
    try:
        FindMatchesResponse.FromString(answer[:end])
    except Exception:
        with pytest.raises(ValueError, match=r"."):
            read_matches(answer[:end], 9)
    else:
        read(answer[:end], 9)


def test_numbers_of_blocks_are_limited_and_equal_tiers_left_out() -> None:
    answer = FindMatchesResponse(
        worker_ids=[1, 2], device_blocks=[3, 99], host_blocks=[3, 99], shared_blocks=[3, 99], pooled_blocks=50
    )
    _, device, lower, pooled, _ = read_matches(answer.SerializeToString(), 8)
    assert (list(array("q", device)), lower, pooled) == ([3, 8], None, 8)


def test_a_varint_without_an_end_is_refused() -> None:
    assert read(b"\x1a\x02\x01\x80", 9) is None
