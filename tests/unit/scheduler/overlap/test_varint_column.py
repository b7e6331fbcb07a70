"""A column of varints is decoded as protobuf does it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.net.wire_format import encode_varint
from kvrouter.scheduler.overlap.indexer_query import decode_varints


@given(st.lists(st.integers(0, 200) | st.integers(0, (1 << 63) - 1)), st.sampled_from([0, 200]))
def test_numbers_of_any_length_are_decoded(numbers: list[int], more: int) -> None:
    numbers += [1] * more
    assert decode_varints(b"".join(map(encode_varint, numbers))).tolist() == numbers


@pytest.mark.parametrize("before", [0, 200])
@pytest.mark.parametrize("encoded", [b"\x80", b"\x01\x80", b"\xff" * 9 + b"\x01"], ids=["no end", "cut off", "long"])
def test_what_is_no_list_of_numbers_is_refused(encoded: bytes, before: int) -> None:
    with pytest.raises(ValueError, match="no list of varints"):
        decode_varints(b"\x07" * before + encoded)
