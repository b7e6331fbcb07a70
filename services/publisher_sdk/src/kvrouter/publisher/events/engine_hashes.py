"""Engine hashes: the engines' own ids of their blocks, in any form."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from kvrouter.publisher.errors import InvalidEvent

EngineHash = SupportsIndex | bytes
"""A block's id: a number of 64 bits, signed or unsigned (an int, a numpy integer), or a digest of at least 8 bytes."""

_U64 = (1 << 64) - 1


def engine_hash_of(value: EngineHash) -> int:
    """Returns the 64-bit pattern of a hash; of a digest, that of its last 8 bytes, big-endian.

    Raises:
        InvalidEvent: the value has no such form.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) < 8:
            raise InvalidEvent(f"expected a digest of at least 8 bytes as an engine hash, received {len(value)} bytes")
        return int.from_bytes(value[-8:], "big")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidEvent(f"expected an integer or bytes as an engine hash, received {type(value).__name__}") from None
    if not -(1 << 63) <= number <= _U64:
        raise InvalidEvent(f"expected an engine hash of 64 bits, received {number}")
    return number & _U64


def engine_hashes_of(values: Iterable[EngineHash]) -> list[int]:
    """Returns the 64-bit patterns of hashes.

    Raises:
        InvalidEvent: the values are not iterable, or one is no hash.
    """
    if isinstance(values, bytes | bytearray | str):
        raise InvalidEvent(f"expected a sequence of engine hashes, received {type(values).__name__}")
    try:
        return [engine_hash_of(value) for value in values]
    except TypeError:
        raise InvalidEvent(f"expected a sequence of engine hashes, received {type(values).__name__}") from None
