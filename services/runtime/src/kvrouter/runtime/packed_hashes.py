"""Converts hashes between messages and packed buffers, without a Python number for each hash.

A packed buffer holds 8 bytes for each hash, little-endian. The contract declares hashes as ``repeated fixed64``, which
any language can write; its packed encoding is that of a ``bytes`` field. So the encoding of a public message is decoded
as its twin (``packed.proto``), and the other way round. protobuf reads ``repeated fixed64`` in packed
and in unpacked form and always writes the packed one, so hashes of a sender that does not pack are understood as well.
"""

from __future__ import annotations

from kvrouter.v1.common_pb2 import LocalHashes
from kvrouter.v1.packed_pb2 import PackedLocalHashes, PackedReassertBooking
from kvrouter.v1.scheduler_pb2 import ReassertBooking


def pack_local_hashes(message: LocalHashes) -> bytes:
    """Returns the hashes of a message as a packed buffer."""
    return PackedLocalHashes.FromString(message.SerializeToString()).hashes


def local_hashes_message(packed: bytes) -> LocalHashes:
    """Returns a message with the hashes of a packed buffer."""
    return LocalHashes.FromString(PackedLocalHashes(hashes=packed).SerializeToString())


def pack_sequence_hashes(message: ReassertBooking) -> bytes:
    """Returns the sequence hashes of a booking as a packed buffer."""
    return PackedReassertBooking.FromString(message.SerializeToString()).sequence_hashes


def add_sequence_hashes(message: ReassertBooking, packed: bytes) -> None:
    """Appends the hashes of a packed buffer to the sequence hashes of a booking."""
    message.MergeFromString(PackedReassertBooking(sequence_hashes=packed).SerializeToString())
