"""Decodes a packed column of varints at once: the lists of protobuf make a Python number of each."""

from __future__ import annotations

import numpy as np
from kvrouter.scheduler.policies.interface import Column

_MORE = 0x80
"""Bit of a byte that another byte of its number follows."""
_BITS = 7
"""Bits of a number in a byte, the lowest first."""


def decode_varints(encoded: bytes) -> Column:
    """Returns the numbers of a packed field, each of which must be below 2^63.

    Raises:
        ValueError: the last number is incomplete, or a number has more than nine bytes.
    """
    data = np.frombuffer(encoded, np.uint8)
    if encoded.isascii():  # no number has a second byte
        return data.astype(np.int64)
    last = np.flatnonzero(data < _MORE)
    first = np.concatenate(([0], last[:-1] + 1)) if len(last) else last
    lengths = last - first + 1
    if not len(last) or last[-1] != len(data) - 1 or lengths.max() > 63 // _BITS:
        raise ValueError(f"{len(encoded)} bytes are no list of varints below 2^63")
    place = np.arange(len(data)) - np.repeat(first, lengths)
    bits = (data & (_MORE - 1)).astype(np.int64) << (_BITS * place)
    numbers: Column = np.add.reduceat(bits, first)
    return numbers
