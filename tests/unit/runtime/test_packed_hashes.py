"""Hashes are converted between messages and packed buffers without loss, also for senders that do not pack."""

from __future__ import annotations

import struct

import pytest
from google.protobuf.message import Message
from hypothesis import given, strategies as st
from kvrouter.runtime.requests import (
    add_sequence_hashes,
    pack_local_hashes,
    pack_sequence_hashes,
    set_local_hashes,
)
from kvrouter.v1.common_pb2 import BookingKey, LocalHashes, RoutingRequest
from kvrouter.v1.packed_pb2 import PackedLocalHashes, PackedReassertBooking
from kvrouter.v1.scheduler_pb2 import ReassertBooking

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=40) | st.integers(0, 3000).map(lambda count: list(range(count)))


def packed(hashes: list[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpacked_field(number: int, hashes: list[int]) -> bytes:
    """Encodes a repeated fixed64 field as an encoder that does not pack."""
    return b"".join(bytes([number << 3 | 1]) + struct.pack("<Q", each) for each in hashes)


@given(HASHES)
def test_local_hashes_keep_their_values_and_order(hashes: list[int]) -> None:
    assert pack_local_hashes(LocalHashes(hashes=hashes)) == packed(hashes)
    routing = RoutingRequest(local_hashes=LocalHashes(hashes=[7]))
    set_local_hashes(routing.local_hashes, packed(hashes))
    assert routing == RoutingRequest(local_hashes=LocalHashes(hashes=hashes))
    if not hashes:  # The field is set nevertheless.
        set_local_hashes((unset := RoutingRequest()).local_hashes, b"")
        assert unset.WhichOneof("prompt") == "local_hashes"


@given(HASHES)
def test_sequence_hashes_keep_their_values_and_order(hashes: list[int]) -> None:
    message = ReassertBooking(booking=BookingKey(request_id="r"), prompt_tokens=7, output_tokens=9)
    expected = ReassertBooking(sequence_hashes=hashes)
    expected.MergeFrom(message)
    add_sequence_hashes(message, packed(hashes))
    assert message == expected
    assert pack_sequence_hashes(message) == packed(hashes)


def test_unpacked_hashes_are_understood() -> None:
    hashes = [1, 2**64 - 1, 0]
    assert pack_local_hashes(LocalHashes.FromString(unpacked_field(1, hashes))) == packed(hashes)
    assert pack_sequence_hashes(ReassertBooking.FromString(unpacked_field(4, hashes))) == packed(hashes)


def test_hashes_that_come_in_parts_are_joined() -> None:
    parts = LocalHashes(hashes=[1, 2]).SerializeToString() + unpacked_field(1, [3])
    assert pack_local_hashes(LocalHashes.FromString(parts)) == packed([1, 2, 3])


def test_fields_of_a_later_contract_are_left_out() -> None:
    hashes = LocalHashes.FromString(LocalHashes(hashes=[1, 2]).SerializeToString() + b"\x7a\x03abc")
    assert pack_local_hashes(hashes) == packed([1, 2])


@pytest.mark.parametrize(
    ("public", "twin"), [(LocalHashes, PackedLocalHashes), (ReassertBooking, PackedReassertBooking)]
)
def test_a_twin_has_the_encoding_of_its_public_message(public: type[Message], twin: type[Message]) -> None:
    for field in twin.DESCRIPTOR.fields:
        same = public.DESCRIPTOR.fields_by_number[field.number]
        assert (same.name, same.type, same.is_packed) == (field.name, same.TYPE_FIXED64, True)
        assert field.type == field.TYPE_BYTES
        hashes = [1, 2**64 - 1, 0]
        encoded = public(**{field.name: hashes}).SerializeToString()
        assert encoded == twin(**{field.name: packed(hashes)}).SerializeToString()
