"""Decodes a packed column of varints at once: the lists of protobuf make a Python number of each."""

from __future__ import annotations

import numpy as np
from kvrouter.scheduler.policies.interface import Column
from numpy.typing import NDArray

_MORE = 0x80
"""Bit of a byte with a successor in its number."""
_BITS = 7
"""Bits of a number in a byte, the lowest first."""
_LONGEST = 63
"""Bits of the longest number."""
_FEW_BYTES = 128
"""Length from which a dozen numpy calls take less time than a loop over the bytes."""
_REFUSAL = "the bytes are no list of varints below 2^63"


def decode_varints(encoded: bytes) -> Column:
    """Returns the numbers of a packed field, each of which must be below 2^63.

    Raises:
        ValueError: the last number is incomplete, or a number has more than nine bytes.
    """
    data = np.frombuffer(encoded, np.uint8)
    if encoded.isascii():  # no number has a second byte
        return data.astype(np.int64)
    return _one_by_one(encoded) if len(encoded) < _FEW_BYTES else _all_at_once(data)


def _one_by_one(encoded: bytes) -> Column:
    numbers, number, place = [], 0, 0
    for byte in encoded:
        number |= (byte & (_MORE - 1)) << place
        if byte < _MORE:
            numbers.append(number)
            number, place = 0, 0
        elif place < _LONGEST - _BITS:
            place += _BITS
        else:
            raise ValueError(_REFUSAL)
    if place:
        raise ValueError(_REFUSAL)
    return np.array(numbers, np.int64)


def _all_at_once(data: NDArray[np.uint8]) -> Column:
    last = np.flatnonzero(data < _MORE)
    first = np.concatenate(([0], last[:-1] + 1)) if len(last) else last
    lengths = last - first + 1
    if not len(last) or last[-1] != len(data) - 1 or lengths.max() > _LONGEST // _BITS:
        raise ValueError(_REFUSAL)
    place = np.arange(len(data)) - np.repeat(first, lengths)
    bits = (data & (_MORE - 1)).astype(np.int64) << (_BITS * place)
    numbers: Column = np.add.reduceat(bits, first)
    return numbers
